"""SMC, SGLang's own speculation and plain decoding side by side, with the shipped model pair.

    make demo                                      # needs no arguments, takes a few minutes
    .venv/bin/python bench/demo.py --num-steps 4   # other settings: see --help

A server with SMC speculative decoding starts, and its first answers appear as they are streamed.
Then the target alone, with SGLang's STANDALONE, and the draft alone start beside it, and all answer
the same held-out problems in turns: first one request at a time, as one user asks, then several at
a time. The demo ends with tables; ``demo-output/`` holds them, the answers, a plot and the logs of
the servers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from chat import Answer, Sampling, ask, ask_all, connect
from comparison import (
    Contender,
    Run,
    Turn,
    answer_lines,
    conclusions,
    plain,
    row_of,
    tables,
)
from openai import OpenAI, OpenAIError
from pair.task import held_out
from results import provenance
from serving import (
    Launch,
    Server,
    ServerError,
    describe_log,
    running,
    smc_flags,
    standalone_flags,
    wait_for_records,
)
from study import REPOSITORY, as_script, bar, main_of, positive, prepare_folder
from tqdm import tqdm

from sglang_smc import upstream
from sglang_smc.memory.arena import max_arena
from sglang_smc.options.server import DEFAULTS, RESAMPLE_AT, SMCConfig

#: The published fidelity tables use problems below this, each with its number as the seed.
FIRST_PROBLEM = 10_000
#: Problems shown, and used to warm up, lie beyond all that are measured.
FIRST_SHOWN = 1_000_000
NUM_SHOWN = 3
#: The problems asked several at a time come in so many blocks, and slow rows answer some of them.
NUM_TURNS, NUM_SLOW_TURNS = 4, 3
SMC = "SMC"  # the row that is held against AR in words
#: Drafted a round by STANDALONE, as in SGLang's published comparisons.
STANDALONE_STEPS = 4
#: Of a problem and its answer, with room to spare.
TEXT_TOKENS = 1024

WHY = """\
Why one user and {concurrency} differ: with SMC a target pass has N x (K + 1) = {width} tokens
of each request, with AR one. Some costs of a pass are paid once, whatever is in it: reading the
weights, starting its operations. Others are paid for each token. While the first are the larger,
more tokens in a pass are nearly free. On a GPU that holds up to hundreds of tokens, since reading
memory is the limit. On a CPU with models this small it ends soon: there particles are paid in
full, and the more so the more requests share a pass already. SMC is for few requests at a time.
Tokens per target pass carries over to other machines; tokens per second does not."""
READING = """\
The draft alone has the accuracy that speculation must not fall to, the target alone the one that it
must keep. The problems, {first:,} and up, and their seeds are none of those behind the published
fidelity tables."""


@dataclass(frozen=True)
class Party:
    """A running server, and a client of it."""

    launch: Launch
    server: Server
    client: OpenAI

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Errors within become a ServerError with the end of the server's log."""
        try:
            yield
        except (OpenAIError, httpx.HTTPError, ServerError) as error:
            told = describe_log(self.launch.log)
            raise ServerError(f"{self.launch.label}: {error}\n{told}") from error


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the demo."""
    parser = argparse.ArgumentParser(
        description="SMC and plain decoding side by side, on real servers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--one-user", type=positive, default=16, help="problems asked one at a time")
    add("--problems", type=positive, default=128, help="other problems, asked several at a time")
    add("--concurrency", type=positive, default=8, help="how many at a time")
    add("--num-particles", type=positive, default=DEFAULTS.num_particles, help="N")
    add("--num-steps", type=positive, default=DEFAULTS.num_steps, help="K, drafted a round")
    add("--resample-at", choices=RESAMPLE_AT, default=DEFAULTS.resample_at, help="in mode smc")
    add("--temperature", type=float, default=0.7)
    add("--seed", type=int, default=0, help="problem i is sent with seed + i")
    add("--no-auto", action="store_true", help="leave out the auto mode of SMC")
    add("--no-exact", action="store_true", help="leave out the exact mode of SMC")
    add("--no-standalone", action="store_true", help="leave out SGLang's own speculation")
    add("--no-draft", action="store_true", help="leave out the draft alone")
    add("--pair", type=Path, default=REPOSITORY / "bench" / "pair", help="target and draft")
    add("--output-dir", type=Path, default=Path("demo-output"))
    return parser.parse_args(argv)


def contenders(options: argparse.Namespace) -> list[Contender]:
    """The rows; the three of SMC are answered by one server, each request with its mode."""
    smc = {"mode": "smc", "resample_at": options.resample_at}
    found = [
        Contender("AR, target", "target", "target"),
        Contender(SMC, "smc", "smc", smc, weighs=True),
        Contender("SMC, auto", "auto", "smc", {"mode": "auto"}, is_slow=True),
        Contender("SMC, exact", "exact", "smc", {"mode": "exact"}, is_slow=True),
        Contender(f"STANDALONE, K={STANDALONE_STEPS}", "standalone", "standalone"),
        Contender("AR, draft", "draft", "draft", is_slow=True),
    ]
    names = ("auto", "exact", "standalone", "draft")
    left_out = {name for name in names if getattr(options, f"no_{name}")}
    if not has_standalone():
        left_out.add("standalone")
    return [contender for contender in found if contender.slug not in left_out]


def has_standalone() -> bool:
    """Whether SGLang's own speculation runs here."""
    import torch  # takes seconds, and is needed by servers alone

    return upstream.IS_NEWEST or torch.accelerator.is_available()


def launches(options: argparse.Namespace) -> dict[str, Launch]:
    """The servers; their command lines differ by the SMC flags or the model, and nothing else."""
    target, draft = options.pair / "target", options.pair / "draft"
    sizes = {"num_particles": options.num_particles, "num_steps": options.num_steps}
    slots = options.concurrency * (TEXT_TOKENS + 2 * max_arena(SMCConfig(**sizes)))
    common = ("--max-total-tokens", str(slots), "--sleep-on-idle")  # they live beside each other

    def launch(label: str, name: str, model: Path, flags: Sequence[str] = ()) -> Launch:
        log = options.output_dir / f"server-{name}.log"
        return Launch(label, model, log, options.concurrency, options.seed, (*common, *flags))

    return {
        "smc": launch("the server with SMC", "smc", target, smc_flags(draft, **sizes)),
        "target": launch("the target alone", "target", target),
        "standalone": launch(
            "the server with STANDALONE",
            "standalone",
            target,
            standalone_flags(draft, num_steps=STANDALONE_STEPS),
        ),
        "draft": launch("the draft alone", "draft", draft),
    }


@contextlib.contextmanager
def parties(started: Mapping[str, Launch]) -> Iterator[dict[str, Party]]:
    """These servers for the ``with`` block, started together, each with a client."""
    with running(*started.values()) as servers:
        yield {
            name: Party(launch, server, connect(server.url))
            for (name, launch), server in zip(started.items(), servers, strict=True)
        }


def check_pair(folder: Path) -> None:
    """Raise ServerError where a checkpoint is missing: SGLang would look for it on the Hub."""
    for model in (folder / "target", folder / "draft"):
        if not list(model.glob("*.safetensors")):
            raise ServerError(f"{model} holds no checkpoint; see bench/pair/ for how to train one.")


def show(party: Party, options: argparse.Namespace, began: float) -> None:
    """Print questions, their answers as they come, and whether they are right."""
    for index in range(FIRST_SHOWN, FIRST_SHOWN + NUM_SHOWN):
        item = held_out(index)
        print(f"\n{_paint(item.question, BOLD)}", flush=True)
        asked = time.monotonic()
        with party.blamed():
            sampling = Sampling(options.temperature, options.seed)
            answer = ask(
                party.client, index, sampling, lambda text: print(text, end="", flush=True)
            )
        verdict = _paint("right", GREEN) if answer.right else _paint("wrong", RED)
        print(
            f"\n-> {verdict} (the answer is {item.number}); first token after "
            f"{1000 * answer.seconds_to_first:.0f} ms, all after {answer.seconds:.2f} s"
        )
        if index == FIRST_SHOWN:
            print(f"It came {asked + answer.seconds_to_first - began:.0f} s after the demo began.")
    print()


BOLD, GREEN, RED = "1", "32", "31"


def _paint(text: str, code: str) -> str:
    is_plain = "NO_COLOR" in os.environ or not sys.stdout.isatty()
    return text if is_plain else f"\033[{code}m{text}\033[0m"


def blocks(options: argparse.Namespace) -> list[range]:
    """The problems asked several at a time, in as many blocks as there are turns."""
    first = FIRST_PROBLEM + options.one_user
    size = -(-options.problems // NUM_TURNS)
    return [
        range(first + start, first + min(start + size, options.problems))
        for start in range(0, options.problems, size)
    ]


def measure(runs: Sequence[Run], others: Mapping[str, Party], options: argparse.Namespace) -> None:
    """Warm up; then one problem at a time of each in turn, then a block of each in turn."""
    single = range(FIRST_PROBLEM, FIRST_PROBLEM + options.one_user)
    for run in runs:
        _turn(run, others, range(FIRST_SHOWN, FIRST_SHOWN + 1), options, 1)
    total = len(runs) * len(single)
    with bar(total=total, desc="One user", unit="problem") as line:
        for index in single:
            for run in runs:
                run.alone.append(_turn(run, others, range(index, index + 1), options, 1, line))
    work = [
        (run, block)
        for place, block in enumerate(blocks(options))
        for run in runs
        if place < NUM_SLOW_TURNS or not run.contender.is_slow
    ]
    title = f"{options.concurrency} at a time"
    with bar(total=sum(len(b) for _, b in work), desc=title, unit="problem") as line:
        for run, block in work:
            run.crowd.append(_turn(run, others, block, options, options.concurrency, line))
    _collect(runs, others)


def _turn(
    run: Run,
    others: Mapping[str, Party],
    indices: range,
    options: argparse.Namespace,
    concurrency: int,
    line: tqdm | None = None,
) -> Turn:
    """Ask one contender a block of problems."""
    party, found = others[run.contender.server], []
    sampling = Sampling(options.temperature, options.seed, run.contender.smc)

    def answered(answer: Answer) -> None:
        found.append(answer)
        if line is not None:
            line.set_postfix_str(run.contender.name, refresh=False)
            line.update()

    began = time.perf_counter()
    with party.blamed():
        ask_all(party.client, indices, sampling, concurrency=concurrency, answered=answered)
    return Turn(sorted(found, key=lambda answer: answer.index), time.perf_counter() - began)


def _collect(runs: Sequence[Run], others: Mapping[str, Party]) -> None:
    """Ask the servers' records what they say of each answer."""
    for run in runs:
        party = others[run.contender.server]
        with party.blamed():
            ids = [answer.request_id for answer in run.answers]
            run.infos = wait_for_records(party.server, ids)


def settings_line(options: argparse.Namespace) -> str:
    """The settings that the numbers depend on, in one line."""
    return (
        f"N={options.num_particles} particles, K={options.num_steps} drafted tokens, temperature "
        f"{options.temperature:g}, {options.resample_at} resampling, problems "
        f"{FIRST_PROBLEM} to {FIRST_PROBLEM + options.one_user + options.problems - 1}"
    )


def report(runs: Sequence[Run], options: argparse.Namespace) -> str:
    """Write everything to the output folder; the tables, and what may be said of them."""
    from plots import plot_rows  # takes a second, and is needed once all is measured

    rows = [row_of(run, runs[0]) for run in runs]
    origin = provenance({name: _plain(value) for name, value in vars(options).items()})
    folder, concurrency = options.output_dir, options.concurrency
    content = {"rows": [plain(row) for row in rows], "provenance": origin}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    lines = [json.dumps(line) + "\n" for run in runs for line in answer_lines(run)]
    (folder / "answers.jsonl").write_text("".join(lines))
    note = f"{settings_line(options)}; on {origin['hardware']}, {origin['date'][:10]}."
    markdown = tables(rows, concurrency, style="github")
    (folder / "comparison.md").write_text(f"{note}\n\n{markdown}\n")
    plot_rows(rows, folder / "comparison.png", title=note, concurrency=concurrency)
    smc = next(row for row in rows if row.name == SMC)
    return f"{tables(rows, concurrency)}\n\n{conclusions(smc, concurrency)}\n\n{why(options)}"


def why(options: argparse.Namespace) -> str:
    """What explains the numbers, and is true whatever they are."""
    width = options.num_particles * (options.num_steps + 1)
    parts = (
        WHY.format(width=width, concurrency=options.concurrency),
        READING.format(first=FIRST_PROBLEM),
    )
    return "\n\n".join(textwrap.fill(part, 100) for part in parts)


def _plain(value: object) -> object:
    """A setting as JSON; of a path what says something elsewhere too."""
    if not isinstance(value, Path):
        return value
    path = value.resolve()
    inside = path.is_relative_to(REPOSITORY)
    return str(path.relative_to(REPOSITORY)) if inside else path.name


def demo(options: argparse.Namespace) -> None:
    """Show some answers, measure all contenders, and report."""
    began = time.monotonic()
    check_pair(options.pair)
    prepare_folder(options.output_dir)
    print(settings_line(options), flush=True)
    if not (options.no_standalone or has_standalone()):
        family = upstream.NEWEST.name
        print(f"Without SGLang's STANDALONE: on a CPU it takes SGLang {family}.", flush=True)
    runs = [Run(contender) for contender in contenders(options)]
    needed = {run.contender.server for run in runs}
    first, later = {}, {}
    for name, launch in launches(options).items():
        (first if name == "smc" else later)[name] = launch
    later = {name: launch for name, launch in later.items() if name in needed}
    with parties(first) as smc:
        show(smc["smc"], options, began)
        with parties(later) as others:
            measure(runs, {**smc, **others}, options)
    print(f"\n{report(runs, options)}\n")
    print(
        f"{time.monotonic() - began:.0f} s in all. In {options.output_dir}/: comparison.png, "
        "comparison.md, results.json, answers.jsonl and the servers' logs."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the demo; the exit status is 0 where it came to its end."""
    options = parse_arguments(argv)
    return main_of(lambda: demo(options), "The servers are stopped.")


if __name__ == "__main__":
    as_script(main)
