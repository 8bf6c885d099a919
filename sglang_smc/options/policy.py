"""How many particles and steps pay at a given load. No SGLang and no device in here.

A round of B requests costs K draft passes over B N tokens (the first reads two a particle), one
target pass over B N (K + 1), and what a round costs beside them; it yields B (1 + E[kept])
tokens. What passes cost is measured when the server starts; what rounds keep, while it runs.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec

from sglang_smc.options.budget import Budget, budgets

logger = logging.getLogger(__name__)

COSTS_ENV = "SGLANG_SMC_ADAPTIVE_COSTS"
"""Costs to go by instead of measured ones, as JSON in the form of `Costs`."""

_PERIOD = 8  # rounds for which a budget stays before another is considered
_TAKEN = 0.98  # of the best rate: of the budgets this good, the one of most particles is taken
_LEFT = 1 / 1.05  # of that one's rate: a budget this good stays, unless it has fewer particles
_PRIOR = 0.8  # chance that a drafted token is kept, until it is known
_PRIOR_TOKENS = 32.0  # how many tokens that guess is worth
_MEMORY = 0.98  # what a round that has been counted is worth one round later


class Curve(NamedTuple):
    """Seconds by size: linear between points and beyond the last.

    At least one point; sizes ascend, and seconds never fall.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> "Curve":
        """A curve of measurements. Chance only adds: none takes longer than a larger one has."""
        sizes, seconds = zip(*points, strict=True)
        lowest = list(accumulate(reversed(seconds), min))[::-1]
        return cls(tuple(zip(sizes, lowest, strict=True)))

    def __str__(self) -> str:
        return ", ".join(f"{size}: {1e3 * seconds:.3g} ms" for size, seconds in self.points)

    def at(self, size: int) -> float:
        """Seconds at ``size``."""
        if len(self.points) == 1 or size <= self.points[0][0]:
            return self.points[0][1]
        upper = min(bisect_left(self.points, (size,)), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[upper - 1 : upper + 1]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


class Costs(NamedTuple):
    """What the parts of a round cost, in seconds; passes by their number of tokens."""

    draft: Curve
    target: Curve
    overhead: float = 0.0  # of a round, whatever its size
    at_once: bool = False  # one pass of the draft over K + 1 tokens of each chain, not K over one

    def __str__(self) -> str:
        return f"passes by tokens: draft {self.draft}; target {self.target}"

    @classmethod
    def parse(cls, text: str) -> "Costs":
        """Costs as JSON: ``{"draft": [[1, 0.001], ...], "target": [[1, 0.01]], "overhead": 0}``.

        Raises:
            ValueError: for anything else.
        """
        try:
            given = msgspec.json.decode(text, type=_Given)
        except msgspec.DecodeError as error:
            raise ValueError(
                f'{COSTS_ENV} is {text!r}: {error}; allowed: {{"draft": [[tokens, seconds], ...], '
                '"target": [...], "overhead": seconds}, at least one point each. Mend it, or '
                "unset it to have costs measured."
            ) from None
        draft, target = Curve.of(sorted(given.draft)), Curve.of(sorted(given.target))
        return cls(draft, target, given.overhead)

    def round(self, batch_size: int, budget: Budget, widest: Budget) -> float:
        """A round of ``batch_size`` requests, none of which asked for more than ``widest``.

        Without drafts the draft still reads along.
        """
        num_particles, num_steps = budget.within(widest)
        chains = batch_size * num_particles
        if self.at_once:
            drafts = self.draft.at(chains * (num_steps + 1)) if num_steps else 0.0
        else:
            drafts = self.draft.at(2 * chains) + max(num_steps - 1, 0) * self.draft.at(chains)
        return drafts + self.target.at(chains * (num_steps + 1)) + self.overhead


class RoundCosts(NamedTuple):
    """What whole rounds cost, in seconds, where they are recorded and replayed in full."""

    rounds: dict[Budget, Curve]  # by the number of requests

    def __str__(self) -> str:
        shown = (f"N {budget[0]} K {budget[1]} {curve}" for budget, curve in self.rounds.items())
        return f"rounds by requests: {'; '.join(shown)}"

    def round(self, batch_size: int, budget: Budget, widest: Budget) -> float:
        """A round of ``batch_size`` requests; those that asked for less are padded."""
        return self.rounds[budget].at(batch_size)


_Point = tuple[Annotated[int, msgspec.Meta(ge=1)], Annotated[float, msgspec.Meta(gt=0.0)]]
_Points = Annotated[list[_Point], msgspec.Meta(min_length=1)]


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    draft: _Points
    target: _Points
    overhead: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class Kept:
    """How many drafted tokens rounds keep, as a chance per token.

    One chance for particles, and one for a single particle, which is verified. What has not been
    seen for long is forgotten: a server that has stopped to speculate tries again in the end.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys((False, True), (0.0, 0.0))  # N = 1 -> tokens kept, tried

    def add(self, budget: Budget, num_kept: int) -> None:
        """Count one request's round; with K tokens tried, none behind the first not kept."""
        kept, tried = self._counts[budget.num_particles == 1]
        tried += min(num_kept + 1, budget.num_steps)
        self._counts[budget.num_particles == 1] = kept + num_kept, tried

    def fade(self) -> None:
        """Let what is known be worth less, once a round."""
        self._counts = {one: (k * _MEMORY, t * _MEMORY) for one, (k, t) in self._counts.items()}

    def tokens(self, budget: Budget) -> float:
        """Expected tokens of a round, the target's own included."""
        kept, tried = self._counts[budget.num_particles == 1]
        chance = (kept + _PRIOR_TOKENS * _PRIOR) / (tried + _PRIOR_TOKENS)
        return (1.0 - chance ** (budget.num_steps + 1)) / (1.0 - chance)


class Policy:
    """The budget in force, and when to change it.

    All ranks of a server must give it the same calls and the same costs, so that they agree.

    Args:
        top: the server's N and K; the first budget in force.
        costs: of rounds.
    """

    def __init__(self, top: Budget, costs: Costs | RoundCosts) -> None:
        self.budget = top
        self._costs = costs
        self._budgets = budgets(top)
        self._kept = Kept()
        self._num_rounds = 0

    def learn(self, budget: Budget, num_kept: int) -> None:
        """One request's round with N and K of ``budget`` kept so many drafted tokens."""
        if budget.num_steps:
            self._kept.add(budget, num_kept)

    def end_round(self) -> None:
        """End a round: all its requests have been told of."""
        self._kept.fade()

    def choose(
        self, batch_size: int, widest: Budget, fits: Callable[[Budget], bool] = lambda _: True
    ) -> None:
        """Set the budget for the rounds to come; called once a round.

        Args:
            batch_size: running requests.
            widest: the most particles, and the most steps, that any of them asked for.
            fits: whether there is memory for a budget.
        """
        self._num_rounds += 1
        if self._num_rounds % _PERIOD:
            return
        best, now = self.best(batch_size, widest), self.budget
        rates = self._rates((best, now), batch_size, widest)
        stays = best.num_particles <= now.num_particles and rates[now] >= _LEFT * rates[best]
        if best == now or stays or not fits(best):
            return
        logger.info(
            "SMC adapts to %d running requests: particles %d -> %d, steps %d -> %d",
            *(batch_size, now.num_particles, best.num_particles, now.num_steps, best.num_steps),
        )
        self.budget = best

    def best(self, batch_size: int, widest: Budget) -> Budget:
        """The budget of most tokens a second; of those nearly as good, the one of most particles.

        Batches of more requests never get more work, N K, than smaller ones: sizes are gone through
        from 1, in steps of a quarter of a power of two.
        """
        best, allowed = self._budgets[0], list(self._budgets)
        for size in _sizes(batch_size):
            rates = self._rates(allowed, size, widest)
            enough = _TAKEN * max(rates.values())
            best = max((b for b in allowed if rates[b] >= enough), key=lambda b: (b[0], rates[b]))
            allowed = [b for b in allowed if _work(b, widest) <= _work(best, widest)]
        return best

    def _rates(self, of: Iterable[Budget], batch_size: int, widest: Budget) -> dict[Budget, float]:
        """Tokens a second, by budget."""
        return {
            budget: batch_size
            * self._kept.tokens(budget.within(widest))
            / self._costs.round(batch_size, budget, widest)
            for budget in of
        }


def _work(budget: Budget, widest: Budget) -> int:
    num_particles, num_steps = budget.within(widest)
    return num_particles * num_steps


def _sizes(last: int) -> Iterator[int]:
    """1, 2, ..., 8, 10, 12, 14, 16, 20, ...: up to the first that is not below ``last``."""
    size = 1
    yield size
    while size < last:
        size += 1 << max(size.bit_length() - 3, 0)
        yield size
