"""Compare SMC, SGLang's own speculation and plain decoding with the shipped model pair.

    make demo                                      # needs no arguments, takes a few minutes
    .venv/bin/python bench/demo.py --num-steps 4   # other settings: see --help

A server with SMC speculative decoding starts, and its first answers are printed as they stream.
Then the target alone, with SGLang's STANDALONE, and the draft alone start beside it, and all answer
the same held-out problems in turns: first one request at a time, as from one user, then several at
a time. The demo ends with tables; ``demo-output/`` holds them, the answers, a plot and the logs of
the servers.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from results import provenance
from study import REPOSITORY, as_script, bar, main_of, positive, prepare_folder
from tqdm import tqdm

from sglang_smc import upstream
from sglang_smc.options.server import DEFAULTS, RESAMPLE_AT
from sglang_smc.tools.demo.chat import Answer, Sampling, ask_all
from sglang_smc.tools.demo.party import FIRST_SHOWN, PAIR, Common, Party, check_pair, parties, show
from sglang_smc.tools.demo.serving import Launch, smc_flags, standalone_flags

#: Far beyond the problems of bench/fidelity, which also have their numbers as seeds.
FIRST_PROBLEM = 500_000
NUM_SHOWN = 3
#: Number of blocks of the problems run several at a time, and of those that slow rows answer.
NUM_TURNS, NUM_SLOW_TURNS = 4, 3
SMC = "SMC"  # the row that is compared with AR in words
#: K of STANDALONE, as in SGLang's published comparisons.
STANDALONE_STEPS = 4

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


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options of the demo."""
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
    add("--pair", type=Path, default=PAIR, help="target and draft")
    add("--output-dir", type=Path, default=Path("demo-output"))
    return parser.parse_args(argv)


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Return the rows; one server answers the three of SMC, with the mode set per request."""
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
    """Return whether SGLang's own speculation runs on this machine."""
    import torch  # slow to import, and needed only for servers

    return upstream.IS_NEWEST or torch.accelerator.is_available()


def launches(options: argparse.Namespace) -> dict[str, Launch]:
    """Return the servers; their command lines differ only by the SMC flags or the model."""
    target, draft = options.pair / "target", options.pair / "draft"
    sizes = {"num_particles": options.num_particles, "num_steps": options.num_steps}
    launch = Common(options.output_dir, options.concurrency, options.seed, **sizes).launch
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


def blocks(options: argparse.Namespace) -> list[range]:
    """Return the problems run several at a time, in `NUM_TURNS` blocks."""
    first = FIRST_PROBLEM + options.one_user
    size = -(-options.problems // NUM_TURNS)
    return [
        range(first + start, first + min(start + size, options.problems))
        for start in range(0, options.problems, size)
    ]


def measure(runs: Sequence[Run], others: Mapping[str, Party], options: argparse.Namespace) -> None:
    """Warm up; then run one problem at a time of each in turn, then a block of each in turn."""
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
    """Run a block of problems on one contender."""
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
    """Read the ``meta_info`` of all answers from the servers' records."""
    for run in runs:
        run.infos = others[run.contender.server].infos(run.answers)


def settings_line(options: argparse.Namespace) -> str:
    """Return the settings that the numbers depend on, in one line."""
    return (
        f"N={options.num_particles} particles, K={options.num_steps} drafted tokens, temperature "
        f"{options.temperature:g}, {options.resample_at} resampling, problems "
        f"{FIRST_PROBLEM} to {FIRST_PROBLEM + options.one_user + options.problems - 1}"
    )


def report(runs: Sequence[Run], options: argparse.Namespace) -> str:
    """Write all results to the output folder; return the tables and conclusions."""
    from plots import plot_rows  # slow to import, and needed only after the measurement

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
    """Return an explanation of the numbers that holds for any outcome."""
    width = options.num_particles * (options.num_steps + 1)
    parts = (
        WHY.format(width=width, concurrency=options.concurrency),
        READING.format(first=FIRST_PROBLEM),
    )
    return "\n\n".join(textwrap.fill(part, 100) for part in parts)


def _plain(value: object) -> object:
    """Return a setting as JSON; a path relative to the repository, or its name."""
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
        show(smc["smc"], NUM_SHOWN, Sampling(options.temperature, options.seed), began)
        with parties(later) as others:
            measure(runs, {**smc, **others}, options)
    print(f"\n{report(runs, options)}\n")
    print(
        f"{time.monotonic() - began:.0f} s in all. In {options.output_dir}/: comparison.png, "
        "comparison.md, results.json, answers.jsonl and the servers' logs."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return exit status 0 if it completes."""
    options = parse_arguments(argv)
    return main_of(lambda: demo(options), "The servers are stopped.")


if __name__ == "__main__":
    as_script(main)
