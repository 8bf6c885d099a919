"""Estimate a server's memory: KV slots, states and requests, by arithmetic alone."""

from __future__ import annotations

from sglang_smc.kv.report import Sizes, Table
from sglang_smc.options.server import SMCConfig
from sglang_smc.tools.plan.proposals import Draft, Proposal
from sglang_smc.tools.plan.shapes import ModelShape

#: Approximations of SGLang's values, which depend on the device: the default of
#: --mem-fraction-static, and bytes of libraries and tables within that share.
STATIC_FRACTION = 0.88
ASIDE_BYTES = 1.5e9
#: By the upper bound of the device's memory, MiB: the MiB that SGLang reserves outside weights and
#: KV without --mem-fraction-static. PREFILL_SHARE of that goes to prefill graphs and workspaces: an
#: estimate.
RESERVED = ((20 << 10, 4_100), (60 << 10, 7_270), (160 << 10, 13_940), (1 << 30, 26_960))
PREFILL_SHARE = 0.19
#: Defaults of `server.arguments`, and of most configurations.
MOST_RUNNING = 48
CONTEXT_LENGTH = 131_072


def reserved_bytes(capacity: float) -> int:
    """Return the bytes that SGLang keeps for activations and graphs on a GPU of so many bytes."""
    return next(mib for most, mib in RESERVED if capacity < most << 20) << 20


def kv_slots(target: ModelShape, draft: Proposal, num_bytes: float) -> int:
    """Return the KV slots, for target and draft together, that fit beside their weights."""
    left = num_bytes - target.resident_bytes - draft.resident_bytes
    return int(left / (target.kv_bytes_per_token + draft.kv_bytes_per_token))


def state_bytes(target: ModelShape, config: SMCConfig, most_running: int) -> int:
    """Return the bytes of recurrent states: SGLang's own, and the particles' or columns'."""
    if target.states is None:
        return 0
    of_request = 1 + max(config.num_particles, config.num_steps + 1)
    return most_running * of_request * target.states.bytes


def memory_table(
    target: ModelShape,
    draft: Proposal,
    capacity: float,
    config: SMCConfig,
    *,
    most_running: int = MOST_RUNNING,
    context_length: int = CONTEXT_LENGTH,
    static_fraction: float = STATIC_FRACTION,
) -> Table | None:
    """Return the memory for requests and their use of it, or None if no memory is left.

    The same table that a server logs at its start, from arithmetic alone.
    """
    slot = target.kv_bytes_per_token + draft.kv_bytes_per_token
    draft = Draft.of(draft)
    hidden = most_running * draft.state_bytes(config.num_particles, config.num_steps)
    aside = ASIDE_BYTES + state_bytes(target, config, most_running) + hidden
    num_slots = kv_slots(target, draft, capacity * static_fraction - aside)
    if num_slots < 1:
        return None
    sizes = Sizes(
        num_slots=num_slots,
        slot_bytes=int(slot),
        target_slot_bytes=int(target.kv_bytes_per_token),
        draft_weight_bytes=int(draft.resident_bytes),
        most_running=most_running,
        context_length=context_length,
    )
    return Table.of(config, sizes)
