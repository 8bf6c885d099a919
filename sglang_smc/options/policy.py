"""Choose N and K by the load, and the evidence threshold by a given tilt, without SGLang.

*N and K* (`Policy`). A round of B requests yields B (1 + E[kept]) tokens. Its seconds are measured
when the server starts, the kept tokens while it runs. Where no drafts pay, the target decodes
plainly, and a hundredth of the time goes into trials, which last as long as they pay.

*The evidence threshold* (`Dial`; docs/fidelity.md, "One dial"). In mode auto the tilt is about
s / (1 + c), with s the scale of a pair of models, a temperature, N and K. It is fitted to the
answers that have ended by weighted least squares: with g = 1 / (1 + c) the expected tilt is g s, so
s is the sum of g times the tilt's numerator over the sum of g^2 times its information. Answers of
infinite c contain no information on s, and are not used.
"""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from sglang_smc.options.request import OFF, Budget, RequestConfig, budgets

logger = logging.getLogger(__name__)

COSTS_ENV = "SGLANG_SMC_ADAPTIVE_COSTS"
"""Environment variable with costs in place of measured ones, as JSON in the form of `Costs`."""

_PERIOD = 8  # rounds for which a budget stays before another is considered
_TAKEN = 0.98  # share of the best rate: of budgets with at least this, that of most particles wins
# Share of the new rate above which a budget stays, unless particles are gained or none pays.
_LEFT = 1 / 1.05
_PRIOR = 0.8  # prior probability that a draft token is kept by one particle
_FEWER = 0.8  # factor of rejections for twice the particles, in modes that verify (docs/drafts.md)
_PRIOR_WEIGHT = 8.0  # of what is expected without counts, in tokens tried and in rounds
_AGREE = 0.8  # prior chance that two chains of one text go on alike: 0.81 on real text, N = 2
_MEMORY = 0.98  # decay of counts per round that drafts
_READ = 64  # tokens of a pass by which the reading of texts is estimated
_TRIALS = 0.01  # share of the time of plain decoding that trials of drafts may cost
_FIRST = 32  # rounds of a request after which drafts are judged: a server's warm-up has fewer
_CHANCES = tuple(tenth / 10 for tenth in range(1, 10))  # that a chain's token is kept, for trials
_BISECTIONS = 12  # of an estimate within 1 / 4096
_MOST_PASSES = 4  # of the target in a round without drafts: users see its tokens at once
_SECONDS_OF_PASSES = 0.02  # that they take together for one request, at most
_RAREST = 3  # trials are half as frequent after each that has lost, up to so many


class Curve(NamedTuple):
    """Seconds by size: piecewise linear, also beyond the last point.

    At least one point; sizes ascend, and seconds never fall.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> "Curve":
        """Return a curve of measurements, lowered to be monotone, since noise only adds time."""
        sizes, seconds = zip(*points, strict=True)
        lowest = list(accumulate(reversed(seconds), min))[::-1]
        return cls(tuple(zip(sizes, lowest, strict=True)))

    def at(self, size: float) -> float:
        if len(self.points) == 1 or size <= self.points[0][0]:
            return self.points[0][1]
        upper = min(bisect_left(self.points, (size,)), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[upper - 1 : upper + 1]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


class Costs(NamedTuple):
    """Costs of the parts of a round, in seconds, as given; passes by their number of tokens.

    K draft passes read B N tokens (the first two per particle), a target pass B N (K + 1).
    """

    draft: Curve
    target: Curve
    overhead: float = 0.0  # of a round of any size
    reading: float = 0.0  # of each token of the sequences, in a round

    @classmethod
    def parse(cls, text: str) -> "Costs":
        """Parse JSON: ``{"draft": [[1, 0.001], ...], "target": [[1, 0.01]], "overhead": 0}``.

        Raises ValueError for any other form.
        """
        try:
            given = msgspec.json.decode(text, type=_Given)
        except msgspec.DecodeError as error:
            raise ValueError(
                f'{COSTS_ENV} is {text!r}: {error}; allowed: {{"draft": [[tokens, seconds], ...], '
                '"target": [...], "overhead": seconds, "reading": seconds}, at least one point '
                "each. Mend it, or unset it to have costs measured."
            ) from None
        draft = Curve.of(sorted(given.draft))
        target = Curve.of(sorted(given.target))
        return cls(draft, target, given.overhead, given.reading)

    def as_dict(self) -> dict[str, Any]:
        """Return (tokens, seconds) of passes, as given."""
        return {
            "draft": self.draft.points,
            "target": self.target.points,
            "overhead": self.overhead,
            "reading": self.reading,
        }

    def round(
        self,
        batch_size: int,
        budget: Budget,
        widest: Budget,
        length: float = 0.0,
        num_nodes: float | None = None,
    ) -> float:
        """Return the seconds of a round of ``batch_size`` requests with at most ``widest`` each.

        With K = 0 a single chain costs no draft pass.

        Args:
            length: tokens of a request's sequence, on average.
            num_nodes: without effect: a pass costs what it does for that number of tokens.
        """
        num_particles, num_steps = budget.within(widest)
        chains = batch_size * num_particles
        drafts = max(num_steps - 1, 0) * self.draft.at(chains)
        if num_steps or num_particles > 1:
            drafts += self.draft.at(2 * chains)
        passes = drafts + self.target.at(chains * (num_steps + 1))
        return passes + self.overhead + self.reading * batch_size * length


class RoundCosts(NamedTuple):
    """Costs of whole rounds, in seconds, as measured."""

    # Of short sequences, by the number of requests; of trees without two equal nodes.
    rounds: Mapping[Budget, Curve]
    reading: Mapping[Budget, float] = {}  # of each token of the sequences; none: not measured
    # By the distinct nodes of a request's tree, ascending, and by requests; none: not measured.
    nodes: Mapping[Budget, tuple[tuple[float, Curve], ...]] = {}

    def as_dict(self) -> dict[str, Any]:
        """Return (requests, seconds), reading and nodes by N and K, for log and /server_info."""
        rounds = {_told(of): curve.points for of, curve in self.rounds.items()}
        nodes = {
            _told(of): {f"{count:.1f}": curve.points for count, curve in curves}
            for of, curves in self.nodes.items()
        }
        reading = {_told(of): seconds for of, seconds in self.reading.items()}
        return {**rounds, "reading": reading, "nodes": nodes}

    def round(
        self,
        batch_size: int,
        budget: Budget,
        widest: Budget,
        length: float = 0.0,
        num_nodes: float | None = None,
    ) -> float:
        """Return the seconds of a round of ``batch_size`` requests; smaller ones are padded.

        Args:
            length: as in `Costs.round`.
            num_nodes: distinct nodes of a request's tree, on average; None: no two are equal.
        """
        reading = self.reading.get(budget, 0.0) * batch_size * length
        curves = self.nodes.get(budget)
        if num_nodes is None or not curves:
            return self.rounds[budget].at(batch_size) + reading
        by_nodes = Curve.of((count, curve.at(batch_size)) for count, curve in curves)
        return by_nodes.at(num_nodes) + reading


def _told(budget: Budget) -> str:
    n, k = budget
    return f"N={n} K={k}"


_Point = tuple[Annotated[int, msgspec.Meta(ge=1)], Annotated[float, msgspec.Meta(gt=0.0)]]
_Points = Annotated[list[_Point], msgspec.Meta(min_length=1)]


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    draft: _Points
    target: _Points
    overhead: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    reading: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class Acceptance:
    """Estimate of the draft tokens that rounds keep: the mean of recent rounds of the same N and K.

    Its prior is a probability per token for each N. The probability that a token is not kept falls
    by `_FEWER` with each doubling of N: what is counted at one N is the prior of the others.
    """

    def __init__(self) -> None:
        # Rounds of a request, their tokens kept, and those tried.
        self._counts: dict[Budget, tuple[float, float, float]] = {}
        self._num_counted = 0

    @property
    def is_guessed(self) -> bool:
        """Return whether too little has been counted to judge drafts by."""
        return self._num_counted < _FIRST

    def add(self, budget: Budget, num_kept: int) -> None:
        """Count one request's round; tokens behind the first rejected one do not count as tried."""
        rounds, kept, tried = self._counts.get(budget, (0.0, 0.0, 0.0))
        tried += min(num_kept + 1, budget.num_steps)
        self._num_counted += 1
        self._counts[budget] = rounds + 1, kept + num_kept, tried

    def fade(self) -> None:
        """Decay the counts, once per round that drafts."""
        self._counts = {
            of: (_MEMORY * rounds, _MEMORY * kept, _MEMORY * tried)
            for of, (rounds, kept, tried) in self._counts.items()
        }

    def tokens(self, budget: Budget) -> float:
        """Return the expected tokens of a round, the target's own included."""
        expected = _expected(self._chance(budget.num_particles), budget.num_steps)
        rounds, kept, _ = self._counts.get(budget, (0.0, 0.0, 0.0))
        return 1.0 + (kept + _PRIOR_WEIGHT * expected) / (rounds + _PRIOR_WEIGHT)

    def _chance(self, num_particles: int) -> float:
        """Return the probability that a token is kept by rounds of N particles."""
        lost = _PRIOR_WEIGHT * (1.0 - _PRIOR)
        tried = _PRIOR_WEIGHT
        own_kept = 0.0
        own_tried = 0.0
        for (n, _), (_, kept, of) in self._counts.items():
            lost = lost + (of - kept) / fewer_rejections(n)
            tried = tried + of
            if n == num_particles:
                own_kept = own_kept + kept
                own_tried = own_tried + of
        prior = 1.0 - min(lost / tried * fewer_rejections(num_particles), 1.0)
        return (own_kept + _PRIOR_WEIGHT * prior) / (own_tried + _PRIOR_WEIGHT)


def _expected(chance: float, num_steps: int) -> float:
    """Return the tokens that are kept of K, each with a chance below 1 if all before it are."""
    return (1.0 - chance ** (num_steps + 1)) / (1.0 - chance) - 1.0


def _chanced(budget: Budget, chance: float) -> float:
    """Return the tokens of a round of which each is kept with a chance in a single chain."""
    lost = (1.0 - chance) * fewer_rejections(budget.num_particles)
    return 1.0 + _expected(1.0 - lost, budget.num_steps)


def fewer_rejections(num_particles: int) -> float:
    """Return the rejections of N particles' drafts for one of a single chain."""
    return _FEWER ** math.log2(num_particles)


class Branching:
    """Estimate of the distinct nodes of drafted trees: the mean of recent rounds of the same N, K.

    Rounds of other N and K are its prior, by the chance s that two chains of one text go on alike:
    of N chains, column j has 1 + (N - 1) (1 - s^j) distinct nodes. On real text that is 5 % too few
    for N = 2, and 10 % too many for N = 8, at K = 8.
    """

    def __init__(self) -> None:
        self._counts: dict[Budget, tuple[float, float]] = {}  # rounds of a request, and their nodes
        self._agree: float | None = _AGREE  # s; None: not computed since the last count

    def add(self, budget: Budget, num_nodes: int) -> None:
        """Count one request's round."""
        rounds, nodes = self._counts.get(budget, (0.0, 0.0))
        self._counts[budget] = rounds + 1, nodes + num_nodes
        self._agree = None

    def fade(self) -> None:
        """Decay the counts, once per round that drafts."""
        self._counts = {of: (_MEMORY * a, _MEMORY * b) for of, (a, b) in self._counts.items()}

    def nodes(self, budget: Budget) -> float:
        """Return the expected distinct nodes of a request's tree, its root included."""
        if budget.num_particles == 1:
            return budget.num_steps + 1.0
        if self._agree is None:
            self._agree = self._fit()
        rounds, nodes = self._counts.get(budget, (0.0, 0.0))
        expected = distinct_nodes(budget, self._agree)
        return (nodes + _PRIOR_WEIGHT * expected) / (rounds + _PRIOR_WEIGHT)

    def _fit(self) -> float:
        """Return the s of as many nodes as have been counted, by bisection."""
        typical = Budget(2, 8)
        counts = {**self._counts}
        rounds, nodes = counts.get(typical, (0.0, 0.0))
        prior = _PRIOR_WEIGHT * distinct_nodes(typical, _AGREE)
        counts[typical] = rounds + _PRIOR_WEIGHT, nodes + prior
        found = sum(nodes for _, nodes in counts.values())
        low = 0.0
        high = 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if sum(r * distinct_nodes(of, middle) for of, (r, _) in counts.items()) > found:
                low = middle
            else:
                high = middle
        return (low + high) / 2


def distinct_nodes(budget: Budget, agree: float) -> float:
    """Return the expected distinct nodes of N chains of K tokens; see `Branching`."""
    num_chains, num_steps = budget
    apart = sum(1.0 - agree**column for column in range(1, num_steps + 1))
    return 1.0 + num_steps + (num_chains - 1) * apart


class Policy:
    """Policy that sets the budget of N and K by the load.

    All ranks of a server must make the same calls with the same costs, to set the same budget.

    Args:
        top: the largest.
        costs: of rounds; None where they are not known, so that ``fixed`` stays.
        fixed: a budget.
        repeats: whether a round without drafts may have several passes of the target.
    """

    def __init__(
        self,
        top: Budget,
        costs: Costs | RoundCosts | None,
        fixed: Budget | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        self.costs = costs
        self.top = top
        self._budgets = budgets(top)
        self._acceptance = Acceptance()
        self._branching = Branching()
        self._length = 0.0  # of a running sequence, on average
        self.budget = fixed or top
        self.num_passes = 1  # of the target in a round without drafts
        if costs is not None:
            self.budget = self.best(1, top)
            if repeats:
                fit = int(_SECONDS_OF_PASSES / costs.round(1, OFF, top))
                self.num_passes = max(1, min(fit, _MOST_PASSES, top.num_steps + 1))
        self._num_rounds = 0
        self._num_off = 0  # the target's passes without drafts, since the last with some
        self._num_lost = 0  # trials in a row, at most `_RAREST`
        self._considered = 0  # running requests when a budget was last considered
        self._widest = top  # of them
        self._drafted: list[int] = []  # tokens kept by rounds on the budget since then
        self._has_learned = False  # in this round

    def learn(self, budget: Budget, num_kept: int, num_nodes: int | None = None) -> None:
        """Count the draft tokens that one request's round kept, with N and K of ``budget``.

        ``num_nodes`` are the distinct nodes of its tree; None where the round did not count them.
        """
        if budget.num_steps:
            self._has_learned = True
            self._acceptance.add(budget, num_kept)
            if budget == budget.within(self.budget):
                self._drafted.append(num_kept)
            if num_nodes and budget.num_particles > 1:
                self._branching.add(budget, num_nodes)

    def end_round(self) -> None:
        """End a round, after `learn` for all its requests."""
        if self._has_learned:
            self._acceptance.fade()
            self._branching.fade()
        self._has_learned = False

    def choose(
        self,
        batch_size: int,
        widest: Budget,
        fits: Callable[[Budget], bool] = lambda _: True,
        length: float = 0.0,
        num_unread: int = 0,
        num_passes: int = 1,
    ) -> None:
        """Set the budget of the next rounds; called once per round.

        Another is considered every `_PERIOD` rounds, and once the load has doubled.

        Args:
            batch_size: running requests that a budget bounds.
            widest: the most particles, and the most steps, of any of them.
            fits: returns whether there is memory for a budget.
            length: tokens of a request's sequence, on average.
            num_unread: tokens that the draft would have to read first, of all requests.
            num_passes: of the target in this round, if it drafts nothing.
        """
        if self.costs is None:
            return
        self._num_rounds += 1
        self._num_off = self._num_off + num_passes if self.budget == OFF else 0
        if self._num_rounds % _PERIOD and batch_size < 2 * self._considered:
            return
        self._considered = batch_size
        self._widest = widest
        self._length = length
        best = self._wanted(batch_size, widest, num_unread)
        now = self.budget
        self._drafted.clear()
        if best == now or not fits(best):
            return
        self.budget = best
        n, k = best
        logger.info("SMC adapts to N = %d, K = %d: %s", n, k, self.reason)

    def pays_apart(self, num_larger: int, num_others: int, budget: Budget) -> bool:
        """Return whether requests that no budget bounds take less time in a round of their own.

        Args:
            num_larger: of these.
            num_others: on ``budget``.
        """
        if self.costs is None:
            return False
        top = self.top
        own = self._seconds(top, num_larger, top)
        others = self._seconds(budget, num_others, top)
        return own + others < self._seconds(top, num_larger + num_others, top)

    @property
    def reason(self) -> str:
        """Return why the budget is in force, for the log and /server_info."""
        if self.costs is None:
            return "rounds could not be measured as the server started"
        size = max(self._considered, 1)
        widest = self._widest
        now = self.budget
        of = now
        verb = "decodes"
        if now == OFF:
            of = max(self._budgets[:-1], key=lambda of: self._rate(of, size, widest))
            verb = "would decode"
        times = self._rate(of, size, widest) / self._rate(OFF, size, widest)
        n, k = of.within(widest)
        most, steps = now.within(widest)
        return (
            f"rows a request {most * (steps + 1)}, running {size}: N = {n}, K = {k} {verb} "
            f"{times:.2f} times as fast as plain decoding"
        )

    def _wanted(self, batch_size: int, widest: Budget, num_unread: int) -> Budget:
        """Return the best budget, where it gains enough over the one in force, else that."""
        best = self.best(batch_size, widest)
        now = self.budget
        if best != OFF:
            self._num_lost = 0
            rate, most = (self._rate(of, batch_size, widest) for of in (now, best))
            gives = now != OFF and best.num_particles > now.num_particles
            best = best if gives or rate < _LEFT * most else now
        return self._trial(batch_size, widest, num_unread) if best == OFF else best

    def _trial(self, batch_size: int, widest: Budget, num_unread: int) -> Budget:
        """Return drafts to try, where plain decoding has saved for them or they pay; or OFF.

        A trial takes `_PERIOD` rounds, and first the reading of what the draft has skipped.
        The first trial is not saved for, since a guess alone speaks against it. A trial ends with
        the first `_PERIOD` rounds that yield less than plain decoding. The next one is saved for
        twice as long.
        """
        seconds = {of: self._seconds(of, batch_size, widest) for of in self._budgets}
        tried = self._easiest(seconds, widest)
        if tried is None or self._acceptance.is_guessed:
            return tried or OFF
        more = seconds[tried] / seconds[OFF] - 1.0
        if self.budget == tried and self._drafted:
            pays = fmean(self._drafted) >= more
            self._num_lost = 0 if pays else min(self._num_lost + 1, _RAREST)
            return tried if pays else OFF
        earned = self._num_off * _TRIALS / _PERIOD / 2**self._num_lost
        reading = self._seconds_to_read(num_unread, widest) / (_PERIOD * seconds[OFF])
        return tried if earned >= more + reading else OFF

    def _seconds_to_read(self, num_tokens: int, widest: Budget) -> float:
        """Return the seconds in which the draft reads texts: those of passes over `_READ` tokens.

        Such a pass is what one more drafted token of as many requests costs.
        """
        last = max(widest.num_steps, 1)
        first = Budget(1, min(last - 1, 1))
        both = (self._seconds(Budget(1, last), _READ, widest), self._seconds(first, _READ, widest))
        return max(both[0] - both[1], 0.0) / max(last - 1, 1) * num_tokens / _READ

    def _easiest(self, seconds: Mapping[Budget, float], widest: Budget) -> Budget | None:
        """Return the drafts that pay with the least chance of a token; None where none can.

        Those of one token may cost more than the token that they can yield.
        """
        for chance in _CHANCES:
            rates = {of: _chanced(of.within(widest), chance) / seconds[of] for of in self._budgets}
            best = max(self._budgets, key=rates.__getitem__)
            if best != OFF:
                return best
        return None

    def best(self, batch_size: int, widest: Budget) -> Budget:
        """Return the budget of most tokens per second; of near ties, that of most particles.

        A larger batch never gets more work, N K, than a smaller one: sizes are visited from 1, in
        steps of a quarter of a power of two.
        """
        best = self._budgets[0]
        allowed = list(self._budgets)
        tokens = {of: self._acceptance.tokens(of.within(widest)) for of in allowed}
        nodes = {of: self._branching.nodes(of.within(widest)) for of in allowed}
        costs = self.costs
        assert costs is not None, "asked for where they are known"

        def seconds(budget: Budget, size: int) -> float:
            return costs.round(size, budget, widest, self._length, nodes[budget])

        for size in _sizes(batch_size):
            rates = {of: tokens[of] / seconds(of, size) for of in allowed}
            enough = max(_TAKEN * max(rates.values()), rates[OFF])
            best = max((b for b in allowed if rates[b] >= enough), key=lambda b: (b[0], rates[b]))
            allowed = [b for b in allowed if _work(b, widest) <= _work(best, widest)]
        return best

    def _rate(self, budget: Budget, batch_size: int, widest: Budget) -> float:
        tokens = self._acceptance.tokens(budget.within(widest))
        return tokens / self._seconds(budget, batch_size, widest)

    def _seconds(self, budget: Budget, batch_size: int, widest: Budget) -> float:
        assert self.costs is not None, "asked for where they are known"
        nodes = self._branching.nodes(budget.within(widest))
        return self.costs.round(batch_size, budget, widest, self._length, nodes)


def _work(budget: Budget, widest: Budget) -> int:
    num_particles, num_steps = budget.within(widest)
    return num_particles * num_steps


def _sizes(last: int) -> Iterator[int]:
    """Yield 1, 2, ..., 8, 10, 12, 14, 16, 20, ..., up to the first not below ``last``."""
    size = 1
    yield size
    while size < last:
        size += 1 << max(size.bit_length() - 3, 0)
        yield size


SCALE = 0.4
"""Prior of s: that of the shipped pair at c = 2 (bench/results/fidelity)."""

PRIOR_INFORMATION = 30.0
"""Information of the prior. An answer of the shipped pair has about 3, times g^2."""

WINDOW_INFORMATION = 800.0
"""Most information that is kept: s within 0.035, and the pair's last 2,400 answers at c = 2."""


class Dial:
    """Estimate of the scale, which converts a tilt into an evidence threshold.

    All ranks of a server must add the same answers in the same order, to get the same estimate.
    """

    def __init__(self) -> None:
        self._information = PRIOR_INFORMATION
        self._sum = SCALE * PRIOR_INFORMATION

    @property
    def scale(self) -> float:
        """Return the estimate of s, at least 0."""
        return max(self._sum / self._information, 0.0)

    def threshold(self, tilt: float) -> float:
        """Return the evidence threshold c for a ``tilt`` >= 0; infinity for 0."""
        if tilt == 0.0:
            return math.inf
        return max(self.scale / tilt - 1.0, 0.0)

    def with_threshold(self, config: RequestConfig) -> RequestConfig:
        """Return the options with the threshold for their tilt, which stays with the request."""
        if config.mode != "auto" or config.tilt is None:
            return config
        return replace(config, threshold_in_force=self.threshold(config.tilt))

    def learn(self, threshold: float, numerator: float, information: float) -> None:
        """Update the estimate with an answer that has ended.

        Args:
            threshold: its c.
            numerator: of its tilt: the sum of l - E l, with l = log q / p.
            information: the sum of the variances of l, the denominator of its tilt.
        """
        gain = 1.0 / (1.0 + threshold)  # 0 where c is infinite
        self._sum += gain * numerator
        self._information += gain * gain * information
        kept = min(WINDOW_INFORMATION / self._information, 1.0)
        self._sum = kept * self._sum
        self._information = kept * self._information
