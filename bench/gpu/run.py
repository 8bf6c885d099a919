"""Everything that a first look at a GPU needs, for a machine without a network.

    bash bench/gpu/run.sh               # all stages, as far as 9 minutes go; again: the rest
    bash bench/gpu/run.sh smoke speed --only ar 'smc-*' # some of them
    bash bench/gpu/run.sh report        # tables; needs no GPU
    bash bench/gpu/run.sh checkout      # makes this checkout small enough to be carried there
    bash bench/gpu/run.sh pack FOLDER   # or a copy of it
    bash bench/gpu/run.sh --dry-run     # on a CPU: what can run there, and the other commands

A first machine, lent for 15 minutes, is asked in two calls, of `--minutes 8.8` and of 4.

Each result is a line of JSON as soon as it is known, in $OUT or bench/results/gpu/raw. What has a
result, measured with the same code and settings, is not done again.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gpu import engines
from gpu.report import write_report
from gpu.smoke import DEFAULT, ENGINES, GRAPHS, command_cases, layer_cases, smoke_cases
from gpu.travel import bring_back, checkout, pack
from results import provenance
from speed.grid import Preset
from speed.measure import EngineCase, More, engine_cases
from speed.runner import Case, Clock, Records, Runner, Stage
from study import GOES_ON, PUBLISHED, REPOSITORY, BenchError, main_of

RAW = PUBLISHED / "gpu" / "raw"
STAGES = ("kernels", "layers", "smoke", "profile", "speed", "70b", "more")
REPORT = "report"
CHECKOUT = "checkout"
PACK = "pack"
#: Factor of all time limits on a CPU, which other processes may share.
SLOWER_ON_A_CPU = 5


def stages(work: Path, *, on_gpu: bool) -> list[Stage]:
    """Return the stages, the most useful first: the first eight are the first machine's.

    Parts of one stage, of one name, stand where they are due.
    """
    device = "cuda" if on_gpu else "cpu"

    def smoke(*names: str) -> Callable[[], list[Case]]:
        return partial(smoke_cases, work, *names, device=device)

    def cases(
        some: Sequence[EngineCase], preset: Preset = engines.SPEED_8B, more: More | None = None
    ) -> Callable[[], list[Case]]:
        if not on_gpu:
            some = engines.on_a_cpu(some)
            preset = engines.TINY
        return partial(engine_cases, some, preset, work, more=more)

    def profile(some: Sequence[EngineCase]) -> Callable[[], list[Case]]:
        return cases(some, engines.PROFILE_8B, engines.profile)

    def commands(*names: str) -> Callable[[], list[Case]]:
        return partial(command_cases, *names, device=device)

    def layer(*names: str) -> Callable[[], list[Case]]:
        return partial(layer_cases, *names, device=device)

    stock, fused, *exact = engines.PROFILE
    return [
        Stage("kernels", "do they compile and compute", commands("doctor")),
        Stage("smoke", "graphs, OpenAI's client, the audit", smoke(GRAPHS)),
        Stage("profile", "where a round goes", profile([stock])),
        Stage("profile", "exact, with a model and with a head", profile(exact)),
        Stage("layers", "a draft's, stock and fused", layer("m8", "m64")),
        Stage("profile", "the same with fused layers", profile([fused])),
        Stage("kernels", "the same at many sizes", commands("tests")),
        Stage("speed", "a head, fewer particles and more steps", cases(engines.DEEP)),
        Stage("layers", "the LM head, in float32 at once or after", layer("lm-head")),
        Stage("speed", "a draft's layers as the server chooses", cases(engines.CHOSEN)),
        Stage("speed", "the same, adaptive", cases(engines.SERVED)),
        Stage("smoke", "a default server", smoke(DEFAULT)),
        Stage("70b", "70B in FP8 + 1B", cases(engines.LARGE[:2], engines.SPEED_70B)),
        Stage("speed", "8B + 1B, all", cases(engines.OTHERS)),
        Stage("smoke", "engines in every mode", smoke(*ENGINES)),
        Stage("more", "8B + 1B, other systems", cases(engines.MORE)),
        Stage("70b", "the others", cases(engines.LARGE[2:], engines.SPEED_70B)),
    ]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu/run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    about = f"by default all of {', '.join(STAGES)}; also: {REPORT}; {CHECKOUT}; {PACK} FOLDER"
    add("stages", nargs="*", metavar="STAGE", help=about)  # choices would refuse none at all
    add("--minutes", type=float, default=9.0, help="begin nothing that ends later, and stop then")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases, as a shell matches")
    add("--fresh", action="store_true", help="measure again what has a result")
    add("--list", action="store_true", help="print the cases and what each starts; change nothing")
    add("--dry-run", action="store_true", help="on a CPU, with a tiny pair, what can run there")
    add("--out", type=Path, help="instead of $OUT, or bench/results/gpu/raw")
    add("--state", type=Path, help="a folder of this machine that later calls find")
    add("--spent", type=float, default=0.0, help="seconds of the call that are gone already")
    options = parser.parse_args(argv)
    for alone in (REPORT, CHECKOUT):
        if len(options.stages) > 1 and alone in options.stages:
            parser.error(f"{alone} stands alone: it is not for the GPU machine")
    if options.stages[:1] == [PACK]:
        if len(options.stages) != 2:
            parser.error(f"{PACK} takes one folder")
    elif unknown := set(options.stages) - {*STAGES, REPORT, CHECKOUT}:
        parser.error(f"{', '.join(unknown)}: there is no such stage")
    options.stages = options.stages or list(STAGES)
    options.out = options.out or Path(os.environ.get("OUT") or RAW)
    options.state = options.state or Path(tempfile.gettempdir()) / "sglang-smc-gpu"
    if options.dry_run:
        options.out = options.out / "dry-run"
        options.state = options.state / "dry-run"
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected stages; return exit status 0 if they are complete."""
    options = parse_arguments(argv)
    return main_of(partial(run, options), GOES_ON)


def run(options: argparse.Namespace) -> int:
    if options.stages == [REPORT]:
        folder = options.out.parent if options.out == RAW else options.out
        print(write_report(options.out, folder))
        return 0
    if options.stages == [CHECKOUT]:
        print(checkout(make=not options.list))
        return 0
    if options.stages[0] == PACK:
        print(pack(Path(options.stages[1])))
        return 0
    on_gpu = not options.dry_run
    status = 0 if options.list else measure(options)
    if options.dry_run and not options.list:
        print(f"\n{write_report(options.out, options.out, on_gpu=False)}")
        print("What a GPU machine would start:")
        on_gpu = True
    if options.list or options.dry_run:
        every = stages(options.state, on_gpu=on_gpu)
        show([one for one in every if one.name in options.stages], options.minutes)
    return status


def preflight(*, on_gpu: bool) -> None:
    """Raise BenchError if nothing can run here."""
    plugin = importlib.util.find_spec("sglang_smc")
    assert plugin is not None and plugin.origin is not None
    if not Path(plugin.origin).resolve().is_relative_to(REPOSITORY):
        raise BenchError(
            f"sglang_smc is {plugin.origin}, not this tree's. Start with bench/gpu/run.sh, "
            "which runs the tree, or install it with pip install -e."
        )
    import torch  # slow to import

    if on_gpu and not torch.cuda.is_available():
        raise BenchError("torch sees no GPU here. --dry-run walks through all of it on a CPU.")


def measure(options: argparse.Namespace) -> int:
    """Complete stages as far as time allows; return 0 if nothing is left, else 3."""
    clock = Clock(options.minutes - options.spent / 60)
    began = time.monotonic()
    preflight(on_gpu=not options.dry_run)
    reads = [] if options.dry_run else [RAW]
    runner = Runner(
        Records([options.out, options.state], reads, provenance({"stages": options.stages})),
        clock,
        options.only,
        options.fresh,
        say=lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True),
        slower=SLOWER_ON_A_CPU if options.dry_run else 1.0,
    )
    bring_back(options.out, runner.say)  # what was compiled so far, should this call be killed
    try:
        for stage in stages(options.state, on_gpu=not options.dry_run):
            if stage.name in options.stages:
                runner.run(stage)
    finally:
        logs = options.state / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        shutil.make_archive(str(options.out / "logs"), "gztar", logs)
        bring_back(options.out, runner.say)
    told = f"left for another call: {', '.join(runner.left)}" if runner.left else "all done"
    print(f"{told}; results are in {options.out}/")
    return 3 if runner.left else 0


def show(asked: Sequence[Stage], minutes: float) -> None:
    """Print each case with the engine that it starts and, of new machines, the call that does."""
    total = 0.0
    for stage in asked:
        print(f"\n{stage.name}: {stage.about}")
        for case in stage.cases():
            total += case.seconds
            call = f"call {math.ceil(total / 60 / minutes)}, {total / 60:.1f} minutes in all"
            print(f"  {case.slug}: {', '.join(case.parts)} ({call})\n    {case.shown}")
