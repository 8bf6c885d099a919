"""Compute the traffic and operations of each system's round, and this machine's speed."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

from speed.grid import AR, AR_DRAFT, AR_STOCK, CHAIN, DRAFT, SPECULATION, Cell, Preset

from sglang_smc.tools.plan import devices
from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.roofline import Round, ar_step, smc_round
from sglang_smc.tools.plan.shapes import ModelShape

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def shapes(preset: Preset) -> tuple[ModelShape, ModelShape]:
    """Return target and draft as served: weights and KV in the preset's dtype."""
    width = BYTES[preset.dtype]
    pair = preset.pair
    weights = min(pair.target.weight_bytes, width) if pair.quantization else width
    return (
        replace(pair.target, weight_bytes=weights, kv_bytes=width),
        replace(pair.draft, weight_bytes=width, kv_bytes=width),
    )


def least_round(cell: Cell, preset: Preset) -> Round | None:
    """Return the passes of a round halfway through the answers; None for trees and heads.

    The particles' own KV is not counted, only the shared KV: a lower bound for any weights.
    """
    target, draft = shapes(preset)
    context, system = cell.prompt + preset.new_tokens / 2, cell.system
    if system.family in (AR, AR_STOCK, AR_DRAFT):
        return ar_step(draft if system.family == AR_DRAFT else target, cell.batch, context)
    if system.family == CHAIN:
        n, k = 1, SPECULATION[CHAIN]["speculative_num_steps"]
    elif system.draft == DRAFT and system.num_particles and system.num_steps:
        n, k = system.num_particles, system.num_steps
    else:
        return None
    return smc_round(target, draft, cell.batch, n, k, context)


def measure_machine(preset: Preset, path: Path) -> None:
    """Measure this machine's bandwidth and FLOP/s, and store the best so far in ``path``.

    Other load on the machine can only slow a measurement down.
    """
    # A child process returns its memory.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(devices.measure, (preset.device, BYTES[preset.dtype]))
    best = found._asdict()
    if path.exists():
        earlier = json.loads(path.read_text())
        best |= {key: max(best[key], earlier[key]) for key in ("bandwidth", "flops")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(best, indent=2) + "\n")


def read_machine(preset: Preset, path: Path) -> Device | None:
    """Return the stored measurement; None if there is none.

    Eight-bit products are assumed to be twice as fast as sixteen-bit ones, as in data sheets.
    """
    if not path.exists():
        return None
    device = Device(**json.loads(path.read_text()))
    return device._replace(flops=2 * device.flops) if preset.pair.quantization else device
