"""Compute the cost of a round at the size of an 8B, by the planner."""

from __future__ import annotations

from functools import lru_cache

from drafts.grid import NUM_STEPS

from sglang_smc.options.server import LAG
from sglang_smc.tools.plan import proposals, shapes
from sglang_smc.tools.plan.devices import named
from sglang_smc.tools.plan.roofline import ar_step, round_cost

TARGET, DEVICE, BATCH, CONTEXT = "llama-3.1-8b", "h200", 1, 2000
#: Mean tokens of each particle's own tail, as in the planner.
TAIL = LAG // 2


@lru_cache
def round_seconds(planned: str, num_particles: int) -> float:
    """Return a lower bound of the time of a round of K steps.

    Args:
        planned: the draft, one of `sglang_smc.tools.plan.proposals.NAMES`.
    """
    target, draft = shapes.from_config(TARGET), proposals.from_config(planned)
    device = named(DEVICE, proposals.lowest_precision(target, draft))
    sizes = {"num_particles": num_particles, "num_steps": NUM_STEPS}
    return round_cost(
        target, draft, device, **sizes, batch=BATCH, context=CONTEXT, tail=TAIL
    ).seconds


@lru_cache
def plain_seconds() -> float:
    """Return a lower bound of the time per token without speculation."""
    return ar_step(shapes.from_config(TARGET), BATCH, CONTEXT + TAIL).seconds(named(DEVICE))
