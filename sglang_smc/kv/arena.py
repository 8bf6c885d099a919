"""Compute the size of a request's arena: its KV slots beyond the emitted tokens.

Where particles are weighed, a tail has at most ``lag - 1`` tokens before a round, or the rest of
`max_new_tokens`, and the round adds K + 1 to each of N tails. The worst case, tails that share no
slot, is reserved: a constant per request. Verification leaves no tails, nor does a single particle.

Under the overlap schedule the host reserves a round's arena before it has the result of the round
that still runs. That round may commit c tokens, which takes c slots out of the arena, and c from
each tail: with N > 1 the arena is short by K + 1 slots at most.

An arena ends with a page, so that a request owns whole pages: that takes up to a page less one.
"""

from typing import TYPE_CHECKING

from sglang_smc.options.request import Budget, apply_budget, config_of
from sglang_smc.options.server import SMCConfig

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


INPUT_MARGIN = 5  # SGLang's, between the longest request and its longest input


def max_tail(config: SMCConfig) -> int:
    """Return the longest tail that a round of any request can reach or read, in tokens."""
    most_lag = config.most_lag if config.num_particles > 1 else 1
    return most_lag + config.num_steps


def max_arena(config: SMCConfig) -> int:
    """Return the largest arena that a request can need, in KV slots."""
    return config.num_particles * max_tail(config) + _beside(config)


def _beside(config: SMCConfig) -> int:
    """Return the slots of an arena for a result that is under way, and to the end of a page."""
    return config.num_steps + 1 + config.page_size - 1


def row_width(config: SMCConfig, longest: int) -> int:
    """Return the slots in a row of `req_to_token`: the ``longest`` sequence and the largest arena.

    Rows start on cache lines of 128 bytes, 32 slots, since kernels read them in blocks.
    """
    return -(-(longest + max_arena(config)) // 32) * 32


def tail_width(config: SMCConfig) -> int:
    """Return the slots in a particle's row, a ring buffer with a power of two of them.

    A row is read from the last committed position on, and written up to K + 1 positions beyond the
    longest tail: rows of particles that have ended are written, too, with the padding slot.
    """
    return 1 << (1 + max_tail(config) + config.num_steps).bit_length()


def tail(config: SMCConfig, remaining: int) -> int:
    """Return the longest tail of a request in a round, with ``remaining`` tokens to emit."""
    return min(config.lag, max(remaining, 0)) + config.num_steps


def arena(config: SMCConfig, remaining: int) -> int:
    """Return the arena of a request that may emit ``remaining`` more tokens, in KV slots."""
    return config.num_particles * tail(config, remaining) + _beside(config)


def remaining(req: "Req") -> int:
    """Return the number of tokens that a request may still emit."""
    most = req.sampling_params.max_new_tokens
    assert most is not None, "SGLang's scheduler bounds it as a request comes in"
    return most - len(req.output_ids)


def sizes_of(server: SMCConfig, req: "Req", budget: Budget | None) -> SMCConfig:
    """Return the options of a running or waiting request on ``budget``."""
    return apply_budget(config_of(server, req), budget)


def arena_of(server: SMCConfig, req: "Req", budget: Budget | None = None) -> int:
    """Return the arena that a running or waiting request needs on ``budget``, in KV slots."""
    return arena(sizes_of(server, req, budget), remaining(req))


def longest(config: SMCConfig, num_slots: int, limit: int) -> int:
    """Return the tokens of the longest request that a pool admits, at most ``limit``.

    Any request may set the mode that reserves most.
    """
    return min(limit, num_slots - max_arena(config) - 1)


def fits(config: SMCConfig, num_slots: int, prompt: int, answer: int) -> int:
    """Return how many requests of these lengths a pool holds at a time, with whole answers."""
    return num_slots // (prompt + answer + arena(config, answer))


def check_pool(config: SMCConfig, num_slots: int) -> None:
    """Raise ValueError unless a pool can hold one request with its arena and a prompt."""
    needed = max_arena(config) + max(config.num_steps + 2, INPUT_MARGIN + 3)
    if num_slots < needed:
        raise ValueError(
            f"The KV pool holds {num_slots} tokens, but one request alone needs at least {needed} "
            f"with --speculative-smc-num-particles {config.num_particles}, "
            f"--speculative-smc-max-lag {config.most_lag} and "
            f"--speculative-num-steps {config.num_steps} (particles * (lag + steps) and a prompt). "
            "Raise --max-total-tokens or --mem-fraction-static, or lower one of the three."
        )
