"""Compute the distribution that a request asks for, and test whether tokens follow it.

Each token's own share of its distribution, randomized within the token, is uniform on [0, 1] and
independent from token to token. Kolmogorov and Smirnov's test compares all of a feature's tokens,
and a count those that repeat their neighbour.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from conformance.server import WrongError

from sglang_smc_tools.testing.endpoint import Sample
from sglang_smc_tools.testing.statistics import Token, mean_of, p_value_of_count

#: The probability that one test fails on a correct server.
ALPHA = 1e-5
#: Positions whose told distribution lacks more than this are left out: a rule of the context alone.
MOST_UNTOLD = 1e-3
#: Standard errors by which a mean must be above what it is where a setting is ignored.
FOLLOWS = 4.0

TokenLaw = Mapping[Token, float]
"""Maps the tokens that a request allows to their probabilities."""


class ScoredPlace(NamedTuple):
    """A position of an answer: its token, what stands before it, and log p of each token."""

    token: Token
    prompt: tuple[int, ...]
    before: tuple[Token, ...]
    logprobs: Mapping[Token, float]


class Asked(NamedTuple):
    """How a request changes the model's distribution, in the order of SGLang's sampler.

    Attributes:
        edit: what is added to each token's log-probability, or minus infinity.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    edit: Callable[[ScoredPlace, Token], float] | None = None

    def law(self, place: ScoredPlace, slack: float = 0.0) -> dict[Token, float]:
        """Return the distribution at a place.

        Args:
            slack: relative width by which top-p and min-p keep more, for rounding.
        """
        edit = self.edit
        scores = {
            token: (value + (edit(place, token) if edit else 0.0)) / self.temperature
            for token, value in place.logprobs.items()
        }
        masses = _normalized({token: math.exp(value) for token, value in scores.items()})
        ordered = sorted(masses.items(), key=lambda item: -item[1])
        least = self.min_p * ordered[0][1] * (1.0 - slack)
        kept: dict[Token, float] = {}
        above = 0.0
        for rank, (token, mass) in enumerate(ordered):
            is_cut = bool(self.top_k) and rank >= self.top_k
            if is_cut or above > self.top_p * (1.0 + slack) or mass < least or mass == 0.0:
                break
            kept[token] = mass
            above += mass
        return _normalized(kept)


def _normalized(masses: Mapping[Token, float]) -> dict[Token, float]:
    total = math.fsum(masses.values())
    return {token: mass / total for token, mass in masses.items()}


def places_of(
    samples: Sequence[Sample], prompts: Sequence[tuple[int, ...]]
) -> Iterator[ScoredPlace]:
    """Yield the positions of answers whose distribution is told, but for `MOST_UNTOLD`."""
    for sample, prompt in zip(samples, prompts, strict=True):
        tokens = sample.tokens
        for index, position in enumerate(sample.positions):
            told = math.fsum(math.exp(value) for value in position.top.values())
            if told > 1.0 - MOST_UNTOLD:
                yield ScoredPlace(position.token, prompt, tokens[:index], position.top)


def check_law(places: Sequence[ScoredPlace], asked: Asked, *, is_exact: bool, seed: int = 0) -> str:
    """Check that tokens follow what a request asks for; return what was measured.

    Args:
        is_exact: whether the server's mode is lossless. Else tokens must be allowed, and likelier
            with the setting than without it.

    Raises WrongError.
    """
    for place in places:
        if place.token not in asked.law(place, slack=1e-3):
            raise WrongError(f"token {place.token!r} is not allowed behind {place.before[-3:]}")
    if not is_exact:
        return _check_followed(places, asked)
    from scipy.stats import kstest  # half a second, which --help skips

    draw = random.Random(seed)
    laws = [asked.law(place) for place in places]
    shares = [_share(place, law, draw.random()) for place, law in zip(places, laws, strict=True)]
    ranks = float(kstest(shares, "uniform").pvalue)
    p_value = min(1.0, 2.0 * min(ranks, _p_value_of_doubles(places, laws)))  # Bonferroni's
    told = f"{len(places)} tokens, p = {p_value:.2g}"
    if p_value < ALPHA:
        raise WrongError(f"tokens do not follow the distribution asked for: {told}")
    return told


def _share(place: ScoredPlace, law: TokenLaw, uniform: float) -> float:
    """Return the mass of likelier tokens, plus a share of the token's own."""
    own = law.get(place.token, 0.0)
    above = math.fsum(
        mass
        for token, mass in law.items()
        if mass > own or (mass == own and str(token) < str(place.token))
    )
    return min(1.0, above + uniform * own)


def _p_value_of_doubles(places: Sequence[ScoredPlace], laws: Sequence[TokenLaw]) -> float:
    """Return the p-value of how many tokens repeat the one before them.

    There a penalty or a processor shows that hears of each token one token late.
    """
    behind = [index for index, place in enumerate(places) if place.before]
    chances = [laws[index].get(places[index].before[-1], 0.0) for index in behind]
    count = sum(places[index].token == places[index].before[-1] for index in behind)
    return p_value_of_count(count, chances)


def _check_followed(places: Sequence[ScoredPlace], asked: Asked) -> str:
    """Check that tokens are likelier under the asked distribution than under the plain one."""
    plain = Asked()
    gains = [
        math.log(asked.law(place, slack=1e-3)[place.token])
        - math.log(plain.law(place)[place.token])
        for place in places
    ]
    mean, error = mean_of(gains)
    told = f"{mean:+.3f} ± {2 * error:.3f} nats a token towards what is asked"
    if mean <= 0.0:  # tokens that ignore it are likelier under the plain distribution
        raise WrongError(f"the setting is not followed: {told}")
    return told


def check_positive(values: Sequence[float], what: str) -> str:
    """Check that a mean is positive by `FOLLOWS` standard errors; return it."""
    mean, error = mean_of(values)
    told = f"{mean:+.3f} ± {2 * error:.3f} {what}"
    if mean <= FOLLOWS * error:
        raise WrongError(f"the setting is not followed: {told}")
    return told


def repetition_gaps(places: Sequence[ScoredPlace]) -> list[float]:
    """Return, by place, the plain chance of a repeated token, less whether it is one."""
    gaps: list[float] = []
    for place in places:
        seen = set(place.before)
        chance = math.fsum(math.exp(v) for token, v in place.logprobs.items() if token in seen)
        gaps.append(chance - float(place.token in seen))
    return gaps
