"""Return what a server's memory holds: KV slots, states, requests. Arithmetic alone."""

from __future__ import annotations

from sglang_smc.memory.table import Sizes, Table
from sglang_smc.options.server import SMCConfig
from sglang_smc.plan.heads import Head
from sglang_smc.plan.proposals import Proposal
from sglang_smc.plan.shapes import ModelShape

#: What SGLang leaves to weights and KV where --mem-fraction-static is not given: roughly, since it
#: depends on the device. Of that, what libraries and tables take.
STATIC_FRACTION = 0.88
ASIDE_BYTES = 1.5e9
#: MiB that SGLang takes from neither where --mem-fraction-static is not given, by the MiB of memory
#: up to which it does. Of that, the share that its prefill graphs and workspaces take: an estimate.
RESERVED = ((20 << 10, 4_100), (60 << 10, 7_270), (160 << 10, 13_940), (1 << 30, 26_960))
PREFILL_SHARE = 0.19
#: `server.arguments` and most configurations say so.
MOST_RUNNING = 48
CONTEXT_LENGTH = 131_072


def reserved_bytes(capacity: float) -> int:
    """Return the bytes that SGLang keeps for activations and graphs on a GPU of ``capacity``.

    Args:
        capacity: bytes of its memory.
    """
    return next(mib for most, mib in RESERVED if capacity < most << 20) << 20


def kv_slots(target: ModelShape, draft: Proposal, num_bytes: float) -> int:
    """KV slots, for target and draft, that memory holds beside their weights."""
    left = num_bytes - target.resident_bytes - draft.resident_bytes
    return int(left / (target.kv_bytes_per_token + draft.kv_bytes_per_token))


def state_bytes(target: ModelShape, config: SMCConfig, most_running: int) -> int:
    """Recurrent states of all requests that may run: SGLang's own, and particles' or columns'."""
    if target.states is None:
        return 0
    of_request = 1 + max(config.num_particles, config.num_steps + 1)
    return most_running * of_request * target.states.bytes


def hidden_bytes(draft: Proposal, num_particles: int, num_steps: int) -> float:
    """Of a request: hidden states of the target's columns, which a head reads; 0 without one.

    They are kept from the target's pass to the head's next.
    """
    return draft.state_bytes(num_particles, num_steps) if isinstance(draft, Head) else 0.0


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
    """What a server has for requests, and what they take; None if nothing is left.

    The table that a server logs as it starts, from arithmetic alone.

    Args:
        target, draft: as served, on all devices of a tensor-parallel group together.
        capacity: bytes of those devices' memory.
        config: the server's settings.
        most_running: --max-running-requests.
        context_length: of the target.
        static_fraction: --mem-fraction-static.
    """
    slot = target.kv_bytes_per_token + draft.kv_bytes_per_token
    hidden = most_running * hidden_bytes(draft, config.num_particles, config.num_steps)
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
