"""Audit from outside whether a server's tokens follow the distribution that it claims.

Each token of an answer is compared with the target's distribution behind the tokens before it, as
the server itself, or a reference, scores them. If tokens are sampled from it, whatever the draft,

- the rank of each token, as a share of the mass, is uniform on [0, 1], independent of the others;
- log p(token) + H(p), the innovation, has mean 0: above it, answers are sharper than the target;
- it is the likeliest with probability max p, at each place of the rounds that streams show, too;
- no token lies outside of what temperature, top-k, top-p and min-p leave.

Each holds behind every prefix. Along all tokens the innovations are differences of a martingale, so
their mean is normal for many tokens, and positions may be left out by a function of their prefix.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from sglang_smc_tools.testing import audit_texts, statistics
from sglang_smc_tools.testing.audit_texts import (
    FEWEST,
    LENGTH,
    STRAY,
    WEAKEST,
    p_value_of_tails,
    share_found,
    too_few,
    too_weak,
)
from sglang_smc_tools.testing.checks import repeated
from sglang_smc_tools.testing.copies import Copy
from sglang_smc_tools.testing.endpoint import Endpoint, Sample
from sglang_smc_tools.testing.model import PLAIN, Position
from sglang_smc_tools.testing.report import Result, Verdict
from sglang_smc_tools.testing.statistics import Top

ALPHA = 0.01  # the probability that a correct server fails any of the checks
_UNCERTAIN = 1e-3  # mass of a distribution that may be unknown
_POWER = 1.28  # standard normal quantile of 9 in 10


class SamplingRules(NamedTuple):
    """Sampling parameters; each check sets one."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0


class TokenCheck(NamedTuple):
    """A check of sampled tokens."""

    name: str
    rules: SamplingRules
    share: float  # of the answers
    proves: str


CHECKS = (
    TokenCheck(
        "sampled", SamplingRules(), 0.4, "tokens at temperature 1 are samples of the target"
    ),
    TokenCheck(
        "temperature", SamplingRules(temperature=0.6), 0.15, "temperature 0.6 sharpens it rightly"
    ),
    # Above temperature 1 p is flatter than a q that its own temperature left out.
    TokenCheck(
        "top-k", SamplingRules(2.0, 10), 0.1, "top_k 10 leaves the 10 likeliest, of temperature 2"
    ),
    TokenCheck(
        "top-p", SamplingRules(top_p=0.8), 0.1, "top_p 0.8 leaves the likeliest 80 % in proportion"
    ),
    TokenCheck(
        "min-p", SamplingRules(min_p=0.1), 0.1, "min_p 0.1 leaves from a tenth of the likeliest on"
    ),
    TokenCheck(
        "penalty", SamplingRules(frequency_penalty=0.5), 0.1, "it lowers tokens by their counts"
    ),
)
TOGETHER = TokenCheck(
    "together", SamplingRules(), 0.0, "the tokens of all these checks follow the target"
)
_GREEDY_SHARE = 0.05
NUM_SEEDS = 10  # answers with a seed, the first two with one
LEVEL = ALPHA / (4 * (len(CHECKS) + 1) + audit_texts.NUM_TESTS)  # of one p-value


class Compared(NamedTuple):
    """A token, compared with the distribution behind its prefix."""

    rank: float  # uniform on [0, 1]
    innovation: float
    is_likeliest: bool
    chance: float  # of the likeliest token
    place: int  # how many tokens came before it in its piece of a stream
    most: float  # the innovation of the likeliest


class Audit(NamedTuple):
    """Results, and the ranks that a page shows."""

    results: list[Result]
    ranks: dict[str, list[float]]  # of each check of sampled tokens, uniform on [0, 1]


def audit(
    endpoint: Endpoint,
    prompts: Sequence[str],
    copies: Sequence[Copy] = (),
    *,
    num_answers: int = 400,
    seed: int = 0,
) -> Audit:
    """Run all checks on about ``num_answers`` answers in all, besides those to copies.

    Args:
        copies: asked by each of `audit_texts.WIDTHS` at once; none leaves these checks out.
        seed: of the test's own randomness; the server's seeds are its own.

    Raises ValueError where the server fails, or does not tell what the checks need.
    """
    greedy = repeated(prompts, round(_GREEDY_SHARE * num_answers))
    with endpoint.within(0.1):
        few = [audit_texts.check_greedy(endpoint, greedy, LEVEL)]
    with endpoint.within(0.4):
        few.append(audit_texts.check_repeats(endpoint, prompts, LEVEL))
    with endpoint.within(0.25):
        few.append(check_seeds(endpoint, prompts[0]))
    found = Audit([], {})
    if copies:  # before the samples, which show what load has left behind
        with endpoint.within(0.5):
            samples = audit_texts.ask_copies(endpoint, copies)
        results, ranks = audit_texts.judge_copies(copies, samples, endpoint.rounding, LEVEL, seed)
        few += results
        found.ranks.update(ranks)
    all_samples = list[Sample]()
    all_tokens = list[Compared | None]()
    for index, check in enumerate(CHECKS):
        asked = repeated(prompts, round(check.share * num_answers))
        given = {name: x for name, x in check.rules._asdict().items() if x != PLAIN[name]}
        with endpoint.within(check.share / sum(one.share for one in CHECKS[index:])):
            samples = endpoint.sample(asked, LENGTH, streamed=True, **{"temperature": 1.0, **given})
        tokens = list(compared(check, samples, endpoint.rounding, seed))
        found.results.append(result_of(check, tokens, samples))
        found.ranks[check.name] = [token.rank for token in tokens if token]
        all_samples += samples
        all_tokens += tokens
    found.results.extend([result_of(TOGETHER, all_tokens, all_samples), *few])
    return found


def most_answers(num_answers: int, prompts: Sequence[str], num_copies: int) -> int:
    """Return the most answers of an audit, besides those to clients that hang up."""
    few = audit_texts.num_repeats(prompts) + NUM_SEEDS
    return num_answers + few + audit_texts.num_copies(num_copies)


# --- Sampled tokens


def compared(
    check: TokenCheck, samples: Sequence[Sample], rounding: float, seed: int = 0
) -> Iterator[Compared | None]:
    """Compare tokens with the distribution of their rules, where that is known.

    Yields None for a token that the rules exclude.
    """
    uniforms = random.Random(seed)
    leaves_all = check.rules._replace(frequency_penalty=0.0) == SamplingRules()
    for (token, _, top), earlier, place in (each for one in samples for each in _places(one)):
        expected = limited(top, check.rules, rounding, earlier)
        if expected is None:
            continue
        if not leaves_all and token not in expected:
            yield None
            continue
        likeliest = max(expected, key=expected.__getitem__)
        yield Compared(
            statistics.rank_uniform(token, expected, uniforms.random()),
            statistics.innovation(token, expected),
            token == likeliest,
            math.exp(expected[likeliest]),
            place,
            statistics.innovation(likeliest, expected),
        )


def result_of(
    check: TokenCheck, tokens: Sequence[Compared | None], samples: Sequence[Sample] = ()
) -> Result:
    """Test whether a check's tokens are samples of the distributions behind their prefixes."""
    from scipy.stats import kstest, norm

    inside = [token for token in tokens if token]
    total = len(tokens)
    outside = len(tokens) - len(inside)
    result = Result(check.name, check.proves, num_answers=len(samples))
    if total < FEWEST or len(inside) < 2:
        return too_few(result, total, samples)
    innovations = [token.innovation for token in inside]
    estimate, error = statistics.mean_of(innovations)
    by_place = p_values_of_places(inside)
    p_values = {
        "ranks": float(kstest([token.rank for token in inside], "uniform").pvalue),
        "innovation": statistics.p_value_of_mean(innovations, 0.0),
        "outside": p_value_of_tails(outside, total, STRAY),
        "place": min(1.0, len(by_place) * min(by_place.values())),
    }
    worst = min(p_values, key=p_values.__getitem__)
    result = result._replace(
        statistic="log p + H a token",
        estimate=estimate,
        expected=0.0,
        standard_error=error,
        p_value=min(1.0, len(p_values) * p_values[worst]),
        alpha=len(p_values) * LEVEL,
    )
    if not result.is_rejected:
        found = (float(norm.isf(LEVEL / 2)) + _POWER) * error
        note = f"{total} tokens; 9 of 10 audits like this find a shift of {found:.3f} nats."
        result = result._replace(verdict=Verdict.PASS, note=note)
        share = max(_share_of_greedy(inside, found), share_found(len(samples)) if samples else 0.0)
        return result if share <= WEAKEST else too_weak(result, share, len(samples))
    if worst == "outside":
        note = f"{outside / total:.1%} of the tokens are none that these parameters leave"
    elif abs(estimate) > 3 * error:
        side = "more" if estimate > 0 else "less"
        note = f"Tokens are {side} likely than samples of the target, by {abs(estimate):.3f} nats"
    elif worst == "place":
        place = min(by_place, key=by_place.__getitem__)
        note = f"The likeliest token has a wrong share behind {place} tokens of a streamed piece"
    else:
        note = "Likely and unlikely tokens balance, but their shares are not those of the target"
    return result._replace(verdict=Verdict.FAIL, note=f"{note} (p = {p_values[worst]:.1g}).")


def _share_of_greedy(tokens: Sequence[Compared], shift: float) -> float:
    """Return which share of answers of likeliest tokens, in place of samples, shifts the mean so.

    That fault is there in all prompts, and moves each token as far as a sampler can.
    """
    whole = math.fsum(token.most for token in tokens) / len(tokens)
    return min(1.0, shift / whole) if whole > 0.0 else 1.0


def p_values_of_places(tokens: Sequence[Compared]) -> dict[int, float]:
    """Return for each place in a stream's pieces the p-value of how many tokens are likeliest.

    Speculation emits a round at a time. Token i of a round follows p, whatever was accepted before
    it, but a round's length depends on its tokens: so places are counted from its beginning.
    """
    by_place: defaultdict[int, list[Compared]] = defaultdict(list)
    for token in tokens:
        by_place[token.place].append(token)
    return {
        place: statistics.p_value_of_count(
            sum(token.is_likeliest for token in some), [token.chance for token in some]
        )
        for place, some in by_place.items()
    }


def _places(sample: Sample) -> Iterator[tuple[Position, Counter[Any], int]]:
    """Yield each position with the counts of the tokens before it, and its place in its piece."""
    earlier: Counter[Any] = Counter()
    places = (place for size in sample.sizes for place in range(size))
    for position, place in zip(sample.positions, places, strict=True):
        yield position, earlier, place
        earlier[position.token] += 1


def limited(
    top: Top,
    rules: SamplingRules,
    rounding: float,
    earlier: Mapping[Any, int] = MappingProxyType({}),
) -> Top | None:
    """Return log-probabilities after sampling rules, from those of the likeliest tokens.

    Rules are one of those of `CHECKS`: of filters only top-k goes with a temperature.

    None where they do not determine the result: too few are known, or a token lies within
    ``rounding`` of the limit. That depends on the prefix alone.

    Args:
        earlier: the counts of the answer's tokens so far.
    """
    if rules == SamplingRules() or not top:
        return top or None
    ranked = dict(sorted(top.items(), key=lambda item: -item[1]))
    values = list(ranked.values())
    rest = max(0.0, 1.0 - math.fsum(map(math.exp, values)))
    if rules.frequency_penalty:
        return _penalized(ranked, rules.frequency_penalty, earlier, rest)
    if rules.temperature != 1.0 and rules.top_k < 0:
        return _tempered(ranked, rules.temperature, rest)
    if rules.top_k > 0:
        size = rules.top_k
        is_clear = len(values) > size and values[size - 1] - values[size] > rounding
    elif rules.top_p < 1.0:
        size, is_clear = _nucleus(values, rules.top_p, rounding)
    else:
        least = values[0] + math.log(rules.min_p)
        size = sum(value >= least for value in values)
        is_near = any(abs(value - least) <= rounding for value in values)
        is_clear = not is_near and (values[-1] < least or rest < _UNCERTAIN)
    kept = {token: value / rules.temperature for token, value in list(ranked.items())[:size]}
    return _normalized(kept) if is_clear else None


def _nucleus(values: Sequence[float], top_p: float, rounding: float) -> tuple[int, bool]:
    """Return the size of the smallest set of likeliest tokens with this mass, and if it is clear.

    Rounding moves the mass before the last token by at most a like share of it.
    """
    mass = 0.0
    for size, value in enumerate(values, 1):
        before = mass
        mass += math.exp(value)
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
    most = _UNCERTAIN * math.fsum(map(math.exp, scaled.values()))
    return _normalized(scaled) if tail <= most else None


def _penalized(ranked: Top, penalty: float, earlier: Mapping[Any, int], rest: float) -> Top | None:
    """Return the penalized distribution, if the tokens that are not told lost little of it."""
    lost = math.fsum(1.0 - math.exp(-penalty * earlier[x]) for x in earlier.keys() - ranked.keys())
    unknown = lost * math.exp(min(ranked.values()))
    lowered = {token: value - penalty * earlier.get(token, 0) for token, value in ranked.items()}
    return _normalized(lowered, rest) if min(rest, unknown) <= _UNCERTAIN else None


def _normalized(values: Top, rest: float = 0.0) -> dict[Any, float]:
    total = math.log(math.fsum(map(math.exp, values.values())) + rest)
    return {token: value - total for token, value in values.items()}


# --- Seeds


def check_seeds(endpoint: Endpoint, prompt: str) -> Result:
    """Measure whether a seed repeats an answer, and another seed gives another one."""
    result = Result("seeds", "answers with one seed are equal, with others different")
    seeds = (1, *range(1, NUM_SEEDS))
    found = [endpoint.sample([prompt], LENGTH, seed=seed, temperature=1.0) for seed in seeds]
    if not all(found):
        there = [one[0] for one in found if one]
        result = result._replace(num_answers=len(there))
        return too_few(result, sum(len(one.tokens) for one in there), there)
    texts = [one[0].tokens for one in found]
    repeats = "repeat" if texts[0] == texts[1] else "do not repeat"
    others = len(set(texts[1:]))
    note = f"Answers with one seed {repeats}; {others} different ones of {len(texts) - 1} seeds."
    log_mass = math.fsum(position.logprob for position in found[0][0].positions)
    is_greedy = others == 1 and len(texts[0]) > 1 and log_mass <= -1.0
    verdict = Verdict.FAIL if is_greedy else Verdict.MEASURED
    return result._replace(verdict=verdict, note=note, num_answers=len(texts))
