"""Everything that a first look at a GPU needs, for a machine without a network.

    bash bench/gpu/run.sh               # all stages, as far as 9 minutes go; again: the rest
    bash bench/gpu/run.sh kernels smoke # some of them
    bash bench/gpu/run.sh speed --only ar 'smc-*'
    bash bench/gpu/run.sh report        # tables and plots; needs no GPU
    bash bench/gpu/run.sh --dry-run     # on a CPU: what can run there, and the other commands

Each result is a line of JSON as soon as it is known, in $OUT or bench/results/gpu/raw. What has a
result, measured with the same code and settings, is not done again.
"""

from __future__ import annotations

import argparse
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gpu import cases, machine
from gpu.cases import EngineCase
from gpu.clock import Clock
from gpu.kernel_tests import kernel_cases
from gpu.pack import pack
from gpu.records import Records
from gpu.smoke import smoke_cases
from gpu.speed_stage import engine_cases, machine_case
from gpu.stages import PATIENCE, Case, Places, Runner, Stage
from speed.presets import Preset
from study import PUBLISHED, main_of

RAW = PUBLISHED / "gpu" / "raw"
GOES_ON = "All results so far are kept: the same command goes on from here."
REPORT, PACK = "report", "pack"
LOGS = "logs.tar.gz"
#: Factor of all time limits on a CPU, which other processes may share.
SLOWER_ON_A_CPU = 5
LARGEST_LOG = 200_000  # bytes of each log's end


def stages(places: Places, *, on_gpu: bool) -> list[Stage]:
    """Return the stages, the most useful first."""
    device = "cuda" if on_gpu else "cpu"
    engines = partial(_engines, places, on_gpu)
    return [
        Stage("smoke", 9, "engines in every mode", partial(smoke_cases, places, device=device)),
        Stage("speed", 9, "8B + 1B", engines(cases.SPEED, cases.SPEED_8B, ceilings=True)),
        Stage("kernels", 6, "tests of kernels and rounds", partial(kernel_cases, places)),
        Stage(
            "profile",
            4,
            "where a round goes",
            engines(cases.PROFILE, cases.PROFILE_8B, profiled=True),
        ),
        Stage("more", 9, "8B + 1B, other systems", engines(cases.MORE, cases.SPEED_8B)),
        Stage("70b", 9, "70B in FP8 + 1B", engines(cases.LARGE, cases.SPEED_70B)),
    ]


def _engines(
    places: Places,
    on_gpu: bool,
    found: Sequence[EngineCase],
    preset: Preset,
    *,
    profiled: bool = False,
    ceilings: bool = False,
) -> Callable[[], list[Case]]:
    """Return a function that lists a stage's engines, after the machine's ceilings."""
    preset, found = (preset, found) if on_gpu else (cases.TINY, cases.on_a_cpu(found))

    def listed() -> list[Case]:
        first = [machine_case(preset, places)] if ceilings else []
        return [*first, *engine_cases(found, preset, places, profiled=profiled)]

    return listed


STAGES = ("smoke", "speed", "kernels", "profile", "more", "70b")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu/run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    choices = (*STAGES, REPORT, PACK)
    add(
        "stages",
        nargs="*",
        metavar="STAGE",
        help=f"by default all of {', '.join(STAGES)}; also: {REPORT}, {PACK}",
    )
    add("--minutes", type=float, default=9.0, help="begin nothing that ends later, and stop then")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases, as a shell matches")
    add("--fresh", action="store_true", help="measure again what has a result")
    add("--list", action="store_true", help="print the cases, what each starts, and stop")
    add("--dry-run", action="store_true", help="on a CPU, with a tiny pair, what can run there")
    add("--wheels", nargs="+", default=[], metavar="NAME", help="that pack is to fetch")
    add("--out", type=Path, help="instead of $OUT, or bench/results/gpu/raw")
    add("--state", type=Path, help="a folder of this machine that later calls find")
    add("--spent", type=float, default=0.0, help="seconds of the call that are gone already")
    options = parser.parse_args(argv)
    unknown = set(options.stages) - set(choices)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no stage; there are {', '.join(choices)}")
    if len(options.stages) > 1 and {REPORT, PACK} & set(options.stages):
        parser.error(f"{REPORT} and {PACK} stand alone: they are not for the GPU machine")
    options.stages = options.stages or list(STAGES)
    options.out = options.out or Path(os.environ.get("OUT") or RAW)
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the selected stages; return exit status 0 if they are complete."""
    options = parse_arguments(argv)
    return main_of(partial(run, options), GOES_ON)


def run(options: argparse.Namespace) -> int:
    if PACK in options.stages:
        print(pack(options.wheels))
        return 0
    if options.stages == [REPORT]:
        report(options)
        return 0
    state = options.state or Path(tempfile.gettempdir()) / "sglang-smc-gpu"
    if options.dry_run:
        options.out, state = (folder / "dry-run" for folder in (options.out, state))
    places = Places(options.out, state)
    asked = [
        one for one in stages(places, on_gpu=not options.dry_run) if one.name in options.stages
    ]
    if options.list:
        show(asked)
        return 0
    return measure(asked, options, places)


def measure(asked: Sequence[Stage], options: argparse.Namespace, places: Places) -> int:
    """Complete stages as far as time allows; return 0 if nothing is left, else 3."""
    clock = Clock(options.minutes - options.spent / 60)
    for sentence in machine.preflight(on_gpu=not options.dry_run):
        print(sentence)
    writes = [options.out, places.work]
    reads = [] if options.dry_run else [RAW]
    records = Records(writes, reads, machine.call([stage.name for stage in asked]))
    speak = partial(say, time.monotonic())
    patience = PATIENCE * (SLOWER_ON_A_CPU if options.dry_run else 1)
    runner = Runner(records, clock, options.only, options.fresh, speak, patience)
    try:
        for stage in asked:
            runner.run(stage)
    finally:
        keep_logs(places)
    if options.dry_run:
        print("\nWhat a GPU machine would start:")
        show([one for one in stages(places, on_gpu=True) if one.name in options.stages])
    told = f"left for another call: {', '.join(runner.left)}" if runner.left else "all done"
    print(f"{told}; results are in {options.out}/")
    return 3 if runner.left else 0


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)


def show(asked: Sequence[Stage]) -> None:
    """Print each case with the engines that it starts."""
    total = sum(case.seconds for stage in asked for case in stage.cases())
    print(f"about {total / 60:.0f} minutes in all")
    for stage in asked:
        found = stage.cases()
        print(
            f"\n{stage.name}: {stage.about}, about {sum(c.seconds for c in found) / 60:.0f} minutes"
        )
        for case in found:
            print(f"  {case.slug}: {', '.join(case.parts)}\n    {case.shown}")


def keep_logs(places: Places) -> None:
    """Write the ends of all logs as one archive beside the results."""
    paths = sorted(path for path in places.logs.glob("*") if path.is_file())
    places.out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(places.out / LOGS, "w:gz") as archive:
        for path in paths:
            cut = places.work / "cut.log"
            cut.write_bytes(path.read_bytes()[-LARGEST_LOG:])
            archive.add(cut, path.name)


def report(options: argparse.Namespace) -> None:
    """Write tables and plots from the stored results."""
    from gpu.report import write_report  # imports matplotlib

    print(write_report(options.out, options.out.parent if options.out == RAW else options.out))
