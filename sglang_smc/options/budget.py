"""What a request runs with where the server adapts N and K to its load.

A *budget* bounds both for all requests of a batch; what a request asked for bounds them, too. On
the lowest, N = 1 and K = 0, nothing is drafted, and the target decodes alone.
"""

from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from sglang_smc.options.request import RequestConfig
from sglang_smc.options.server import SMCConfig

_Config = TypeVar("_Config", bound=SMCConfig)


class Budget(NamedTuple):
    """The most particles and drafted tokens that a request gets in a round."""

    num_particles: int
    num_steps: int

    def within(self, bound: "Budget") -> "Budget":
        """The smaller of this and ``bound``, in N and in K."""
        return Budget(*map(min, self, bound))


OFF = Budget(1, 0)


def budgets(top: Budget) -> tuple[Budget, ...]:
    """The budgets from ``top`` down: N and K halved in all combinations, and `OFF`."""
    sizes = [(n, k) for n in _halved(top.num_particles) for k in _halved(top.num_steps)]
    return *(Budget(*size) for size in sizes), OFF


def apply_budget(asked: _Config, budget: Budget | None) -> _Config:
    """What a request runs with on a budget; None is what it asked for.

    The one place that knows: rounds are told the outcome. Weights of one particle say nothing, and
    its text would be the draft's: who has lost the others is verified. Verification knows no other
    target than p, or p renormalised token by token, so that a power of p and, where it is weighed,
    p under a mask keep their particles.
    """
    if budget is None:
        return asked
    num_particles = asked.num_particles
    if asked.is_normalized:
        num_particles = min(num_particles, budget.num_particles)
    return replace(
        asked,
        num_particles=num_particles,
        num_steps=min(asked.num_steps, budget.num_steps),
        mode="exact" if num_particles == 1 < asked.num_particles else asked.mode,
    )


def union(before: RequestConfig, now: RequestConfig) -> RequestConfig:
    """What memory must hold for two rounds: the larger N, the larger K and the longer tails."""
    return replace(
        now,
        num_particles=max(before.num_particles, now.num_particles),
        num_steps=max(before.num_steps, now.num_steps),
        mode=before.mode if before.weighs else now.mode,
    )


def _halved(size: int) -> list[int]:
    return [size >> shift for shift in range(size.bit_length())]
