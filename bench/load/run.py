"""Simulate servers under load: request traces on measured round times and recorded acceptance.

    .venv/bin/python bench/load                                     # a minute, without a GPU
    .venv/bin/python bench/load --answers real-output/answers/coder-exact-n1-k8-t0.7.jsonl

Events are prefills and rounds. Their seconds are those of `bench/gpu` on an H200, measured or
modelled (`gpu.expected`). A round keeps draft tokens until one is rejected, with the request's own
chance. The policy is the package's. No figure here is a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np
import study
from gpu.expected import SHAPES, milliseconds, ours, published
from gpu.expected import Shape as Timed
from results import Report, markdown_table
from speed import grid
from study import PUBLISHED, BenchError

from sglang_smc.drafts.sizes import ROWS
from sglang_smc.options.policy import Curve, Policy, RoundCosts
from sglang_smc.options.request import OFF, Budget, budgets

USERS = (1, 2, 4, 8, 16, 32, 64)
MOST_RUNNING = 64
SEEDS = 4  # of each trace
TOP = Budget(ROWS["eagle3"].num_particles, ROWS["eagle3"].most_steps)
TOKENS = 256  # of an answer on average, behind a prompt of as many
TEMPERATURE = "0.7"
AT_ONCE = -math.inf
LEAST, MOST = 1e-6, 1 - 1e-6  # chances

# --- A server: seconds and kept tokens of a round


class RoundKind(NamedTuple):
    """A kind of round."""

    seconds: Curve  # by running requests
    num_steps: int = 0
    loss: float = 1.0  # rejections of a token for one of a single chain

    def keep(self, chances: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Return the tokens kept ``[B]`` of requests, from a single chain's chances ``[B]``."""
        each = np.clip(self.chances(chances), LEAST, MOST)
        kept = np.log(1.0 - draw.random(len(each))) / np.log(each)
        return np.minimum(kept.astype(int), self.num_steps)

    def chances(self, chances: np.ndarray) -> np.ndarray:
        """Return the chances ``[B]`` that rounds of this kind keep a token."""
        return np.maximum(1.0 - (1.0 - chances) * self.loss, 0.0)


class PrefillTimes(NamedTuple):
    """Seconds of prefills with their first tokens."""

    seconds: Curve  # in which nothing else runs, by requests
    latency: float = 0.0  # until the user has the token, beside other work


#: Returns the seconds of a round and the tokens kept ``[B]``, by the requests' chances ``[B]``.
Decoder = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Fixed:
    """Rounds of one shape."""

    def __init__(self, shape: RoundKind, seed: int = 0) -> None:
        self._shape, self._draw = shape, np.random.default_rng(seed)

    def __call__(self, chances: np.ndarray) -> tuple[float, np.ndarray]:
        seconds = self._shape.seconds.at(len(chances))
        return seconds, self._shape.keep(chances, self._draw)


class Adaptive:
    """Rounds of the package's policy, which learns a round late, as under the overlap schedule."""

    def __init__(self, shapes: Mapping[Budget, RoundKind], seed: int = 0) -> None:
        self._shapes, self._draw = shapes, np.random.default_rng(seed)
        top = next(iter(shapes))
        costs = RoundCosts({budget: shape.seconds for budget, shape in shapes.items()})
        self.policy, self._top = Policy(top, costs), top
        self._late: tuple[Budget, np.ndarray] = OFF, np.zeros(0)

    def __call__(self, chances: np.ndarray) -> tuple[float, np.ndarray]:
        now = self.policy.budget
        self.policy.choose(len(chances), self._top)
        budget, late = self._late
        for num_kept in late.tolist():
            self.policy.learn(budget, num_kept)
        self.policy.end_round()
        kept = self._shapes[now].keep(chances, self._draw)
        self._late = now, kept
        return self._shapes[now].seconds.at(len(chances)), kept


class ByRequest:
    """Rounds that give each request its own N and K, by its true chances: a bound, and not built.

    Options that yield more than their rows' price are taken, at the price of the most tokens a
    second; a pass costs what the cheapest one of as many rows and as deep a draft does.
    """

    def __init__(self, shapes: Mapping[Budget, RoundKind], seed: int = 0) -> None:
        self._shapes, self._draw = shapes, np.random.default_rng(seed)
        self._plan = lru_cache(self._find)

    def __call__(self, chances: np.ndarray) -> tuple[float, np.ndarray]:
        shape = self._plan(tuple(chances.tolist()))
        return shape.seconds.at(1), shape.keep(chances, self._draw)

    def _find(self, chances: tuple[float, ...]) -> RoundKind:  # of steps and losses [B]
        size, own, found = len(chances), np.array(chances), []
        for depth in {k for _, k in self._shapes}:
            deep = {of: shape for of, shape in self._shapes.items() if of.num_steps == depth}
            options = list(product(deep, range(depth + 1)))
            steps = np.array([k for _, k in options])
            losses = np.array([deep[of].loss for of, _ in options])
            rows = np.array([of.num_particles * (k + 1) if k else 1 for of, k in options])
            each = np.stack([np.clip(deep[of].chances(own), LEAST, MOST) for of, _ in options])
            kept = (each - each ** (steps[:, None] + 1)) / (1 - each)  # [options, B]
            for price in np.geomspace(1e-4, 1, 40):
                best = (kept - price * rows[:, None]).argmax(0)
                total, tokens = rows[best].sum(), size + kept[best, np.arange(size)].sum()
                time = min(of.seconds.at(total / n / (depth + 1)) for (n, _), of in deep.items())
                found.append(
                    (tokens / time, RoundKind(Curve(((1, time),)), steps[best], losses[best]))
                )
        return max(found, key=lambda one: one[0])[1]


# --- Traces of requests


@dataclass
class LoadRequest:
    """A request and its progress; times are seconds since the trace began."""

    arrives: float  # AT_ONCE: when fewer run than are users
    length: int  # tokens of its answer
    chance: float  # that a token of a single chain is kept
    tokens: int = 0
    first: float = 0.0
    ends: float = 0.0


class ArrivalTrace(NamedTuple):
    """Requests as they come: those of so many users, and how many run at a time."""

    about: str
    arrivals: Callable[[int, float, random.Random], Iterator[float]]
    spread: float  # of the logarithms of lengths
    is_limited: bool  # to the users


def _all(count: int, at: float) -> Callable[[int, float, random.Random], Iterator[float]]:
    return lambda users, alone, draw: iter([at] * (count * users))


def _poisson(users: int, alone: float, draw: random.Random) -> Iterator[float]:
    now = 0.0
    for _ in range(8 * users + 32):
        now += draw.expovariate(users / alone)
        yield now


def _bursts(users: int, alone: float, draw: random.Random) -> Iterator[float]:
    return (2.0 * alone * burst for burst in range(4) for _ in range(users))


TRACES = {
    "steady": ArrivalTrace("each user asks again at once, 8 times", _all(8, AT_ONCE), 0.5, True),
    "poisson": ArrivalTrace("as many users on average, with plain decoding", _poisson, 0.5, False),
    "bursts": ArrivalTrace("all users ask at once, four times", _bursts, 0.5, False),
    "rollouts": ArrivalTrace(
        "four answers a user, of long-tailed lengths", _all(4, 0.0), 1.0, True
    ),
}


def requests_of(
    trace: ArrivalTrace, users: int, chances: Sequence[float], plain: Curve, seed: int = 0
) -> list[LoadRequest]:
    """Return the requests of a trace: the same for all that decode them."""
    draw = random.Random(f"{trace.about} {users} {seed}")
    arrivals = trace.arrivals(users, TOKENS * plain.at(users), draw)

    def length() -> int:
        drawn = draw.lognormvariate(math.log(TOKENS) - trace.spread**2 / 2, trace.spread)
        return min(max(round(drawn), 2), 8 * TOKENS)

    return [LoadRequest(at, length(), draw.choice(chances)) for at in arrivals]


def play(
    decoder: Decoder, prefill: PrefillTimes, requests: Iterable[LoadRequest], most: int
) -> None:
    """Answer all requests, at most ``most`` at a time; those that wait are prefilled first."""
    waiting, running, now = deque(sorted(requests, key=lambda one: one.arrives)), [], 0.0
    while waiting or running:
        joining = []
        while waiting and waiting[0].arrives <= now and len(running) + len(joining) < most:
            joining.append(waiting.popleft())
        if joining:
            began, now = now, now + prefill.seconds.at(len(joining))
            for one in joining:
                one.arrives = began if one.arrives == AT_ONCE else one.arrives
                one.tokens, one.first = 1, now + prefill.latency
            running += joining
        elif running:
            seconds, kept = decoder(np.array([one.chance for one in running]))
            now += seconds
            for one, num_kept in zip(running, kept.tolist(), strict=True):
                one.tokens = min(one.tokens + 1 + num_kept, one.length)
        else:
            now = waiting[0].arrives
        for one in running:
            one.ends = now
        running = [one for one in running if one.tokens < one.length]


# --- What is measured: seconds of bench/gpu, acceptance of bench/trees or of answers

HEAD = "`exact`, EAGLE-3 head, N = {}, K = {}"
#: By the names in `bench/results/trees`: the most tokens that a round keeps.
TREES = {
    "SGLang, EAGLE-3 head, tree 4 / 5 / 8": 5,
    "SGLang, EAGLE-3 head, tree 10 / 8 / 72": 8,
    "SGLang, draft model, tree 8 / 8 / 72": 8,
}
EXACT = (Budget(1, 8), Budget(8, 8), Budget(4, 17))
PLAIN, ADAPTIVE = "AR", f"`exact`, EAGLE-3 head, adaptive from ({TOP[0]}, {TOP[1]})"
BY_REQUEST = "the same, N and K by request, chances known (not built)"
#: The cells of bench/gpu whose first tokens a system's prefill takes.
PREFILLS = {PLAIN: "ar", "SGLang, EAGLE": "eagle-3", "SGLang, draft": "standalone-chain"}
OURS = "smc-exact-with-a-head-n8-k8"
#: The server that drafted 1.03 tokens a round: its rounds without drafts take as long, at most.
OFF_CELL = "smc-exact-adaptive-with-a-head-n8-k8-b32-p256"


def chance_of(tokens: float, num_steps: int) -> float:
    """Return the chance of which K tokens yield so many a round, the target's own included."""
    some = np.linspace(LEAST, MOST, 10_000)
    return float(np.interp(tokens, (1 - some ** (num_steps + 1)) / (1 - some), some))


class Measured:
    """Shapes and chances by tables of `bench/results`: an H200, the shipped pair, T = 0.7."""

    def __init__(self, folder: Path = PUBLISHED) -> None:
        self._times = published(folder)
        self._tokens = {
            row["name"]: row["tokens"][TEMPERATURE]
            for row in json.loads((folder / "trees" / "trees.json").read_text())["rows"]
        }
        one = self._tokens[HEAD.format(1, 8)]
        spread = (one["high"] - one["low"]) / 2 / 1.96 * math.sqrt(one["n"])
        many = NormalDist(one["mean"], spread).quantiles(len(USERS) * 8)
        #: Of requests, that a token of the head's single chain is kept.
        self.chances = [chance_of(min(max(of, 1.0), 9.0), 8) for of in many]
        self._losses = {n: self._loss(HEAD.format(n, k), k) for n, k in EXACT}
        self._losses[2] = math.sqrt(self._losses[1] * self._losses[4])

    def _loss(self, name: str, num_steps: int) -> float:
        """Return the loss of a setting, by its tokens a pass over requests of these chances."""
        losses = np.linspace(3.0, 0.0, 601)
        each = np.clip(1 - (1 - np.array(self.chances)) * losses[:, None], LEAST, MOST)
        passes = ((1 - each) / (1 - each ** (num_steps + 1))).mean(1)
        return float(np.interp(self._tokens[name]["mean"], 1 / passes, losses))

    def read(self, answers: Path) -> list[float]:
        """Return the chances of answers in a file of `bench/real` or `bench/drafts`."""
        header, *entries = study.whole_lines(answers) or [{}]
        n, k = ((header.get("smc") or {}).get(name, 0) for name in Budget._fields)
        infos = [one["info"] for one in entries if one["info"].get("spec_verify_ct")]
        if n not in self._losses or not infos:
            raise BenchError(
                f"{answers} has {len(infos)} answers with drafts, of N = {n}; allowed: a cell of N "
                "= 1, 2, 4 or 8, with answers. Name another file."
            )
        each = [(of["completion_tokens"] - 1) / of["spec_verify_ct"] for of in infos]
        return [max(1 - (1 - chance_of(of, k)) / self._losses[n], LEAST) for of in each]

    def _curve(self, shape: Timed, batches: Iterable[int]) -> Curve:
        return Curve.of((b, milliseconds(self._times, shape, b)[0] / 1000) for b in batches)

    def shapes(self) -> dict[str, RoundKind]:
        """Return the shapes of fixed settings."""
        # Beyond the last batch that was measured, seconds go on linearly.
        found = {PLAIN: RoundKind(self._curve(SHAPES[PLAIN], (1, 8, 32, 64)))}
        for name, depth in TREES.items():
            curve = self._curve(SHAPES[name], (1, 8, 32))
            found[name] = RoundKind(curve, depth, self._loss(name, depth))
        return found | {HEAD.format(*budget): self._ours(budget) for budget in EXACT}

    def budgets(self) -> dict[Budget, RoundKind]:
        """Return the shapes of all budgets of an adaptive server."""
        plain = self._curve(SHAPES[PLAIN], (1, 8, 32, 64))
        more = self._times[OFF_CELL]["round_ms"] / 1000 / plain.at(32)
        off = RoundKind(Curve(tuple((size, more * of) for size, of in plain.points)))
        return {of: self._ours(of) if of.num_steps else off for of in budgets(TOP)}

    def _ours(self, budget: Budget) -> RoundKind:
        curve = self._curve(ours(grid.EXACT_HEAD, *budget), USERS)
        return RoundKind(curve, budget.num_steps, self._losses[budget.num_particles])

    def prefill(self, system: str) -> PrefillTimes:
        """Return the prefills of a system: a request alone takes what one of eight adds."""
        cell = next((of for start, of in PREFILLS.items() if system.startswith(start)), OURS)
        batches = (self._times[f"{cell}-b{b}-p256"]["samples"] for b in (1, 8, 32))
        one, eight, more = (fmean(at for of in some for at in of["first"]) for some in batches)
        added = (eight - one) / 7
        latency = one - added
        points = ((1, added), (8, eight - latency), (32, more - latency))
        return PrefillTimes(Curve.of(points), latency)


# --- The study


@dataclass(frozen=True, kw_only=True)
class LoadRow:
    """A system under a trace; every number is simulated."""

    trace: str
    system: str
    users: int
    simulated_tokens_per_second: float  # of all requests, from the first's arrival to the last end
    simulated_to_plain: float  # over plain decoding's
    simulated_first_ms: float  # from arrival to first token, mean
    simulated_slowest_s: float  # from arrival to end, of the slowest request


def rows_of(measured: Measured, chances: Sequence[float], users: Iterable[int]) -> list[LoadRow]:
    """Return a row for each trace, number of users and system, plain decoding first."""
    fixed, adapted = measured.shapes(), measured.budgets()
    decoders: dict[str, Callable[[int], Decoder]] = {
        **{name: partial(Fixed, shape) for name, shape in fixed.items()},
        ADAPTIVE: partial(Adaptive, adapted),
        BY_REQUEST: partial(ByRequest, adapted),
    }
    found, plain = [], 0.0
    for (name, trace), count, (system, make) in product(TRACES.items(), users, decoders.items()):
        runs = []
        for seed in range(SEEDS):
            requests = requests_of(trace, count, chances, fixed[PLAIN].seconds, seed)
            most = count if trace.is_limited else MOST_RUNNING
            play(make(seed), measured.prefill(system), requests, most)
            runs.append(numbers_of(requests))
        mean = {name: fmean(one[name] for one in runs) for name in runs[0]}
        speed = mean["simulated_tokens_per_second"]
        plain = speed if system == PLAIN else plain
        row = {"trace": name, "system": system, "users": count, "simulated_to_plain": speed / plain}
        found.append(LoadRow(**row, **mean))
    return found


def numbers_of(requests: Sequence[LoadRequest]) -> dict[str, float]:
    """Return what a trace that has been played adds to a `Row`."""
    span = max(one.ends for one in requests) - min(one.arrives for one in requests)
    return {
        "simulated_tokens_per_second": sum(one.length for one in requests) / span,
        "simulated_first_ms": 1000 * fmean(one.first - one.arrives for one in requests),
        "simulated_slowest_s": max(one.ends - one.arrives for one in requests),
    }


CELLS: dict[str, Callable[[LoadRow], str]] = {
    "simulated tokens / s (times AR)": lambda row: (
        f"{row.simulated_tokens_per_second:,.0f} ({row.simulated_to_plain:.2f})"
    ),
    "simulated ms to the first token": lambda row: f"{row.simulated_first_ms:,.0f}",
    "simulated s of the slowest request": lambda row: f"{row.simulated_slowest_s:.1f}",
}


def markdown(rows: Sequence[LoadRow], note: str) -> str:
    """Return a page with tables for each trace: a line for a system, a column for users."""
    parts = ["# Simulated servers under load", note]
    for name, trace in TRACES.items():
        here = [row for row in rows if row.trace == name]
        users, systems = ({getattr(row, of): 0 for row in here} for of in ("users", "system"))
        parts.append(f"## {name.capitalize()}: {trace.about}")
        for title, cell in CELLS.items():
            by = {(row.system, row.users): cell(row) for row in here}
            lines = [[system, *(by[system, count] for count in users)] for system in systems]
            parts.append(markdown_table([f"{title}, by users", *map(str, users)], lines))
    return "\n\n".join(parts) + "\n"


def note(origin: Mapping[str, Any]) -> str:
    """Return what the tables stand on."""
    return (
        "**All figures are simulated.** Seconds of rounds and prefills are those of an 8B on an "
        "H200 with prompts of 256 tokens, measured at 1, 8 and 32 requests or modelled as in "
        "[gpu](../gpu/gpu.md); those of other batches lie on lines between. What a first token "
        "takes beyond what one of eight adds is latency, which holds up no one. A round without "
        "drafts takes what it took the adaptive server that kept next to none. Tokens are kept "
        f"with a chance of each request's own, from {origin['settings']['answers']}; settings "
        "reject in the same proportions as on the shipped pair at T = 0.7. The policy is the "
        f"package's. `bench/load`, {origin['date'][:10]}, commit {origin['git_sha']}."
    )


REPORT = Report("load", LoadRow, markdown)


def run(options: argparse.Namespace) -> None:
    """Simulate, and write the report."""
    measured = Measured()
    chances, source = measured.chances, "the interval of the head's single chain in bench/results"
    if options.answers:
        chances, source = measured.read(options.answers), options.answers.name
    rows = rows_of(measured, chances, options.users)
    study.prepare_folder(options.output_dir)
    settings = {"answers": source, "users": options.users}
    print(REPORT.write(options.output_dir, rows, settings, note))
    if options.publish:
        REPORT.publish(options.output_dir, PUBLISHED / "load")


def main(argv: Sequence[str] | None = None) -> int:
    made = study.parser("load", "Simulate servers under load, on measured round times.")
    add = made.add_argument
    add("--answers", type=Path, help="a cell's answers of bench/real or bench/drafts")
    add("--users", type=study.positive, nargs="+", default=list(USERS), help="at a time")
    add("--publish", action="store_true", help="also copy to bench/results")
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options))
