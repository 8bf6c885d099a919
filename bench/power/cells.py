"""Define the settings that are compared: plain decoding, powers by SMC, and published rivals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from real import run as real
from real.run import COMMON, MATCHES, PAIRS, PLAIN, SMC, USUAL
from study import slug_of

CODER = "coder"
SMALL = "smollm2"
#: Problems that are asked at once, and answered by all cells before the next ones.
AT_ONCE = 10
#: Particles of the largest cell, and plain samples that are chosen from.
MOST_PARTICLES = 32
SAMPLES = 8
#: Problems that are answered with several seeds, for the variance of log Z.
SEED_PROBLEMS = 4
SEEDS = 3
#: Problems of a cell that is one request at a time, and of those beside the main ones.
ALONE = 4
FEW = 10
GREEDY = "plain T=0"
#: What proposes a power's texts.
VERIFIED = "verified"
WEIGHED = "draft"
MCMC = "Metropolis-Hastings"


@dataclass(frozen=True)
class PowerCell(real.RealCell):
    """A setting.

    Args:
        power: of the target's distribution; 0 for plain decoding.
        proposal: what proposes a power's texts; `MCMC` does so without SMC.
        first: the number of problems; 0 for all.
        is_again: whether it answers the problems of another cell with further seeds.
        at_once: problems that are asked together.
    """

    power: float = 0.0
    proposal: str = ""
    first: int = 0
    is_again: bool = False
    at_once: int = AT_ONCE

    @property
    def slug(self) -> str:
        return f"{self.pair}-{slug_of(self.label).replace('^', '')}"

    @property
    def num_particles(self) -> int:
        return self.smc["num_particles"] if self.smc else 1

    def pairs(self, problems: int) -> list[tuple[int, int]]:
        """Return the samples and problems that are asked, sample by sample."""
        count = min(problems, self.first or problems)
        samples = range(1, SEEDS) if self.is_again else range(self.samples)
        return [(sample, index) for sample in samples for index in range(count)]


def cells() -> list[PowerCell]:
    """Return all settings, SMC before plain decoding, which scores its answers."""
    return [cell for pair in (CODER, SMALL) for cell in _cells(pair)]


def _cells(pair: str) -> Iterator[PowerCell]:
    main = [(4.0, VERIFIED), (2.0, VERIFIED)]
    weighed = [(4.0, WEIGHED)] if PAIRS[pair].draft else []
    for power, proposal in main:
        yield _power(pair, power, 8, proposal)
    for power, proposal in weighed:
        yield _power(pair, power, 8, proposal, first=FEW)
    for n in (16, MOST_PARTICLES):
        for power, proposal in main:
            yield _power(pair, power, n, proposal, first=FEW)
    for power, proposal in main + weighed:
        yield _power(pair, power, 8, proposal, first=SEED_PROBLEMS, is_again=True)
    for power, proposal in main:
        yield _power(pair, power, 8, proposal, first=ALONE, at_once=1)
    yield _plain(pair, 0.0)
    yield _plain(pair, 0.25)
    yield _plain(pair, 0.7)
    yield _plain(pair, 0.0, first=ALONE, at_once=1)
    yield _plain(pair, 1.0, samples=SAMPLES)
    yield _plain(pair, 0.7, samples=SAMPLES, first=FEW)
    yield PowerCell(
        label=f"p^4 {MCMC}",
        engine=f"{pair} {PLAIN}",
        temperature=1.0,
        pair=pair,
        power=4.0,
        proposal=MCMC,
    )


def _power(pair: str, power: float, n: int, proposal: str, **how: Any) -> PowerCell:
    k = USUAL[1]
    smc = {"power": power, "num_particles": n, "num_steps": k, "return_particles": True}
    told = "" if proposal == VERIFIED else f" {proposal}"
    if proposal != VERIFIED:  # the default
        smc["proposal"] = proposal
    return PowerCell(
        label=f"p^{power:g} N={n}{told}{_apart(how)}",
        engine=f"{pair} {SMC if PAIRS[pair].draft else MATCHES}",
        temperature=1.0,
        smc=smc,
        pair=pair,
        rows=n * (k + 1),
        draft_passes=k if PAIRS[pair].draft else 0,
        power=power,
        proposal=proposal,
        **how,
    )


def _plain(pair: str, temperature: float, samples: int = 1, **how: Any) -> PowerCell:
    several = f"{samples} " if samples > 1 else ""
    label = f"{several}plain T={temperature:g}{_apart(how)}"
    return PowerCell(
        label, f"{pair} {PLAIN}", temperature, samples=samples, pair=pair, rows=1, **how
    )


def _apart(how: dict[str, Any]) -> str:
    """Return the end of the label of a cell that has no row of its own."""
    return " alone" if how.get("at_once") == 1 else " again" if how.get("is_again") else ""


def settings(engine: str) -> dict[str, Any]:
    """Return the keywords of an engine except the models."""
    _, _, name = engine.partition(" ")
    found = COMMON | {"max_running_requests": AT_ONCE * SAMPLES, "max_total_tokens": 40_960}
    if name == PLAIN:
        return found
    found |= {
        "speculative_algorithm": "SMC",
        "speculative_num_steps": USUAL[1],
        "speculative_smc_num_particles": MOST_PARTICLES,
        "max_running_requests": AT_ONCE,
    }
    if name == MATCHES:
        found |= {"speculative_smc_ngram_matches": True, "speculative_smc_proposal": VERIFIED}
    return found


# --- Problems that the small model can do


class Sum(NamedTuple):
    """Two numbers to add."""

    one: int
    other: int

    @property
    def question(self) -> str:
        return f"What is {self.one} + {self.other}?"

    @property
    def total(self) -> int:
        return self.one + self.other

    @property
    def answer(self) -> str:
        return f"{self.one} + {self.other} = {self.total}"


SUM_EXAMPLES = (Sum(34, 5), Sum(12, 46), Sum(27, 31))


def sum_of(index: int) -> Sum:
    """Return a problem: numbers of two digits."""
    draw = random.Random(index)
    return Sum(draw.randrange(10, 100), draw.randrange(10, 100))
