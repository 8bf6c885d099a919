"""Parse the command line of ``python -m sglang_smc.tools.plan`` and print the plan."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_smc.options.server import LAG
from sglang_smc.tools.plan import compare, heads, proposals
from sglang_smc.tools.plan.compare import Comparison, Load
from sglang_smc.tools.plan.devices import DATA_SHEETS, Device, measure, named
from sglang_smc.tools.plan.proposals import BESIDE, DEFAULT_STEPS, NGRAM, Proposal, default_steps
from sglang_smc.tools.plan.report import Report, as_dict, as_text
from sglang_smc.tools.plan.roofline import DEFAULT_PARTICLES, Scenario, best_settings
from sglang_smc.tools.plan.shapes import BUILT_IN, ModelShape, from_config

ACCEPTANCE = 0.8
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0}
MEASURED = {"measured": None, "measured:cpu": "cpu", "measured:cuda": "cuda"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; return 0, or 2 with an error on stderr for invalid arguments."""
    arguments = parser().parse_args(argv)
    try:
        print(_printed(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _printed(arguments: argparse.Namespace) -> str:
    if arguments.tokens_per_pass is None:
        made = make_report(arguments)
        return json.dumps(as_dict(made), indent=2) if arguments.json else as_text(made)
    found = make_comparison(arguments)
    as_json = arguments.json
    return json.dumps(compare.as_dict(found), indent=2) if as_json else compare.as_text(found)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang_smc.tools.plan",
        description="Upper bounds on the speed of plain decoding (AR), speculative decoding (SD) "
        "and SMC from models, device and load, and the fastest N and K; or, with "
        "--tokens-per-pass, of drafts side by side.",
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
    result.add_argument(
        "--draft",
        required=True,
        nargs="+",
        help="the same; or that of an EAGLE-3 head or a DFlash block, or "
        f"{', '.join(heads.BUILT_IN)}; or {NGRAM}, alone or beside a model, as "
        f"{BESIDE}llama-3.2-1b. Several are compared",
    )
    result.add_argument(
        "--device",
        required=True,
        nargs="+",
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
    result.add_argument("--batch", type=positives, default=(1,), help="requests at once; default 1")
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
        "--steps",
        type=positives,
        help=f"candidates for K; default {','.join(map(str, DEFAULT_STEPS))}, as far as a block of "
        "DFlash goes",
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
        help=f"SD: how likely a draft is accepted; default {ACCEPTANCE}",
    )
    result.add_argument(
        "--kept",
        type=amounts,
        help="SMC: drafts that a round keeps on average, one number for each of --steps; without "
        "it all K, as in the paper. A server's accept length is one more",
    )
    result.add_argument(
        "--tokens-per-pass",
        type=amounts,
        help="as measured, e.g. 5,6,7: print what a round of each draft costs and the tokens/s "
        "that these make of it, for each of --device, --batch (by commas), --particles and --steps",
    )


def make_comparison(arguments: argparse.Namespace) -> Comparison:
    """Return the comparison; raise ValueError for inconsistent arguments."""
    for name in ("kept", "acceptance", "plot"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is of a plan, and --tokens-per-pass of none; give one.")
    target, drafts = _models(arguments)
    particles = [count for count in arguments.particles if count >= arguments.min_particles]
    if not particles:
        raise ValueError(f"No number of particles is {arguments.min_particles} or more.")
    load = Load(arguments.context, arguments.tail, not arguments.no_shared_prefix)
    return compare.compare(
        (_short(arguments.target), target),
        drafts,
        load,
        arguments.tokens_per_pass,
        [_device(one, target, *drafts.values()).times(arguments.tp) for one in arguments.device],
        arguments.batch,
        particles,
        arguments.steps,
    )


def _models(arguments: argparse.Namespace) -> tuple[ModelShape, dict[str, Proposal]]:
    """Return the target, and the drafts by name: a path's last part unless these coincide."""
    weight_bytes = WEIGHT_BYTES.get(arguments.dtype)
    target = from_config(arguments.target, weight_bytes).on_devices(arguments.tp)
    names = [_short(source) for source in arguments.draft]
    names = names if len(set(names)) == len(names) else arguments.draft
    drafts = [proposals.from_config(source, weight_bytes) for source in arguments.draft]
    return target, {
        name: proposals.on_devices(draft, arguments.tp)
        for name, draft in zip(names, drafts, strict=True)
    }


def make_report(arguments: argparse.Namespace) -> Report:
    """Return the report; raise ValueError for inconsistent arguments."""
    for name in ("draft", "device", "batch"):
        _require_one(name, getattr(arguments, name))
    target, drafts = _models(arguments)
    ((draft_name, draft),) = drafts.items()
    (batch,) = arguments.batch
    device = _device(arguments.device[0], target, draft).times(arguments.tp)
    steps = arguments.steps or default_steps(draft)
    acceptance = ACCEPTANCE if arguments.acceptance is None else arguments.acceptance
    kept = _kept(arguments.kept, steps)
    plan = best_settings(
        target,
        draft,
        device,
        batch,
        arguments.context,
        arguments.particles,
        steps,
        min_particles=arguments.min_particles,
        tail=arguments.tail,
        shared_prefix=not arguments.no_shared_prefix,
        kept=kept,
    )
    shared = not arguments.no_shared_prefix
    scenario = Scenario(target, draft, device, arguments.context, arguments.tail, shared)
    made = Report(
        target=_short(arguments.target),
        draft=draft_name,
        scenario=scenario,
        batch=batch,
        acceptance=acceptance,
        kept=kept,
        ar=scenario.ar(batch),
        sd=[scenario.sd(batch, k, acceptance) for k in steps],
        plan=plan,
    )
    if arguments.plot:
        _plot(made, arguments.plot)
    return made


def _require_one(name: str, given: Sequence[object]) -> None:
    if len(given) > 1:
        raise ValueError(
            f"--{name} has {len(given)} values, and a plan is of one. To compare them, say how "
            "many tokens a pass of the target was measured to yield: --tokens-per-pass 5,6,7."
        )


def _device(name: str, target: ModelShape, *drafts: Proposal) -> Device:
    weight_bytes = proposals.lowest_precision(target, *drafts)
    if name not in MEASURED:
        return named(name, weight_bytes)
    return measure(MEASURED[name] or _what_torch_sees(), weight_bytes)


def _what_torch_sees() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _kept(given: Sequence[float] | None, steps: Sequence[int]) -> dict[int, float]:
    if given is None:
        return {}
    if len(given) != len(steps):
        raise ValueError(
            f"--kept has {len(given)} numbers and --steps has {len(steps)}; give one for each."
        )
    return dict(zip(steps, given, strict=True))


def _short(source: str) -> str:
    """Return a built-in model's name as it is, or a path's last folder."""
    path = Path(source)
    return path.parent.name if path.name == "config.json" else path.name


def _plot(made: Report, path: Path) -> None:
    if not path.resolve().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.resolve().parent}.")
    try:
        from sglang_smc.tools.plan.plot import plot_report
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs {error.name}: pip install 'sglang-smc[plot]'.") from error
    plot_report(made, path)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def natural(text: str) -> int:
    """Parse a whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Parse whole numbers of at least 1, separated by commas; drop duplicates."""
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def amounts(text: str) -> tuple[float, ...]:
    """Parse finite numbers separated by commas."""
    values = tuple(float(part) for part in text.split(","))
    if not all(math.isfinite(value) for value in values):
        raise argparse.ArgumentTypeError(f"{text} has a number that is not finite")
    return values


def probability(text: str) -> float:
    """Parse a number between 0 and 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not within 0 and 1")
    return value
