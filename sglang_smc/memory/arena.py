"""How many KV slots a request needs beyond its text: the size of its arena.

Where particles are weighed, a tail reaches at most ``lag - 1`` tokens before a round, or what
is left of `max_new_tokens`, and the round adds K + 1 to each of N tails. Tails that share nothing
are the worst case, and what is reserved: a constant per request. Verification leaves no tails, nor
does a single particle, which agrees with itself.

Under the overlap schedule the host reserves a round's arena before it has heard of the round that
still runs. That round may commit c tokens, which takes c slots out of the arena, and c from each
tail: with N > 1 the arena is short by K + 1 slots at most, which `in_flight` adds.
"""

from typing import TYPE_CHECKING

from sglang_smc.options.budget import Budget, apply_budget
from sglang_smc.options.request import config_of
from sglang_smc.options.server import SMCConfig

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def max_tail(config: SMCConfig) -> int:
    """The longest tail that a round of any request can leave or look at, in tokens."""
    most_lag = config.most_lag if config.num_particles > 1 else 1
    return most_lag + config.num_steps


def max_arena(config: SMCConfig) -> int:
    """The largest arena that a request can ask for, in KV slots."""
    return config.num_particles * max_tail(config) + in_flight(config)


def in_flight(config: SMCConfig) -> int:
    """What the arena is short of, at most, while the host has yet to hear of a round."""
    return config.num_steps + 1


def row_width(config: SMCConfig, longest: int) -> int:
    """Slots in a row of `req_to_token`: of the ``longest`` text and the largest arena behind it.

    Rows begin on cache lines of 128 bytes, 32 slots: kernels read them in pieces.
    """
    return -(-(longest + max_arena(config)) // 32) * 32


def tail_width(config: SMCConfig) -> int:
    """Slots in a particle's row, a power of two: positions go round in it.

    A row is looked at from the last committed position on, and filled K + 1 positions behind the
    longest tail: those of particles that have ended are filled, too, with the padding slot.
    """
    return 1 << (1 + max_tail(config) + config.num_steps).bit_length()


def tail(config: SMCConfig, remaining: int) -> int:
    """The longest tail of a request that may emit ``remaining`` more tokens."""
    return min(config.lag, max(remaining, 0)) + config.num_steps


def arena(config: SMCConfig, remaining: int) -> int:
    """The arena of a request that may emit ``remaining`` more tokens, in KV slots."""
    return config.num_particles * tail(config, remaining) + in_flight(config)


def remaining(req: "Req") -> int:
    """Tokens that a request may still emit."""
    most = req.sampling_params.max_new_tokens
    assert most is not None, "SGLang's scheduler bounds it as a request comes in"
    return most - len(req.output_ids)


def arena_of(server: SMCConfig, req: "Req", budget: Budget | None = None) -> int:
    """The arena that a running or waiting request needs now, on ``budget``, in KV slots."""
    return arena(apply_budget(config_of(server, req), budget), remaining(req))


def longest(config: SMCConfig, num_slots: int, limit: int) -> int:
    """Tokens of the longest request that a pool admits, of ``limit`` at most.

    Any request may choose the mode that reserves most.
    """
    return min(limit, num_slots - max_arena(config) - 1)


def fits(config: SMCConfig, num_slots: int, prompt: int, answer: int) -> int:
    """Requests of so many tokens that a pool holds at a time, with all of their answers."""
    return num_slots // (prompt + answer + arena(config, answer))


def check_pool(config: SMCConfig, num_slots: int) -> None:
    """Raise ValueError where a pool cannot hold one request with room to spare."""
    needed = max_arena(config) + config.num_steps + 2
    if num_slots < needed:
        raise ValueError(
            f"The KV pool holds {num_slots} tokens, but one request alone needs at least {needed} "
            f"with --speculative-smc-num-particles {config.num_particles}, "
            f"--speculative-smc-max-lag {config.most_lag} and "
            f"--speculative-num-steps {config.num_steps} (particles * (lag + steps) and a prompt). "
            "Raise --max-total-tokens or --mem-fraction-static, or lower one of the three."
        )
