"""SMC and plain decoding side by side, on real servers with the shipped model pair.

    make demo                                      # needs no arguments, takes a few minutes
    .venv/bin/python bench/demo.py --num-steps 4   # other settings: see --help

One after another, five servers answer the same held-out problems through the OpenAI chat route:
the target with SMC speculative decoding, the target alone, SMC's auto and exact modes, and the
draft alone.
The demo ends with a table; ``demo-output/`` holds the numbers, the answers, a plot and the
servers' logs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import httpx
from arguments import positive
from chat import Pass, Sampling, ask, ask_all, connect
from openai import OpenAI, OpenAIError
from pair.task import held_out
from plots import plot_rows
from results import Row, answer_lines, hardware, provenance, summarise, table
from serving import ServerError, describe_log, running, smc_flags, wait_for_records

from sglang_smc.options.server import DEFAULTS, RESAMPLE_AT

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
NUM_SHOWN = 3
#: Problems shown, and used to warm up, lie beyond all that are measured.
FIRST_SHOWN = 1_000_000

READING = """\
How to read it: the draft alone is the accuracy that speculation must not fall to, the target alone
the one that it must keep. Tokens per target pass is what carries over to GPUs, where a pass takes
about as long for many tokens as for one. Tokens per second is what this machine made of it: on a
CPU with models this small a pass is not bound by memory, extra particles cost their full price,
and plain decoding is favoured."""


class Contender(NamedTuple):
    """One server to measure."""

    name: str
    slug: str
    model: Path
    flags: tuple[str, ...] = ()
    uses_target: bool = True
    weighs: bool = False  # SMC whose particles have weights from round to round


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the demo."""
    parser = argparse.ArgumentParser(
        description="SMC and plain decoding side by side, on real servers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--problems", type=positive, default=300, help="held-out problems to measure on")
    add("--num-particles", type=positive, default=DEFAULTS.num_particles, help="N")
    add("--num-steps", type=positive, default=DEFAULTS.num_steps, help="K, drafted a round")
    add("--resample-at", choices=RESAMPLE_AT, default=DEFAULTS.resample_at, help="in mode smc")
    add("--temperature", type=float, default=0.7)
    add("--concurrency", type=positive, default=8, help="requests at a time")
    add("--seed", type=int, default=0, help="request i is sent with seed + i")
    add("--no-auto", action="store_true", help="leave out the auto mode of SMC")
    add("--no-exact", action="store_true", help="leave out the exact mode of SMC")
    add("--no-draft", action="store_true", help="leave out the draft alone")
    add("--pair", type=Path, default=HERE / "pair", help="folder of target and draft")
    add("--output-dir", type=Path, default=Path("demo-output"))
    return parser.parse_args(argv)


def contenders(options: argparse.Namespace) -> list[Contender]:
    """SMC first, since its answers are shown, then what to hold it against."""
    target, draft = options.pair / "target", options.pair / "draft"
    found = [
        Contender("SMC", "smc", target, _flags(options, "smc"), weighs=True),
        Contender("AR, target", "target", target),
    ]
    if not options.no_auto:
        found.append(Contender("SMC, auto", "auto", target, _flags(options, "auto")))
    if not options.no_exact:
        found.append(Contender("SMC, exact", "exact", target, _flags(options, "exact")))
    if not options.no_draft:
        found.append(Contender("AR, draft", "draft", draft, uses_target=False))
    return found


def _flags(options: argparse.Namespace, mode: str) -> tuple[str, ...]:
    return tuple(
        smc_flags(
            options.pair / "draft",
            num_particles=options.num_particles,
            num_steps=options.num_steps,
            resample_at=options.resample_at,
            mode=mode,
        )
    )


def check_pair(folder: Path) -> None:
    """Raise ServerError where a checkpoint is missing: SGLang would look for it on the Hub."""
    for model in (folder / "target", folder / "draft"):
        if not list(model.glob("*.safetensors")):
            raise ServerError(f"{model} holds no checkpoint; see bench/pair/ for how to train one.")


def measure(contender: Contender, options: argparse.Namespace) -> Pass:
    """Start the server, warm it up (for SMC: show answers), ask everything, stop it."""
    sampling = Sampling(options.temperature, options.seed)
    log = options.output_dir / f"server-{contender.slug}.log"
    with running(
        contender.model,
        label=f"server: {contender.name}",
        log=log,
        concurrency=options.concurrency,
        seed=options.seed,
        flags=contender.flags,
    ) as server:
        try:
            client = connect(server.url)
            warm_up(client, sampling, shown=contender.slug == "smc")
            answers, seconds = ask_all(
                client,
                range(options.problems),
                sampling,
                concurrency=options.concurrency,
                label=contender.name,
            )
            ids = [answer.request_id for answer in answers]
            return Pass(answers, seconds, wait_for_records(server, ids))
        except (OpenAIError, httpx.HTTPError, ServerError) as error:
            raise ServerError(f"{contender.name}: {error}\n{describe_log(log)}") from error


def warm_up(client: OpenAI, sampling: Sampling, *, shown: bool) -> None:
    """Ask a few problems that do not count."""
    for index in range(FIRST_SHOWN, FIRST_SHOWN + NUM_SHOWN):
        if shown:
            show(client, index, sampling)
        else:
            ask(client, index, sampling)


def show(client: OpenAI, index: int, sampling: Sampling) -> None:
    """Print a question, its answer as it comes, and whether it is right."""
    item = held_out(index)
    print(f"\n{_paint(item.question, BOLD)}", flush=True)
    answer = ask(client, index, sampling, on_text=lambda text: print(text, end="", flush=True))
    verdict = _paint("right", GREEN) if answer.right else _paint("wrong", RED)
    print(
        f"\n-> {verdict} (the answer is {item.number}); first token after "
        f"{1000 * answer.seconds_to_first:.0f} ms, all after {answer.seconds:.2f} s"
    )


BOLD, GREEN, RED = "1", "32", "31"


def _paint(text: str, code: str) -> str:
    plain = "NO_COLOR" in os.environ or not sys.stdout.isatty()
    return text if plain else f"\033[{code}m{text}\033[0m"


def settings_line(options: argparse.Namespace) -> str:
    """The settings that the numbers depend on, in one line."""
    return (
        f"n={options.problems} problems, N={options.num_particles} particles, "
        f"K={options.num_steps} drafted tokens, temperature {options.temperature:g}, "
        f"{options.resample_at} resampling, {options.concurrency} requests at a time"
    )


def row_of(contender: Contender, run: Pass) -> Row:
    """Its numbers; what is told of particles says nothing where rounds are verified."""
    row = summarise(contender.name, run, uses_target=contender.uses_target)
    return row if contender.weighs else replace(row, ess_share=None, resample_rate=None)


def write_results(
    options: argparse.Namespace, rows: list[Row], runs: dict[Contender, Pass]
) -> None:
    """Write results.json, answers.jsonl and comparison.png."""
    folder = options.output_dir
    content = {
        "settings": {name: _plain(value) for name, value in vars(options).items()},
        "rows": [{**asdict(row), "accuracy": row.accuracy._asdict()} for row in rows],
        "provenance": provenance(REPOSITORY),
    }
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    lines = [line for c, run in runs.items() for line in answer_lines(c.name, run)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "answers.jsonl").write_text(text)
    plot_rows(
        rows,
        folder / "comparison.png",
        title=settings_line(options),
        hardware=f"here, on {hardware()}",
    )


def _plain(value: object) -> object:
    """A setting as JSON; of a path what says something elsewhere too."""
    if not isinstance(value, Path):
        return value
    path = value.resolve()
    inside = path.is_relative_to(REPOSITORY)
    return str(path.relative_to(REPOSITORY)) if inside else path.name


def demo(options: argparse.Namespace) -> None:
    """Measure all contenders and report."""
    start = time.monotonic()
    check_pair(options.pair)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    print(settings_line(options), flush=True)
    runs = {contender: measure(contender, options) for contender in contenders(options)}
    smc, target, *others = [row_of(contender, run) for contender, run in runs.items()]
    rows = [target, smc, *others]  # what the others are read against comes first
    write_results(options, rows, runs)
    print(f"\n{table(rows)}\n\n{READING}\n")
    print(
        f"{time.monotonic() - start:.0f} s in all. In {options.output_dir}/: comparison.png, "
        "results.json, answers.jsonl and the servers' logs."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the demo; the exit status is 0 where it came to its end."""
    options = parse_arguments(argv)
    try:
        demo(options)
    except ServerError as error:
        print(f"\n{_paint('The demo failed.', RED)} {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the server is stopped.", file=sys.stderr)
        return 130
    return 0


def treat_as_ctrl_c(*numbers: signal.Signals) -> None:
    """Let other signals end the demo as Ctrl-C does, so that they stop the server too."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, interrupt)


if __name__ == "__main__":
    treat_as_ctrl_c(signal.SIGTERM, signal.SIGHUP)
    sys.exit(main())
