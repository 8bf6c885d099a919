"""Audit from outside whether a server's tokens follow the distribution that it claims.

Each token of an answer is compared with the target's distribution behind the tokens before it, as
the server itself, or a reference, scores them. If tokens are sampled from it, whatever the draft,

- the rank of each token, as a share of the mass, is uniform on [0, 1], independent of the others;
- log p(token) + H(p), the innovation, has mean 0: above it, answers are sharper than the target;
- no token lies outside of what temperature, top-k, top-p and min-p leave.

Each holds behind every prefix. Along all tokens the innovations are differences of a martingale, so
their mean is normal for many tokens, and positions may be left out by a function of their prefix.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from sglang_smc.tools.testing import statistics
from sglang_smc.tools.testing.endpoint import Endpoint, Sample
from sglang_smc.tools.testing.model import Position
from sglang_smc.tools.testing.report import Result, Verdict
from sglang_smc.tools.testing.statistics import Top

ALPHA = 0.01  # the probability that a correct server fails any of the checks
LENGTH = 64  # tokens of an answer
STRAY = 0.002  # the share of tokens that rounding may put on the other side of a limit
_UNCERTAIN = 1e-3  # mass of a distribution that may be unknown
_FEWEST = 200  # tokens below which a check is inconclusive
_POWER = 1.28  # standard normal quantile of 9 in 10


class Rules(NamedTuple):
    """Sampling parameters; each check sets one."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0


class Check(NamedTuple):
    """A check of sampled tokens."""

    name: str
    rules: Rules
    share: float  # of the answers
    proves: str


CHECKS = (
    Check("sampled", Rules(), 0.4, "tokens at temperature 1 are samples of the target"),
    Check("temperature", Rules(temperature=0.6), 0.15, "temperature 0.6 sharpens it as it should"),
    Check("top-k", Rules(top_k=10), 0.1, "top_k 10 leaves the 10 likeliest, in proportion"),
    Check("top-p", Rules(top_p=0.8), 0.1, "top_p 0.8 leaves the likeliest 80 %, in proportion"),
    Check("min-p", Rules(min_p=0.1), 0.1, "min_p 0.1 leaves a tenth of the likeliest and more"),
    Check("penalty", Rules(frequency_penalty=0.5), 0.1, "frequency_penalty 0.5 lowers by counts"),
)
_GREEDY_SHARE = 0.05
_TESTS = 3 * len(CHECKS) + 2  # p-values of all checks


class Audit(NamedTuple):
    """Results, and the ranks that a page shows."""

    results: list[Result]
    ranks: dict[str, list[float]]  # of each check of sampled tokens, uniform on [0, 1]


def audit(
    endpoint: Endpoint, prompts: Sequence[str], *, num_answers: int = 400, seed: int = 0
) -> Audit:
    """Run all checks on about ``num_answers`` answers in all.

    Args:
        seed: of the test's own randomness; the server's seeds are its own.

    Raises ValueError where the server fails, or does not tell what the checks need.
    """
    results, ranks = [], {}
    for check in CHECKS:
        asked = _spread(prompts, round(check.share * num_answers))
        samples = endpoint.sample(asked, LENGTH, **check.rules._asdict())
        result, ranks[check.name] = check_sampled(check, samples, endpoint.rounding, seed)
        results.append(result)
    results.append(check_together(results, [len(found) for found in ranks.values()]))
    greedy = _spread(prompts, round(_GREEDY_SHARE * num_answers))
    results.append(check_greedy(endpoint, greedy))
    results += [check_repeats(endpoint, prompts), check_seeds(endpoint, prompts[0])]
    return Audit(results, ranks)


# --- Sampled tokens


def check_sampled(
    check: Check, samples: Sequence[Sample], rounding: float, seed: int = 0
) -> tuple[Result, list[float]]:
    """Compare sampled tokens with the distribution of their rules, which is known at most places.

    Returns:
        The result, and the rank of each token that was compared.
    """
    from scipy.stats import binomtest, kstest

    uniforms = random.Random(seed)
    ranks, innovations, outside = [], [], 0
    leaves_all = check.rules._replace(frequency_penalty=0.0) == Rules()
    for position, earlier in (each for one in samples for each in _with_counts(one.positions)):
        expected = limited(position.top, check.rules, rounding, earlier)
        if expected is None:
            continue
        if not leaves_all and position.token not in expected:
            outside += 1
            continue
        innovations.append(statistics.innovation(position.token, expected))
        ranks.append(statistics.rank_uniform(position.token, expected, uniforms.random()))
    result = Result(check.name, check.proves, num_answers=len(samples))
    total = len(ranks) + outside
    if total < _FEWEST or len(ranks) < 2:
        return _too_few(result, total, samples), ranks
    p_values = {
        "ranks": float(kstest(ranks, "uniform").pvalue),
        "innovation": statistics.p_value_of_mean(innovations, 0.0),
        "outside": float(binomtest(outside, total, STRAY, alternative="greater").pvalue),
    }
    result = result._replace(**statistics.mean_of(innovations)._asdict())
    return _with_verdict(result, p_values, total, outside / total), ranks


def check_together(results: Sequence[Result], num_tokens: Sequence[int]) -> Result:
    """Check the mean innovation over the tokens of all checks, which a fault may shift alike."""
    from scipy.stats import norm

    parts = [(one, size) for one, size in zip(results, num_tokens, strict=True) if one.estimate]
    total = sum(size for _, size in parts)
    result = Result("together", "all checks together show no shift")
    result = result._replace(num_answers=sum(one.num_answers for one in results))
    if not parts:
        return result._replace(verdict=Verdict.NOT_ENOUGH_DATA)
    estimate = sum(size * (one.estimate or 0.0) for one, size in parts) / total
    error = math.hypot(*(size * (one.standard_error or 0.0) for one, size in parts)) / total
    p_values = {"innovation": 2 * float(norm.sf(abs(estimate) / error))}
    return _with_verdict(result._replace(estimate=estimate, standard_error=error), p_values, total)


def _with_verdict(
    result: Result, p_values: Mapping[str, float], total: int, outside: float = 0.0
) -> Result:
    estimate, error = result.estimate or 0.0, result.standard_error or 0.0
    result = result._replace(
        statistic="log p + H a token",
        expected=0.0,
        p_value=min(1.0, len(p_values) * min(p_values.values())),
        alpha=len(p_values) * ALPHA / _TESTS,
    )
    if not result.is_rejected:
        found = (_quantile(ALPHA / _TESTS) + _POWER) * error
        return result._replace(
            verdict=Verdict.PASS,
            note=f"{total} tokens; 9 of 10 audits like this find a shift of {found:.3f} nats.",
        )
    worst = min(p_values, key=p_values.__getitem__)
    if worst == "outside":
        note = f"{outside:.1%} of the tokens are none that these parameters leave"
    elif abs(estimate) > 3 * error:
        side = "more" if estimate > 0 else "less"
        note = f"Tokens are {side} likely than samples of the target, by {abs(estimate):.3f} nats"
    else:
        note = "Likely and unlikely tokens balance, but their shares are not those of the target"
    return result._replace(verdict=Verdict.FAIL, note=f"{note} (p = {p_values[worst]:.1g}).")


def _too_few(result: Result, total: int, samples: Sequence[Sample]) -> Result:
    told = max((len(position.top) for one in samples for position in one.positions), default=0)
    note = (
        f"{total} tokens of {len(samples)} answers could be compared, with {told} "
        f"log-probabilities each; needed: {_FEWEST}. Ask for more --answers or --minutes, or let "
        "the server tell more."
    )
    return result._replace(verdict=Verdict.NOT_ENOUGH_DATA, note=note)


def _with_counts(positions: Sequence[Position]) -> Iterator[tuple[Position, Counter[Any]]]:
    """Yield each position with the counts of the tokens before it."""
    earlier: Counter[Any] = Counter()
    for position in positions:
        yield position, earlier
        earlier[position.token] += 1


def limited(
    top: Top, rules: Rules, rounding: float, earlier: Mapping[Any, int] = MappingProxyType({})
) -> Top | None:
    """Return log-probabilities after one sampling rule, from those of the likeliest tokens.

    None where they do not determine the result: too few are known, or a token lies within
    ``rounding`` of the limit. That depends on the prefix alone.

    Args:
        earlier: the counts of the answer's tokens so far.
    """
    ranked = dict(sorted(top.items(), key=lambda item: -item[1]))
    if not ranked:
        return None
    values = list(ranked.values())
    rest = max(0.0, 1.0 - math.fsum(map(math.exp, values)))
    if rules.frequency_penalty:
        return _penalized(ranked, rules.frequency_penalty, earlier, rest)
    if rules.temperature != 1.0:
        return _tempered(ranked, rules.temperature, rest)
    if rules.top_k > 0:
        size = rules.top_k
        if len(values) <= size:
            return _normalized(ranked) if rest < _UNCERTAIN else None
        is_clear = values[size - 1] - values[size] > rounding
    elif rules.top_p < 1.0:
        size, is_clear = _nucleus(values, rules.top_p, rounding)
    elif rules.min_p > 0.0:
        least = values[0] + math.log(rules.min_p)
        size = sum(value >= least for value in values)
        is_near = any(abs(value - least) <= rounding for value in values)
        is_clear = not is_near and (values[-1] < least or rest < _UNCERTAIN)
    else:
        return ranked
    return _normalized(dict(list(ranked.items())[:size])) if is_clear else None


def _nucleus(values: Sequence[float], top_p: float, rounding: float) -> tuple[int, bool]:
    """Return the size of the smallest set of likeliest tokens with this mass, and if it is clear.

    Rounding moves the mass before the last token by at most a like share of it.
    """
    mass = 0.0
    for size, value in enumerate(values, 1):
        before, mass = mass, mass + math.exp(value)
        if mass >= top_p:
            near = min(top_p - before, mass - top_p)
            tied = size < len(values) and value - values[size] <= rounding
            return size, near > rounding * (1.0 - top_p) * top_p and not tied
    return 0, False


def _tempered(ranked: Top, temperature: float, rest: float) -> Top | None:
    """Return the tempered distribution, if the tokens that are not told hardly count."""
    scaled = {token: value / temperature for token, value in ranked.items()}
    # Of a mass `rest` in tokens that are no likelier than the least of these.
    tail = rest * math.exp(min(ranked.values()) * (1.0 / temperature - 1.0))
    if tail > _UNCERTAIN * math.fsum(map(math.exp, scaled.values())):
        return None
    return _normalized(scaled)


def _penalized(ranked: Top, penalty: float, earlier: Mapping[Any, int], rest: float) -> Top | None:
    """Return the penalized distribution, if no token that is not told lost much of it."""
    if rest > _UNCERTAIN and not earlier.keys() <= ranked.keys():
        return None
    lowered = {token: value - penalty * earlier.get(token, 0) for token, value in ranked.items()}
    return _normalized(lowered, rest)


def _normalized(values: Top, rest: float = 0.0) -> dict[Any, float]:
    total = math.log(math.fsum(map(math.exp, values.values())) + rest)
    return {token: value - total for token, value in values.items()}


# --- Temperature 0, repetitions, seeds


def check_greedy(endpoint: Endpoint, prompts: Sequence[str]) -> Result:
    """Check that tokens at temperature 0 are the target's likeliest, up to rounding."""
    from scipy.stats import binomtest

    samples = endpoint.sample(prompts, LENGTH, temperature=0.0)
    gaps = [_gap(position) for one in samples for position in one.positions]
    result = Result("greedy", "temperature 0 takes the target's likeliest token", Verdict.PASS)
    result = result._replace(num_answers=len(samples))
    if len(gaps) < _FEWEST:
        return _too_few(result, len(gaps), samples)
    wrong = sum(gap > endpoint.rounding for gap in gaps)
    ties = sum(0 < gap <= endpoint.rounding for gap in gaps)
    result = result._replace(
        statistic="largest log p below the likeliest",
        estimate=max(gaps),
        expected=0.0,
        p_value=float(binomtest(wrong, len(gaps), STRAY, alternative="greater").pvalue),
        alpha=ALPHA / _TESTS,
        note=f"{ties} of {len(gaps)} tokens within the rounding of {endpoint.rounding:g} nats.",
    )
    if not result.is_rejected:
        return result
    note = f"{wrong / len(gaps):.1%} of the tokens are not the likeliest: no rounding explains it."
    return result._replace(verdict=Verdict.FAIL, note=note)


def _gap(position: Position) -> float:
    """Return how far a token's log-probability is below that of the likeliest."""
    return max(position.top.values(), default=position.logprob) - position.logprob


def check_repeats(endpoint: Endpoint, prompts: Sequence[str]) -> Result:
    """Check that greedy answers do not depend on batch, prefix cache or streaming."""
    result = Result(
        "repeats",
        "greedy answers are equal among others, alone, from the prefix cache and streamed",
        Verdict.PASS,
        num_answers=4 * len(prompts),
    )
    batch = endpoint.sample(prompts, LENGTH, temperature=0.0)
    alone, again = (endpoint.sample(prompts, LENGTH, chunk=1, temperature=0.0) for _ in range(2))
    if not len(batch) == len(again) == len(prompts):
        return _too_few(result, 0, batch)
    rounded = 0
    for one, *others in zip(batch, alone, again, strict=True):
        for other in others:
            gap = _first_gap(one, other)
            rounded += gap is not None
            if gap is not None and gap > endpoint.rounding:
                return _differs(result, one, f"differs when it is sent alone, by {gap:.2g} nats")
        whole = {one.text, *(other.text for other in others)}
        if endpoint.streamed(one.prompt, LENGTH, temperature=0.0) not in whole and len(whole) == 1:
            return _differs(result, one, "differs when it is streamed")
    return result._replace(note=f"{rounded} differ, first where two tokens are equally likely.")


def _differs(result: Result, one: Sample, how: str) -> Result:
    note = (
        f"The answer to {one.prompt[:40]!r} {how}. A cache or a batch changes the model's output."
    )
    return result._replace(verdict=Verdict.FAIL, note=note)


def _first_gap(one: Sample, other: Sample) -> float | None:
    """Return how much less likely the other's first different token is, None if there is none."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    place = next((index for index, (a, b) in pairs if a != b), None)
    if place is None:
        return None
    top, token = one.positions[place].top, other.tokens[place]
    return abs(top.get(one.tokens[place], -math.inf) - top.get(token, -math.inf))


def check_seeds(endpoint: Endpoint, prompt: str) -> Result:
    """Measure whether a seed repeats an answer, and another seed gives another one."""
    result = Result("seeds", "answers with one seed are equal, with others different")
    seeds = (1, 1, *range(2, 10))
    found = [endpoint.sample([prompt], LENGTH, seed=seed, temperature=1.0) for seed in seeds]
    if not all(found):
        return _too_few(result, 0, [])
    texts = [one[0].tokens for one in found]
    repeats = "repeat" if texts[0] == texts[1] else "do not repeat"
    others = len(set(texts[1:]))
    note = f"Answers with one seed {repeats}; {others} different ones of {len(texts) - 1} seeds."
    if others == 1 and len(texts[0]) > 1 and not _is_certain(found[0][0]):
        note = f"{len(texts) - 1} seeds give one and the same answer: nothing is sampled."
        return result._replace(verdict=Verdict.FAIL, note=note, num_answers=len(texts))
    return result._replace(verdict=Verdict.MEASURED, note=note, num_answers=len(texts))


def _is_certain(sample: Sample) -> bool:
    return math.fsum(position.logprob for position in sample.positions) > -1.0


def _spread(prompts: Sequence[str], count: int) -> list[str]:
    return [prompts[index % len(prompts)] for index in range(count)]


def _quantile(alpha: float) -> float:
    """Return the two-sided normal quantile."""
    from scipy.stats import norm

    return float(norm.isf(alpha / 2))
