"""Estimate a server's memory: KV slots, states and requests, by arithmetic alone."""

from __future__ import annotations

from sglang_smc.kv.report import MemorySizes, Table
from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.plan.shapes import ModelShape

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


def state_bytes(target: ModelShape, draft: ModelShape, config: SMCConfig) -> float:
    """Return the bytes of a request's hidden and recurrent states.

    Of recurrent states these are SGLang's own, and the particles' or the columns'.
    """
    n = config.num_particles
    k = config.num_steps
    recurrent = target.states.bytes if target.states else 0
    return draft.hidden_state_bytes(n, k) + (1 + max(n, k + 1)) * recurrent


def kv_slots(
    target: ModelShape, draft: ModelShape, num_bytes: float, config: SMCConfig, num_requests: int
) -> int:
    """Return the KV slots, for both models together, that fit beside weights and states."""
    left = num_bytes - target.resident_bytes - draft.resident_bytes
    left -= num_requests * state_bytes(target, draft, config)
    return int(left / (target.kv_bytes_per_token + draft.kv_bytes_per_token))


def most_requests(
    target: ModelShape, draft: ModelShape, num_bytes: float, config: SMCConfig, length: int
) -> int:
    """Return how many requests of ``length`` KV slots fit, each with its states."""
    left = num_bytes - target.resident_bytes - draft.resident_bytes
    slots = length * (target.kv_bytes_per_token + draft.kv_bytes_per_token)
    return int(left / (state_bytes(target, draft, config) + slots))


def memory_table(
    target: ModelShape, draft: ModelShape, capacity: float, config: SMCConfig
) -> Table | None:
    """Return the memory for requests and their use of it, or None if no memory is left.

    The same table that a server logs at its start, from arithmetic alone.
    """
    num_bytes = capacity * STATIC_FRACTION - ASIDE_BYTES
    num_slots = kv_slots(target, draft, num_bytes, config, MOST_RUNNING)
    if num_slots < 1:
        return None
    sizes = MemorySizes(
        num_slots=num_slots,
        slot_bytes=int(target.kv_bytes_per_token + draft.kv_bytes_per_token),
        target_slot_bytes=int(target.kv_bytes_per_token),
        draft_weight_bytes=int(draft.resident_bytes),
        most_running=MOST_RUNNING,
        context_length=CONTEXT_LENGTH,
    )
    return Table.of(config, sizes)
