"""Simulate servers under load: request traces on measured round times and measured acceptance.

    .venv/bin/python bench/load                     # two minutes, without a GPU

Events are prefills and rounds. Their seconds are those of `bench/gpu` on an H200, measured or
modelled (`gpu.expected`). A round keeps draft tokens until one is rejected, with the request's own
chance; each setting rejects so often that it yields the tokens a pass that were measured of it, on
the same texts by the same draft. Rejections of one pair tell nothing of another's. The policy is
the package's. No figure here is a measurement.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np
import study
from gpu.expected import SHAPES, milliseconds, ours, published
from gpu.expected import Shape as Timed
from intervals import Interval
from results import Report, markdown_table
from speed import grid
from study import PUBLISHED, REPOSITORY, BenchError

from sglang_smc.drafts.sizes import ROWS
from sglang_smc.options.policy import Curve, Policy, RoundCosts
from sglang_smc.options.request import OFF, Budget, budgets

USERS = (1, 2, 4, 8, 16, 32, 64)
MOST_RUNNING = 64
SEEDS = 4  # of each trace
TOKENS = 256  # of an answer on average, behind a prompt of as many
AT_ONCE = -math.inf
# chances
LEAST = 1e-6
MOST = 1 - 1e-6

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
        self._shape = shape
        self._draw = np.random.default_rng(seed)

    def __call__(self, chances: np.ndarray) -> tuple[float, np.ndarray]:
        seconds = self._shape.seconds.at(len(chances))
        return seconds, self._shape.keep(chances, self._draw)


class Adaptive:
    """Rounds of the package's policy, which learns a round late, as under the overlap schedule."""

    def __init__(self, shapes: Mapping[Budget, RoundKind], seed: int = 0) -> None:
        self._shapes = shapes
        self._draw = np.random.default_rng(seed)
        top = next(iter(shapes))
        costs = RoundCosts({budget: shape.seconds for budget, shape in shapes.items()})
        self.policy = Policy(top, costs)
        self._top = top
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
    is_limited: bool  # to the users; else speed is what is asked for, and time alone tells


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
    waiting = deque(sorted(requests, key=lambda one: one.arrives))
    running = []
    now = 0.0
    while waiting or running:
        joining = []
        while waiting and waiting[0].arrives <= now and len(running) + len(joining) < most:
            joining.append(waiting.popleft())
        if joining:
            began = now
            now = now + prefill.seconds.at(len(joining))
            for one in joining:
                one.arrives = began if one.arrives == AT_ONCE else one.arrives
                one.tokens = 1
                one.first = now + prefill.latency
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


# --- What is measured: seconds of bench/gpu, tokens a pass of bench/trees and bench/real

PLAIN = "AR"
ADAPTIVE = "`exact`, adaptive from ({}, {})"
EXACT = "`exact`, N = {}, K = {}"
FIXED = (Budget(1, 8), Budget(8, 8), Budget(4, 17))
#: The cells of bench/gpu whose first tokens a system's prefill takes.
PREFILLS = {PLAIN: "ar", "SGLang, EAGLE": "eagle-3", "SGLang, draft": "standalone-chain"}
#: The server that drafted 1.03 tokens a round: its rounds without drafts take as long, at most.
OFF_CELL = "smc-exact-adaptive-with-a-head-n8-k8-b32-p256"


class MeasuredTexts(NamedTuple):
    """A pair of models on texts of its own: what its drafts cost, and what was kept of them.

    Attributes:
        tokens: returns tokens a pass by setting, at T = 0.7, from a folder of results.
        names: a setting's name there, by that of `gpu.expected`; ``N`` and ``K`` in `ours`.
    """

    title: str
    label: str
    family: str  # of `bench/speed`, whose rounds cost as much
    top: Budget  # of a default server
    tokens: Callable[[Path], Mapping[str, Interval]]
    ours: str
    trees: Mapping[str, tuple[str, int]]  # with the most tokens that a round keeps


def _of_trees(folder: Path) -> dict[str, Interval]:
    rows = json.loads((folder / "trees" / "trees.json").read_text())["rows"]
    return {row["name"]: Interval(**row["tokens"]["0.7"]) for row in rows}


def _of_real_text(folder: Path) -> dict[str, Interval]:
    rows = csv.DictReader((folder / "real" / "real.csv").read_text().splitlines())
    here = (row for row in rows if row["pair"] == "coder" and float(row["temperature"]) == 0.7)
    parts = {
        row["label"]: [row[f"tokens_per_pass_{of}"] for of in Interval._fields] for row in here
    }
    return {name: Interval(*map(float, numbers)) for name, numbers in parts.items()}


def _chosen(draft: str) -> Budget:
    """Return N and K of a default server that adapts."""
    return Budget(ROWS[draft].num_particles, ROWS[draft].most_steps)


TREE_OF_MODEL = "SGLang, draft model, tree 8 / 8 / 72"
_TREES = {"SGLang, EAGLE-3 head, tree 4 / 5 / 8": 5, "SGLang, EAGLE-3 head, tree 10 / 8 / 72": 8}
TEXTS = {
    "head": MeasuredTexts(
        "The shipped target with its EAGLE-3 head, on word problems",
        "shipped head, word problems",
        grid.EXACT_HEAD,
        _chosen("eagle3"),
        _of_trees,
        "`exact`, EAGLE-3 head, N = {}, K = {}",
        {name: (name, depth) for name, depth in _TREES.items()},
    ),
    "model": MeasuredTexts(
        "Qwen2.5-Coder 1.5B with 0.5B, on real text",
        "draft model, real text",
        grid.EXACT,
        _chosen("model"),
        _of_real_text,
        "exact N={} K={}",
        {TREE_OF_MODEL: ("SGLang tree 8 / 8 / 72", 8)},
    ),
}


def chance_of(tokens: float, num_steps: int) -> float:
    """Return the chance of which K tokens yield so many a round, the target's own included."""
    some = np.linspace(LEAST, MOST, 10_000)
    return float(np.interp(tokens, (1 - some ** (num_steps + 1)) / (1 - some), some))


class Measured:
    """Shapes and chances by tables of `bench/results`: an H200, a pair's texts, T = 0.7."""

    def __init__(self, texts: MeasuredTexts, folder: Path = PUBLISHED) -> None:
        self._times = published(folder)
        self.texts = texts
        self._tokens = texts.tokens(folder)
        one = self._tokens[texts.ours.format(1, 8)]
        spread = (one.high - one.low) / 2 / 1.96 * math.sqrt(one.n)
        many = NormalDist(one.mean, spread).quantiles(len(USERS) * 8)
        #: Of requests, that a token of a single chain is kept.
        self.chances = [chance_of(min(max(of, 1.0), 9.0), 8) for of in many]
        self._losses = {n: self._loss(texts.ours.format(n, k), k) for n, k in FIXED}
        self._losses[2] = math.sqrt(self._losses[1] * self._losses[4])

    def _loss(self, name: str, num_steps: int) -> float:
        """Return the loss of a setting, by its tokens a pass over requests of these chances."""
        losses = np.linspace(3.0, 0.0, 601)
        each = np.clip(1 - (1 - np.array(self.chances)) * losses[:, None], LEAST, MOST)
        passes = ((1 - each) / (1 - each ** (num_steps + 1))).mean(1)
        return float(np.interp(self._tokens[name].mean, 1 / passes, losses))

    def _curve(self, shape: Timed, batches: Iterable[int]) -> Curve:
        return Curve.of((b, milliseconds(self._times, shape, b)[0] / 1000) for b in batches)

    def shapes(self) -> dict[str, RoundKind]:
        """Return the shapes of fixed settings."""
        # Beyond the last batch that was measured, seconds go on linearly.
        found = {PLAIN: RoundKind(self._curve(SHAPES[PLAIN], (1, 8, 32, 64)))}
        for name, (own, depth) in self.texts.trees.items():
            curve = self._curve(SHAPES[name], (1, 8, 32))
            found[name] = RoundKind(curve, depth, self._loss(own, depth))
        return found | {EXACT.format(*budget): self._ours(budget) for budget in FIXED}

    def budgets(self) -> dict[Budget, RoundKind]:
        """Return the shapes of all budgets of an adaptive server."""
        plain = self._curve(SHAPES[PLAIN], (1, 8, 32, 64))
        more = self._times[OFF_CELL]["round_ms"] / 1000 / plain.at(32)
        off = RoundKind(Curve(tuple((size, more * of) for size, of in plain.points)))
        return {of: self._ours(of) if of.num_steps else off for of in budgets(self.texts.top)}

    def _ours(self, budget: Budget) -> RoundKind:
        curve = self._curve(ours(self.texts.family, *budget), USERS)
        return RoundKind(curve, budget.num_steps, self._losses[budget.num_particles])

    def prefill(self, system: str) -> PrefillTimes:
        """Return the prefills of a system: a request alone takes what one of eight adds."""
        own = grid.System(self.texts.family, 8, 8).slug
        cell = next((of for start, of in PREFILLS.items() if system.startswith(start)), own)
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

    texts: str
    trace: str
    system: str
    users: int
    simulated_tokens_per_second: float  # of all requests, from the first's arrival to the last end
    simulated_to_plain: float  # over plain decoding's; of requests that come by themselves about 1
    simulated_mean_s: float  # from arrival to end
    simulated_first_ms: float  # from arrival to first token, mean
    simulated_slowest_s: float  # from arrival to end, of the slowest request


def rows_of(texts: str, users: Iterable[int]) -> list[LoadRow]:
    """Return a row for each trace, number of users and system, plain decoding first."""
    measured = Measured(TEXTS[texts])
    fixed = measured.shapes()
    adapted = measured.budgets()
    decoders: dict[str, Callable[[int], Decoder]] = {
        **{name: partial(Fixed, shape) for name, shape in fixed.items()},
        ADAPTIVE.format(*measured.texts.top): partial(Adaptive, adapted),
    }
    found = []
    plain = 0.0
    for (name, trace), count, (system, make) in product(TRACES.items(), users, decoders.items()):
        runs = []
        for seed in range(SEEDS):
            requests = requests_of(trace, count, measured.chances, fixed[PLAIN].seconds, seed)
            most = count if trace.is_limited else MOST_RUNNING
            play(make(seed), measured.prefill(system), requests, most)
            runs.append(numbers_of(requests))
        mean = {name: fmean(one[name] for one in runs) for name in runs[0]}
        speed = mean["simulated_tokens_per_second"]
        plain = speed if system == PLAIN else plain
        names = {"texts": texts, "trace": name, "system": system}
        found.append(LoadRow(**names, users=count, simulated_to_plain=speed / plain, **mean))
    return found


def numbers_of(requests: Sequence[LoadRequest]) -> dict[str, float]:
    """Return what a trace that has been played adds to a `Row`."""
    span = max(one.ends for one in requests) - min(one.arrives for one in requests)
    return {
        "simulated_tokens_per_second": sum(one.length for one in requests) / span,
        "simulated_mean_s": fmean(one.ends - one.arrives for one in requests),
        "simulated_first_ms": 1000 * fmean(one.first - one.arrives for one in requests),
        "simulated_slowest_s": max(one.ends - one.arrives for one in requests),
    }


#: Of requests that come by themselves the speed is theirs.
OF_USERS = "simulated tokens / s (times AR)"
CELLS: dict[str, Callable[[LoadRow], str]] = {
    OF_USERS: lambda row: f"{row.simulated_tokens_per_second:,.0f} ({row.simulated_to_plain:.2f})",
    "simulated s of a request": lambda row: f"{row.simulated_mean_s:.2f}",
    "simulated ms to the first token": lambda row: f"{row.simulated_first_ms:,.0f}",
    "simulated s of the slowest request": lambda row: f"{row.simulated_slowest_s:.1f}",
}


def markdown(rows: Sequence[LoadRow], note: str) -> str:
    """Return a page with tables for each trace: a line for a system, a column for users."""
    parts = ["# Simulated servers under load", note]
    for texts, (name, trace) in product(dict.fromkeys(row.texts for row in rows), TRACES.items()):
        here = [row for row in rows if (row.texts, row.trace) == (texts, name)]
        users, systems = ({getattr(row, of): 0 for row in here} for of in ("users", "system"))
        parts.append(f"## {TEXTS[texts].title}. {name.capitalize()}: {trace.about}")
        for title, cell in CELLS.items():
            if title == OF_USERS and not trace.is_limited:
                continue
            by = {(row.system, row.users): cell(row) for row in here}
            lines = [[system, *(by[system, count] for count in users)] for system in systems]
            parts.append(markdown_table([f"{title}, by users", *map(str, users)], lines))
    return "\n\n".join(parts) + "\n"


PAGE = REPOSITORY / "docs" / "expect.md"
MARKS = ("<!-- load -->", "<!-- end of load -->")
#: Of the table on that page.
SHOWN = (1, 2, 8, 32, 64)


def summary(rows: Sequence[LoadRow]) -> str:
    """Return speeds over plain decoding's of users who ask again at once."""
    here = [row for row in rows if row.trace == "steady" and row.system != PLAIN]
    by = {(row.texts, row.system, row.users): f"{row.simulated_to_plain:.2f}" for row in here}
    names = dict.fromkeys((row.texts, row.system) for row in here)
    lines = [
        [TEXTS[texts].label, system, *(by[texts, system, n] for n in SHOWN)]
        for texts, system in names
    ]
    return markdown_table(["simulated, by users", "", *map(str, SHOWN)], lines)


def note(origin: Mapping[str, Any]) -> str:
    """Return what the tables stand on."""
    return (
        "**All figures are simulated.** Seconds of rounds and prefills are those of an 8B on an "
        "H200 with prompts of 256 tokens and a head or a draft model, measured at 1, 8 and 32 "
        "requests or modelled as in [gpu](../gpu/gpu.md); those of other batches lie on lines "
        "between. What a first token takes beyond what one of eight adds is latency, which holds "
        "up no one. A round without drafts takes what it took the adaptive server that kept next "
        "to none. Tokens are kept with a chance of each request's own; each setting rejects so "
        "often that it yields the tokens a pass that were measured of it at T = 0.7, of the "
        "shipped head in [trees](../trees/trees.md), of the draft model in "
        "[real](../real/real.md). Without prefills, tokens a second of the head are thus those of "
        "the table in docs/expect.md. "
        "The policy is the package's. Where requests come by themselves, all servers that keep up "
        f"have one speed, and only times are told. `bench/load`, {origin['date'][:10]}, commit "
        f"{origin['git_sha']}."
    )


REPORT = Report("load", LoadRow, markdown)


def run(options: argparse.Namespace) -> None:
    """Simulate, and write the report; raise BenchError if a page cannot get its table."""
    if options.publish and not set(SHOWN) <= set(options.users):
        raise BenchError(
            f"--users {' '.join(map(str, options.users))} lacks some of those that "
            f"docs/expect.md shows, {SHOWN}: publish all, or leave out --publish."
        )
    rows = [row for texts in TEXTS for row in rows_of(texts, options.users)]
    study.prepare_folder(options.output_dir)
    print(REPORT.write(options.output_dir, rows, {"users": options.users}, note))
    if options.publish:
        REPORT.publish(options.output_dir, PUBLISHED / "load")
        study.write_between(PAGE, MARKS, summary(rows))


def main(argv: Sequence[str] | None = None) -> int:
    made = study.parser("load", "Simulate servers under load, on measured round times.")
    add = made.add_argument
    add("--users", type=study.positive, nargs="+", default=list(USERS), help="at a time")
    add("--publish", action="store_true", help="also copy to bench/results")
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options))
