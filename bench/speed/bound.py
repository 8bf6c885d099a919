"""Compute the traffic and operations of each system's round, and this machine's speed."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace as replace_shape
from pathlib import Path

from speed.grid import (
    AR,
    AR_DRAFT,
    AR_STOCK,
    CHAIN,
    EAGLE,
    EXACT_HEAD,
    NGRAM,
    SPECULATION,
    TREE,
    Cell,
)
from speed.presets import Preset

from sglang_smc.tools.plan import devices
from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.proposals import MODEL, Draft, Round, Rows, forward
from sglang_smc.tools.plan.roofline import ar_step, smc_round
from sglang_smc.tools.plan.shapes import ModelShape

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def shapes(preset: Preset) -> tuple[ModelShape, ModelShape]:
    """Return target and draft as served: weights and KV in the preset's dtype."""
    width = BYTES[preset.dtype]
    found = []
    for shape in preset.pair.target, preset.pair.draft:
        weights = width if shape.weight_bytes >= 2 else shape.weight_bytes
        found.append(replace_shape(shape, weight_bytes=weights, kv_bytes=width))
    return found[0], found[1]


def least_round(cell: Cell, preset: Preset) -> Round | None:
    """Return the passes of a round halfway through the answers; None with a head, of no shape here.

    The particles' own KV is not counted, only the shared KV: a lower bound for any weights.
    """
    target, draft = shapes(preset)
    context = cell.prompt + preset.new_tokens / 2
    family = cell.system.family
    if family in (EAGLE, EXACT_HEAD):
        return None
    if family in (AR, AR_STOCK, AR_DRAFT):
        return ar_step(draft if family == AR_DRAFT else target, cell.batch, context)
    if family == CHAIN:
        steps = SPECULATION[CHAIN]["speculative_num_steps"]
        return smc_round(target, Draft(MODEL, draft), cell.batch, 1, steps, context)
    if family in (TREE, NGRAM):
        return _tree_round(target, draft, cell, context)
    n, k = cell.system.num_particles or 1, cell.system.num_steps or 1
    return smc_round(target, Draft(MODEL, draft), cell.batch, n, k, context)


def _tree_round(target: ModelShape, draft: ModelShape, cell: Cell, context: float) -> Round:
    """Return draft passes over the tree's leaves, and one target pass over its tokens."""
    settings = SPECULATION[cell.system.family]
    texts = Rows(cell.batch, 1, context, 0.0, shared_prefix=True)
    passes = []
    for step in range(settings.get("speculative_num_steps", 0)):
        leaves = settings["speculative_eagle_topk"] if step else 1
        rows = Rows(cell.batch, leaves, context, float(step), shared_prefix=True)
        passes.append(forward("draft", draft, rows, 1, 1))
    tokens = settings["speculative_num_draft_tokens"]
    return Round((*passes, forward("verify", target, texts, tokens, tokens)))


def measure_machine(preset: Preset, path: Path) -> Device:
    """Measure this machine's bandwidth and FLOP/s, and store the best so far in ``path``.

    Other load on the machine can only slow a measurement down.
    """
    width = BYTES[preset.dtype]
    # A child process returns its memory.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(devices.measure, (preset.device, width))
    if path.exists():
        earlier = Device(**json.loads(path.read_text()))
        found = found._replace(
            bandwidth=max(found.bandwidth, earlier.bandwidth), flops=max(found.flops, earlier.flops)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found._asdict(), indent=2) + "\n")
    return found


def read_machine(preset: Preset, path: Path) -> Device | None:
    """Return the stored measurement; None if there is none.

    Eight-bit products are assumed to be twice as fast as sixteen-bit ones, as in data sheets.
    """
    if not path.exists():
        return None
    device = Device(**json.loads(path.read_text()))
    eight_bit = preset.pair.target.weight_bytes < 2
    return device._replace(flops=2 * device.flops) if eight_bit else device
