"""How many KV slots a request needs beyond its text: the size of its arena.

In SMC mode a tail reaches at most ``max_lag - 1`` tokens before a round, or what is left of
`max_new_tokens`, and the round adds K + 1 to each of N tails. Tails that share
nothing are the worst case, and what is reserved: a constant per request.
"""

from typing import TYPE_CHECKING

from sglang_smc.config import SMCConfig

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def lag(config: SMCConfig) -> int:
    """The length that no tail reaches before a round; exact rounds leave no tail at all."""
    return config.max_lag if config.mode == "smc" else 1


def max_tail(config: SMCConfig) -> int:
    """The longest tail that a round can leave or look at, in tokens."""
    return lag(config) + config.num_steps


def max_arena(config: SMCConfig) -> int:
    """The largest arena, in KV slots."""
    return config.num_particles * max_tail(config)


def arena(config: SMCConfig, remaining: int) -> int:
    """The arena of a request that may emit ``remaining`` more tokens, in KV slots."""
    return config.num_particles * (min(lag(config), max(remaining, 0)) + config.num_steps)


def arena_of(config: SMCConfig, req: "Req") -> int:
    """The arena that a running or waiting request needs now, in KV slots."""
    return arena(config, req.sampling_params.max_new_tokens - len(req.output_ids))


def check_pool(config: SMCConfig, num_slots: int) -> None:
    """Raise ValueError where a pool cannot hold one request with room to spare."""
    needed = max_arena(config) + config.num_steps + 2
    if num_slots < needed:
        raise ValueError(
            f"The KV pool holds {num_slots} tokens, but one request alone needs at least {needed} "
            f"with --speculative-smc-num-particles {config.num_particles}, "
            f"--speculative-smc-max-lag {config.max_lag} and "
            f"--speculative-num-steps {config.num_steps} (particles * (lag + steps) and a prompt). "
            "Raise --max-total-tokens or --mem-fraction-static, or lower one of the three."
        )
