"""The command line of ``python -m sglang_smc.plan``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_smc.options.server import LAG
from sglang_smc.plan.devices import DATA_SHEETS, Device, measure, named
from sglang_smc.plan.report import Report, as_dict, as_text
from sglang_smc.plan.roofline import (
    DEFAULT_PARTICLES,
    DEFAULT_STEPS,
    Scenario,
    best_settings,
)
from sglang_smc.plan.shapes import BUILT_IN, ModelShape, from_config

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0}
MEASURED = {"measured": None, "measured:cpu": "cpu", "measured:cuda": "cuda"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; 2, with what was wrong on stderr, where the arguments make none."""
    arguments = parser().parse_args(argv)
    try:
        report = make_report(arguments)
        if arguments.plot:
            _plot(report, arguments.plot)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_dict(report), indent=2) if arguments.json else as_text(report))
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang_smc.plan",
        description="Upper bounds on the speed of plain decoding (AR), speculative decoding (SD) "
        "and SMC from models, device and load, and the fastest N and K.",
    )
    _add_models_and_device(result)
    _add_load(result)
    _add_settings(result)
    result.add_argument("--plot", type=Path, help="write a PNG: tokens/s against the batch")
    result.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return result


def _add_models_and_device(result: argparse.ArgumentParser) -> None:
    models = f"a config.json, its folder, or one of {', '.join(BUILT_IN)}"
    result.add_argument("--target", required=True, help=models)
    result.add_argument("--draft", required=True, help="the same")
    result.add_argument(
        "--device",
        required=True,
        help=f"{', '.join(DATA_SHEETS)}; or measured: this machine's GPU, or its CPU where torch "
        "sees none, in about three seconds (measured:cpu and measured:cuda insist)",
    )
    result.add_argument(
        "--tp", type=positive, default=1, help="devices that split every pass, perfectly; default 1"
    )
    result.add_argument(
        "--dtype",
        choices=WEIGHT_BYTES,
        help="of the weights; without it fp8 where the configuration says so, otherwise bf16",
    )


def _add_load(result: argparse.ArgumentParser) -> None:
    result.add_argument("--batch", type=positive, default=1, help="requests at once; default 1")
    result.add_argument(
        "--context",
        type=positive,
        default=1024,
        help="tokens that a request's particles share; default 1024",
    )
    result.add_argument(
        "--tail",
        type=natural,
        default=LAG // 2,
        help=f"tokens that each particle has of its own, on average; default {LAG // 2}",
    )
    result.add_argument(
        "--no-shared-prefix",
        action="store_true",
        help="for attention kernels that read the shared tokens once a particle",
    )


def _add_settings(result: argparse.ArgumentParser) -> None:
    result.add_argument(
        "--particles",
        type=positives,
        default=DEFAULT_PARTICLES,
        help="candidates for N; default 4,8,16",
    )
    result.add_argument(
        "--steps", type=positives, default=DEFAULT_STEPS, help="candidates for K; default 4,8,16"
    )
    result.add_argument(
        "--min-particles",
        type=positive,
        default=1,
        help="the smallest N that the quality allows; default 1",
    )
    result.add_argument(
        "--acceptance",
        type=probability,
        default=0.8,
        help="SD: how likely a draft is accepted; default 0.8",
    )
    result.add_argument(
        "--kept",
        type=amounts,
        help="SMC: drafts that a round keeps on average, one number for each of --steps; without "
        "it all K, as in the paper. A server's accept length is one more",
    )


def make_report(arguments: argparse.Namespace) -> Report:
    """Raises ValueError where the arguments make no plan."""
    weight_bytes = WEIGHT_BYTES.get(arguments.dtype)
    target, draft = (
        from_config(source, weight_bytes).on_devices(arguments.tp)
        for source in (arguments.target, arguments.draft)
    )
    device = _device(arguments.device, target, draft).times(arguments.tp)
    kept = _kept(arguments)
    plan = best_settings(
        target,
        draft,
        device,
        arguments.batch,
        arguments.context,
        arguments.particles,
        arguments.steps,
        min_particles=arguments.min_particles,
        tail=arguments.tail,
        shared_prefix=not arguments.no_shared_prefix,
        kept=kept,
    )
    shared = not arguments.no_shared_prefix
    scenario = Scenario(target, draft, device, arguments.context, arguments.tail, shared)
    return Report(
        target=_short(arguments.target),
        draft=_short(arguments.draft),
        scenario=scenario,
        batch=arguments.batch,
        acceptance=arguments.acceptance,
        kept=kept,
        ar=scenario.ar(arguments.batch),
        sd=[scenario.sd(arguments.batch, k, arguments.acceptance) for k in arguments.steps],
        plan=plan,
    )


def _device(name: str, target: ModelShape, draft: ModelShape) -> Device:
    """At the lower of the two models' precisions, which keeps the result a bound for both."""
    weight_bytes = min(target.weight_bytes, draft.weight_bytes)
    if name not in MEASURED:
        return named(name, weight_bytes)
    return measure(MEASURED[name] or _what_torch_sees(), weight_bytes)


def _what_torch_sees() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _kept(arguments: argparse.Namespace) -> dict[int, float]:
    if arguments.kept is None:
        return {}
    if len(arguments.kept) != len(arguments.steps):
        raise ValueError(
            f"--kept has {len(arguments.kept)} numbers and --steps has {len(arguments.steps)}; "
            "give one for each."
        )
    return dict(zip(arguments.steps, arguments.kept, strict=True))


def _short(source: str) -> str:
    """A built-in model's name as it is; of a path its end, with the folder of a config.json."""
    path = Path(source)
    return path.parent.name if path.name == "config.json" else path.name


def _plot(report: Report, path: Path) -> None:
    if not path.resolve().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.resolve().parent}.")
    try:
        from sglang_smc.plan.plot import plot_report
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs {error.name}: pip install 'sglang-smc[plot]'.") from error
    plot_report(report, path)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def natural(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, by commas; each once."""
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def amounts(text: str) -> tuple[float, ...]:
    """Numbers by commas."""
    values = tuple(float(part) for part in text.split(","))
    if not all(math.isfinite(value) for value in values):
        raise argparse.ArgumentTypeError(f"{text} has a number that is not finite")
    return values


def probability(text: str) -> float:
    """A number within 0 and 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not within 0 and 1")
    return value
