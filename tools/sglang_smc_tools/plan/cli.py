"""Parse the command line of ``sglang-smc plan`` and print the plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sglang_smc.command.program import command, natural, number, positive, several
from sglang_smc.options.server import LAG
from sglang_smc_tools.plan import shapes
from sglang_smc_tools.plan.devices import DATA_SHEETS, Device, measure, named
from sglang_smc_tools.plan.report import Comparison, Plan
from sglang_smc_tools.plan.roofline import DEFAULT_PARTICLES, Scenario, at_least
from sglang_smc_tools.plan.shapes import DEFAULT_STEPS, MTP, NGRAM, ModelShape

ACCEPTANCE = 0.8
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0}
INT8 = "int8"
MEASURED = {"measured": None, "measured:cpu": "cpu", "measured:cuda": "cuda"}
Drafts = Mapping[str, ModelShape]  # by name: a path's last part unless these coincide


def run(arguments: argparse.Namespace) -> None:
    """Print a plan; raise ValueError for invalid arguments."""
    weight_bytes = WEIGHT_BYTES.get(arguments.dtype)
    of_drafts = WEIGHT_BYTES.get(arguments.draft_dtype, weight_bytes)
    target = shapes.from_config(arguments.target, weight_bytes).on_devices(arguments.tp)
    if arguments.expert_overlap is not None:
        target = target.with_overlap(arguments.expert_overlap)
    names = [_short(source) for source in arguments.draft]
    names = names if len(set(names)) == len(names) else arguments.draft
    rows = arguments.hot_tokens
    whole = (shapes.draft_for(target, source, of_drafts) for source in arguments.draft)
    small = (one.fused_in_int8() if arguments.draft_dtype == INT8 else one for one in whole)
    cut = (one if rows is None else one.with_head_of(rows) for one in small)
    drafts = {name: one.on_devices(arguments.tp) for name, one in zip(names, cut, strict=True)}
    weight_bytes = shapes.lowest_precision(target, *drafts.values())
    lengths = arguments.context, arguments.tail, not arguments.no_shared_prefix
    loads = [
        Scenario(target, next(iter(drafts.values())), device.times(arguments.tp), *lengths)
        for device in (_device(name, weight_bytes) for name in arguments.device)
    ]
    make = _plan if arguments.tokens_per_pass is None else _comparison
    found = make(arguments, loads, drafts)
    print(json.dumps(found.as_dict(), indent=2) if arguments.json else found.as_text())


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc plan",
        description="Computes upper bounds on the speed of plain decoding (AR), speculative "
        "decoding (SD) and SMC, and the fastest N and K if all drafts are kept; or, with "
        "--tokens-per-pass, compares drafts and sizes at tokens per pass that you measured.",
    )
    add = result.add_argument
    positives = several(positive)
    models = f"a config.json, its folder, or one of {', '.join(shapes.BUILT_IN)}"
    heads = ", ".join(name for name in shapes.DRAFTS if name not in (*shapes.BUILT_IN, NGRAM))
    several_drafts = (
        f"the same; or that of an EAGLE-3 head or a block, or {heads}; or {MTP}, the target's MTP "
        f"layer; or {NGRAM}, n-gram matches. Several are compared"
    )
    devices = (
        f"{', '.join(DATA_SHEETS)}; or measured: this machine's GPU, or its CPU where torch sees "
        "none, in about three seconds (measured:cpu and measured:cuda insist)"
    )
    rows = "tokens in the draft model's --speculative-token-map; default: the whole vocabulary"
    dtype = "of the weights; without it fp8 where the configuration says so, otherwise bf16"
    draft_dtype = (
        "of the drafts' weights; int8: with --speculative-smc-draft-layers fused-int8; default: as "
        "--dtype"
    )
    context = "tokens of prompt and answer that particles share; default 1024"
    overlap = (
        "of a mixture: share of a pass's rows that visit no expert which others do not, such as "
        "equal nodes of trees; default 0, uniform routing of distinct rows: an upper bound"
    )
    tail = f"tokens of each particle beyond these, on average; default {LAG // 2}"
    apart = "for attention that reads the shared tokens once for each particle"
    steps = f"candidates for K; default {','.join(map(str, DEFAULT_STEPS))}, as far as a block goes"
    least = "the smallest N that the quality allows; default 1"
    acceptance = f"SD: the chance that a draft token is accepted; default {ACCEPTANCE}"
    kept = (
        "SMC: drafts that a round keeps on average, one number for each of --steps; default: all "
        "K, as in the paper. A server's spec_accept_length is one more"
    )
    tokens = (
        "measured tokens per pass, e.g. 5,6,7: print the time of a round with each draft, and the "
        "tokens/s at each, for all of --device, --batch (by commas), --particles and --steps"
    )
    add("--target", required=True, help=models)
    add("--draft", required=True, nargs="+", help=several_drafts)
    add("--hot-tokens", type=positive, help=rows)
    add("--device", required=True, nargs="+", help=devices)
    add("--tp", type=positive, default=1, help="tensor-parallel devices; default 1")
    add("--dtype", choices=WEIGHT_BYTES, help=dtype)
    add("--draft-dtype", choices=(*WEIGHT_BYTES, INT8), help=draft_dtype)
    add("--batch", type=positives, default=(1,), help="requests at once; default 1")
    add("--context", type=positive, default=1024, help=context)
    add("--expert-overlap", type=number(float, 0, 1), help=overlap)
    add("--tail", type=natural, default=LAG // 2, help=tail)
    add("--no-shared-prefix", action="store_true", help=apart)
    candidates = "candidates for N; default 4,8,16"
    add("--particles", type=positives, default=DEFAULT_PARTICLES, help=candidates)
    add("--steps", type=positives, help=steps)
    add("--min-particles", type=positive, default=1, help=least)
    add("--acceptance", type=number(float, 0, 1), help=acceptance)
    add("--kept", type=several(number(float)), help=kept)
    add("--tokens-per-pass", type=several(number(float)), help=tokens)
    add("--plot", type=Path, help="write a PNG: tokens/s against the batch")
    add("--json", action="store_true", help="print JSON instead of a table")
    return result


def _plan(arguments: argparse.Namespace, loads: list[Scenario], drafts: Drafts) -> Plan:
    """Return the plan; raise ValueError for inconsistent arguments."""
    for name in ("draft", "device", "batch"):
        if (count := len(getattr(arguments, name))) > 1:
            raise ValueError(
                f"--{name} has {count} values, and a plan is of one. To compare them, say how many "
                "tokens a pass of the target was measured to yield: --tokens-per-pass 5,6,7."
            )
    ((name, draft),) = drafts.items()
    (scenario,) = loads
    (batch,) = arguments.batch
    steps = arguments.steps or draft.default_steps
    acceptance = ACCEPTANCE if arguments.acceptance is None else arguments.acceptance
    if arguments.kept is not None and len(arguments.kept) != len(steps):
        raise ValueError(
            f"--kept has {len(arguments.kept)} numbers and --steps has {len(steps)}; give one for "
            "each."
        )
    kept = dict(zip(steps, arguments.kept or (), strict=False))
    particles = arguments.particles
    least = arguments.min_particles
    best, grid = scenario.best(batch, particles, steps, min_particles=least, kept=kept)
    settings = [scenario.ar(batch), *(scenario.sd(batch, k, acceptance) for k in steps), *grid]
    plan = Plan(_short(arguments.target), name, acceptance, settings, best)
    if arguments.plot:
        _plot(plan, arguments.plot)
    return plan


def _comparison(arguments: argparse.Namespace, loads: list[Scenario], drafts: Drafts) -> Comparison:
    """Return a round for each device, batch, N, K and draft, whose own K are the default.

    Raises ValueError for inconsistent arguments.
    """
    for name in ("kept", "acceptance", "plot"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is of a plan, and --tokens-per-pass of none; give one.")
    sizes = sorted(
        ((k, name) for name, one in drafts.items() for k in arguments.steps or one.default_steps),
        key=lambda size: size[0],
    )
    rows = [
        (name, replace(load, draft=drafts[name]).smc(batch, n, k))
        for load in loads
        for batch in arguments.batch
        for n in at_least(arguments.min_particles, arguments.particles)
        for k, name in sizes
    ]
    return Comparison(_short(arguments.target), drafts, arguments.tokens_per_pass, rows)


def _device(name: str, weight_bytes: float) -> Device:
    if name not in MEASURED:
        return named(name, weight_bytes)
    import torch

    seen = "cuda" if torch.cuda.is_available() else "cpu"
    return measure(MEASURED[name] or seen, weight_bytes)


def _short(source: str) -> str:
    """Return a built-in model's name as it is, or a path's last folder."""
    path = Path(source)
    return path.parent.name if path.name == "config.json" else path.name


def _plot(plan: Plan, path: Path) -> None:
    if not path.resolve().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.resolve().parent}.")
    try:
        from sglang_smc_tools.plan.plot import plot_plan
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs {error.name}: pip install {error.name}.") from error
    plot_plan(plan, path)


main = command(parser, run)
