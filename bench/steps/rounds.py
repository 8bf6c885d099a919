"""Simulate rounds on recorded answers: what they draft and keep, and who chooses their N and K.

Verification token by token accepts a drafted token y with probability min(1, q(y) / p(y)), whatever
came before. So, of an answer that the target wrote, the places where a draft fails are independent
draws that no N or K changes, and one answer serves for all ways to choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sglang_smc.options.policy import Curve, Policy, RoundCosts, fewer_rejections
from sglang_smc.options.request import Budget, budgets

TOP = Budget(4, 16)
USERS = (1, 2, 4)
#: Of what a request kept: a prior of so many tokens, at the probability of all requests.
PRIOR_TOKENS = 8.0
PRIOR_PROBABILITY = 0.8
#: Decay of what all requests kept, per round of one.
MEMORY = 0.98

#: Returns the ms of a round, by requests and by N and K.
Milliseconds = Callable[[int, Budget], float]


class RecordedAnswer(NamedTuple):
    """What a draft does along an answer of L tokens."""

    accepted: np.ndarray  # [L] probability that a single chain's token is accepted
    sure: np.ndarray  # [L] the same, guessed before each token from the draft's entropy
    behind: dict[int, np.ndarray]  # such guesses behind a rejected token, by its place
    length: int  # of the recorded answer, where this is a repetition


@dataclass(eq=False)
class RunningRequest:
    """A request that writes an answer.

    Args:
        uniforms: ``[L]`` a single chain's token is rejected where one is above ``accepted``.
    """

    index: int  # of the answer
    answer: RecordedAnswer
    uniforms: np.ndarray
    place: int = 0
    #: Recent tokens lost, as of single chains, and tried.
    counts: tuple[float, float] = (0.0, 0.0)

    def kept(self, num_chains: int) -> int:
        """Return the tokens that a round keeps if it drafts enough, here or up to the end."""
        loss = (1.0 - self.answer.accepted[self.place :]) * fewer_rejections(num_chains)
        failed = self.uniforms[self.place :] < loss
        return int(failed.argmax()) if failed.any() else len(failed)

    def sure(self, num_chains: int, most: int) -> np.ndarray:
        """Return guesses ``[most]``, before each is drafted, that the first tokens are all kept."""
        kept = self.kept(num_chains)
        answer = self.answer
        along = answer.sure[self.place : self.place + kept + 1]
        place = (self.place + kept) % answer.length
        nearest = min(answer.behind, key=lambda other: abs(other - place))
        each = np.concatenate([along, np.resize(answer.behind[nearest], most)])[:most]
        return np.cumprod(1.0 - (1.0 - each) * fewer_rejections(num_chains))


class Chooser(Protocol):
    """A way to choose N and K."""

    def choose(self, running: Sequence[RunningRequest]) -> Budget:
        """Return N and K of the next round."""
        ...

    def learn(self, running: Sequence[RunningRequest], of: Budget, kept: Sequence[int]) -> None:
        """Read what a round has kept of each request, before the next one is chosen."""

    def waits(self, of: Budget) -> float:
        """Return the ms that a round waits for the host beside its passes."""
        return 0.0


class FixedSteps(Chooser):
    """The same N and K in every round."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def choose(self, running: Sequence[RunningRequest]) -> Budget:
        """Return N and K as given."""
        return self._budget


class AsServed(Chooser):
    """The package's policy, which learns a round late, as under the overlap schedule."""

    def __init__(self, top: Budget, milliseconds: Milliseconds) -> None:
        curves = {
            of: Curve(tuple((users, milliseconds(users, of)) for users in USERS))
            for of in budgets(top)
        }
        self._top = top
        self._policy = Policy(top, RoundCosts(curves))
        self._late: list[tuple[Budget, int]] = []

    def choose(self, running: Sequence[RunningRequest]) -> Budget:
        """Return what is in force, and let the policy choose for the round after."""
        now = self._policy.budget
        self._policy.choose(len(running), self._top)
        for of, num_kept in self._late:
            self._policy.learn(of, num_kept)
        self._policy.end_round()
        return now

    def learn(self, running: Sequence[RunningRequest], of: Budget, kept: Sequence[int]) -> None:
        """Keep a round's results until the next choice is made."""
        self._late = [(of, num_kept) for num_kept in kept]


@dataclass(eq=False)
class StepsByRequest(Chooser):
    """K in every round by what each running request has kept of late.

    A round's results come late, as under the overlap schedule, and K is chosen a round ahead.

    Args:
        top: its N is kept; K halves from its K.
        decay: of a request's counts, per round.
    """

    top: Budget
    milliseconds: Milliseconds
    decay: float
    _lost: float = PRIOR_TOKENS * (1.0 - PRIOR_PROBABILITY)
    _tried: float = PRIOR_TOKENS
    _late: list[tuple[RunningRequest, Budget, int]] = field(default_factory=list)
    _next: Budget | None = None

    def choose(self, running: Sequence[RunningRequest]) -> Budget:
        """Return what was chosen, and choose the K of most expected tokens a ms for the next."""
        loss = self._lost / self._tried
        each = [
            _loss(request.counts, loss) * fewer_rejections(self.top.num_particles)
            for request in running
        ]

        def rate(budget: Budget) -> float:
            tokens = sum(expected_tokens(1.0 - min(one, 1.0), budget.num_steps) for one in each)
            return tokens / self.milliseconds(len(running), budget)

        best = max(_of_steps(self.top), key=rate)
        for request, of, num_kept in self._late:
            self._count(request, of, num_kept)
        now = self._next or best
        self._next = best
        return now

    def learn(self, running: Sequence[RunningRequest], of: Budget, kept: Sequence[int]) -> None:
        """Keep a round's results until the next choice is made."""
        self._late = [(request, of, one) for request, one in zip(running, kept, strict=True)]

    def _count(self, request: RunningRequest, of: Budget, num_kept: int) -> None:
        lost = (num_kept < of.num_steps) / fewer_rejections(of.num_particles)
        tried = min(num_kept + 1, of.num_steps)
        before = request.counts
        request.counts = self.decay * before[0] + lost, self.decay * before[1] + tried
        self._lost = MEMORY * self._lost + lost
        self._tried = MEMORY * self._tried + tried


def _loss(counts: tuple[float, float], loss: float) -> float:
    lost, tried = counts
    return (lost + PRIOR_TOKENS * loss) / (tried + PRIOR_TOKENS)


def _of_steps(top: Budget) -> list[Budget]:
    """Return the budgets of a server that draft, with all its particles."""
    return [of for of in budgets(top) if of.num_steps and of.num_particles == top.num_particles]


def expected_tokens(probability: float, num_steps: int) -> float:
    """Return the tokens of a round of K, where each draft is kept with this probability."""
    return float(sum(probability**column for column in range(num_steps + 1)))


@dataclass(eq=False)
class Stopping(Chooser):
    """A round that stops drafting where another pass of the draft is not worth its time.

    It is, where more tokens are expected of it than all rounds so far yielded in as long.

    Args:
        wait: ms for which the device waits before each pass of the draft but the first.
    """

    top: Budget
    milliseconds: Milliseconds
    wait: float = 0.0
    _tokens: float = 1.0
    _spent: float = 0.0

    def choose(self, running: Sequence[RunningRequest]) -> Budget:
        """Return the K at which the round stops."""
        num_chains, most = self.top
        size = len(running)
        sure = np.sum([request.sure(num_chains, most) for request in running], 0)  # [K]
        rate = self._tokens / self._spent if self._spent else 0.0
        num_steps = 1
        while num_steps < most:
            deeper = Budget(num_chains, num_steps + 1)
            more = self.milliseconds(size, deeper) - self.milliseconds(
                size, Budget(num_chains, num_steps)
            )
            if sure[num_steps - 1] < (more + self.wait) * rate:
                break
            num_steps += 1
        return Budget(num_chains, num_steps)

    def learn(self, running: Sequence[RunningRequest], of: Budget, kept: Sequence[int]) -> None:
        """Count tokens and time."""
        self._tokens += sum(kept) + len(kept)
        self._spent += self.milliseconds(len(running), of) + self.waits(of)

    def waits(self, of: Budget) -> float:
        """Return the ms of all waits."""
        return self.wait * (of.num_steps - 1)


class KnownRounds(Stopping):
    """The K of any size that is best for what a round will keep: a bound."""

    def choose(self, running: Sequence[RunningRequest]) -> Budget:
        """Return the K of most tokens, less what its time yields in other rounds."""
        num_chains, most = self.top
        longest = [request.kept(num_chains) for request in running]
        rate = self._tokens / self._spent if self._spent else 0.0

        def gain(budget: Budget) -> float:
            tokens = sum(min(one, budget.num_steps) for one in longest)
            return tokens - rate * self.milliseconds(len(running), budget)

        return max((Budget(num_chains, k) for k in range(1, most + 1)), key=gain)


class KnownRequests(Chooser):
    """The K of a server that is best for the running answers, whose rounds are known: a bound."""

    def __init__(self, top: Budget, milliseconds: Milliseconds) -> None:
        self._milliseconds = milliseconds
        self._of_steps = _of_steps(top)
        self._tokens: dict[tuple[int, Budget], float] = {}

    def choose(self, running: Sequence[RunningRequest]) -> Budget:
        """Return the K of most expected tokens a ms."""

        def rate(budget: Budget) -> float:
            tokens = sum(self._expected(request, budget) for request in running)
            return tokens / self._milliseconds(len(running), budget)

        return max(self._of_steps, key=rate)

    def _expected(self, request: RunningRequest, budget: Budget) -> float:
        key = request.index, budget
        if key not in self._tokens:
            self._tokens[key] = tokens_a_round(request.answer.accepted, budget)
        return self._tokens[key]


def tokens_a_round(accepted: np.ndarray, budget: Budget) -> float:
    """Return the tokens a round along an answer, of fixed N and K: its length over its rounds."""
    kept = 1.0 - (1.0 - accepted) * fewer_rejections(budget.num_particles)
    length = len(kept)
    rounds = np.zeros(length + budget.num_steps + 2)  # from each place to the end, expected
    for place in range(length - 1, -1, -1):
        reached = np.cumprod(np.append(1.0, kept[place : place + budget.num_steps]))
        ends = reached - np.append(reached[1:], 0.0)  # at each number of tokens kept
        rounds[place] = 1.0 + ends @ rounds[place + 1 : place + 1 + len(ends)]
    return length / rounds[0]


def play(
    chooser: Chooser,
    milliseconds: Milliseconds,
    answers: Sequence[RecordedAnswer],
    users: int,
    *,
    times: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Write every answer ``times`` times, in random order, with all users busy to the end.

    Returns:
        Of each answer: its share of all rounds' ms, and its tokens, ``[answers]``.
    """
    draw = np.random.default_rng(seed)
    waiting = draw.permutation(np.repeat(np.arange(len(answers)), times)).tolist()
    spent = np.zeros(len(answers))
    tokens = np.zeros(len(answers))
    running: list[RunningRequest] = []
    while True:
        while waiting and len(running) < users:
            index = waiting.pop()
            own = np.random.default_rng([seed, len(waiting)])  # the same, whoever chooses
            answer = answers[index]
            running.append(RunningRequest(index, answer, own.random(len(answer.accepted))))
        if len(running) < users:
            return spent, tokens
        budget = chooser.choose(running)
        each = (milliseconds(users, budget) + chooser.waits(budget)) / users
        kept = [min(of.kept(budget.num_particles), budget.num_steps) for of in running]
        for request, num_kept in zip(running, kept, strict=True):
            end = min(request.place + num_kept + 1, len(request.uniforms))
            spent[request.index] += each
            tokens[request.index] += end - request.place
            request.place = end
        chooser.learn(running, budget, kept)
        running = [of for of in running if of.place < len(of.uniforms)]
