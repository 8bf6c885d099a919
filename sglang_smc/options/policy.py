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

_CLOSE = 0.98  # of the best: among budgets this good, the most particles
_GAIN = 1.05  # over the budget that is in force, or it stays
_PATIENCE = 8  # rounds that a budget stays for at least
_REFRESH = 16  # rounds after which what has been kept is looked at again
_PRIOR = 0.8  # chance that a drafted token is kept, until it is known
_PRIOR_TOKENS = 32.0  # how many tokens that guess is worth
_MEMORY = 0.98  # what a round that has been counted is worth one round later


class Curve(NamedTuple):
    """Seconds of a pass by the number of tokens in it: linear between points and beyond the last.

    At least one point; tokens ascend, and seconds never fall.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> "Curve":
        """From measurements. Chance only adds, so none takes longer than a larger one has."""
        tokens, seconds = zip(*points, strict=True)
        lowest = list(accumulate(reversed(seconds), min))[::-1]
        return cls(tuple(zip(tokens, lowest, strict=True)))

    def __str__(self) -> str:
        return ", ".join(f"{size}: {1e3 * seconds:.3g} ms" for size, seconds in self.points)

    def at(self, num_tokens: int) -> float:
        """Seconds of a pass over ``num_tokens``."""
        if len(self.points) == 1 or num_tokens <= self.points[0][0]:
            return self.points[0][1]
        upper = min(bisect_left(self.points, (num_tokens,)), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[upper - 1 : upper + 1]
        return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)


class Costs(NamedTuple):
    """What the parts of a round cost, in seconds."""

    draft: Curve
    target: Curve
    overhead: float = 0.0  # of a round, whatever its size

    def __str__(self) -> str:
        return f"passes by tokens: draft {self.draft}; target {self.target}"

    @classmethod
    def parse(cls, text: str) -> "Costs":
        """From JSON: ``{"draft": [[1, 0.001], ...], "target": [[1, 0.01], ...], "overhead": 0}``.

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
        budget = budget.within(widest)
        num_chains = batch_size * budget.num_particles
        first, others = self.draft.at(2 * num_chains), self.draft.at(num_chains)
        return (
            first
            + max(budget.num_steps - 1, 0) * others
            + self.target.at(num_chains * (budget.num_steps + 1))
            + self.overhead
        )


_Tokens = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0.0)]
_Points = Annotated[list[tuple[_Tokens, _Seconds]], msgspec.Meta(min_length=1)]


class RoundCosts(NamedTuple):
    """What whole rounds cost, in seconds, where they are recorded and replayed in full."""

    rounds: dict[Budget, Curve]  # by the number of requests

    def __str__(self) -> str:
        shown = (f"N {budget[0]} K {budget[1]} {curve}" for budget, curve in self.rounds.items())
        return f"rounds by requests: {'; '.join(shown)}"

    def round(self, batch_size: int, budget: Budget, widest: Budget) -> float:
        """As `Costs.round`; who asked for less is padded."""
        return self.rounds[budget].at(batch_size)


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    draft: _Points
    target: _Points
    overhead: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class Kept:
    """How many drafted tokens rounds keep, as a chance per token, by the number of particles.

    For a number that has not been seen it is what the others keep; one particle, which is verified,
    has a chance of its own. What has not been seen for long is forgotten, so that a server that has
    stopped to speculate tries again in the end.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}  # N -> tokens kept, tokens tried

    def add(self, budget: Budget, num_kept: int) -> None:
        """Count one request's round; with K tokens tried, none behind the first not kept."""
        kept, tried = self._counts.get(budget.num_particles, (0.0, 0.0))
        num_tried = min(num_kept + 1, budget.num_steps)
        self._counts[budget.num_particles] = kept + num_kept, tried + num_tried

    def fade(self) -> None:
        """Let what is known be worth less, once a round."""
        self._counts = {n: (k * _MEMORY, t * _MEMORY) for n, (k, t) in self._counts.items()}

    def chance(self, num_particles: int) -> float:
        """That a drafted token is kept whose predecessors are."""
        alike = [c for n, c in self._counts.items() if (n == 1) == (num_particles == 1)]
        shared = _mean(_PRIOR, sum(c[0] for c in alike), sum(c[1] for c in alike))
        return _mean(shared, *self._counts.get(num_particles, (0.0, 0.0)))

    def tokens(self, budget: Budget) -> float:
        """Expected tokens of a round, the target's own included."""
        chance = self.chance(budget.num_particles)
        return 1.0 + sum(chance**column for column in range(1, budget.num_steps + 1))


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
        self._age = 0  # rounds since the budget has changed
        # Until what is kept is looked at again:
        self._tokens: dict[Budget, float] = {}  # expected of a round
        self._best: dict[Budget, dict[int, Budget]] = {}  # by the widest request and batch size

    def learn(self, budget: Budget, num_kept: int) -> None:
        """One request's round with N and K of ``budget`` kept so many drafted tokens."""
        if budget.num_steps:
            self._kept.add(budget, num_kept)

    def end_round(self) -> None:
        """All requests of a round have been told of."""
        self._kept.fade()
        self._num_rounds += 1
        if self._num_rounds % _REFRESH == 0:
            self._tokens.clear()
            self._best.clear()

    def choose(
        self, batch_size: int, widest: Budget, fits: Callable[[Budget], bool] = lambda _: True
    ) -> None:
        """Set the budget for the rounds to come; called once a round.

        Args:
            batch_size: running requests.
            widest: the most particles, and the most steps, that any of them asked for.
            fits: whether there is memory for a budget.
        """
        self._age += 1
        if self._age < _PATIENCE:
            return
        best = self.best(batch_size, widest)
        more_particles = best.num_particles > self.budget.num_particles
        gain = self._rate(batch_size, best, widest) / self._rate(batch_size, self.budget, widest)
        if best == self.budget or not (more_particles or gain > _GAIN) or not fits(best):
            return
        logger.info(
            "SMC adapts to %d running requests: particles %d -> %d, steps %d -> %d",
            *(batch_size, self.budget.num_particles, best.num_particles),
            *(self.budget.num_steps, best.num_steps),
        )
        self.budget, self._age = best, 0

    def best(self, batch_size: int, widest: Budget) -> Budget:
        """The budget of most tokens a second; of those nearly as good, the one of most particles.

        Batches of more requests never get more work, N K, than smaller ones. Sizes are rounded up
        to a quarter of a power of two.
        """
        best = self._best.setdefault(widest, {})
        most_work = widest.num_particles * widest.num_steps
        for size in _sizes(batch_size):
            if size not in best:
                best[size] = self._best_of(size, widest, most_work)
            most_work = _work(best[size], widest)
        return best[size]

    def _best_of(self, batch_size: int, widest: Budget, most_work: int) -> Budget:
        allowed = [budget for budget in self._budgets if _work(budget, widest) <= most_work]
        rates = {budget: self._rate(batch_size, budget, widest) for budget in allowed}
        enough = _CLOSE * max(rates.values())
        close = [budget for budget in allowed if rates[budget] >= enough]
        return max(
            close, key=lambda budget: (budget.num_particles, rates[budget], budget.num_steps)
        )

    def _rate(self, batch_size: int, budget: Budget, widest: Budget) -> float:
        """Tokens a second."""
        real = budget.within(widest)
        if real not in self._tokens:
            self._tokens[real] = self._kept.tokens(real)
        return batch_size * self._tokens[real] / self._costs.round(batch_size, budget, widest)


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


def _mean(prior: float, kept: float, tried: float) -> float:
    return (kept + _PRIOR_TOKENS * prior) / (tried + _PRIOR_TOKENS)
