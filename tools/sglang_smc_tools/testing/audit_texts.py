"""Check that no cache, batch or load changes what a server says: greedy, repeated, copied texts.

One rule tells rounding from a fault. At temperature 0 a token strays if the target has another one
likelier by more than two roundings: of correct tokens at most `STRAY` do, and none by eight. At
temperature 1 a token's tail is the mass of those that are rarer, with a share of its own: uniform
on [0, 1] behind every prefix, so that tails below a share are as frequent as the share, times what
rounding moves a mass by. Requests that are asked alone and under load are exchangeable: of those
that lack an identifier only once, half lack it under load.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from sglang_smc_tools.testing import statistics
from sglang_smc_tools.testing.checks import repeated
from sglang_smc_tools.testing.copies import Copy
from sglang_smc_tools.testing.endpoint import BESIDE, CHUNK, Endpoint, Sample
from sglang_smc_tools.testing.model import Position
from sglang_smc_tools.testing.report import Result, Verdict

LENGTH = 64  # tokens of an answer, but of a copy
STRAY = 0.002  # the share of tokens that rounding may put on the other side of a limit
RARE = 1e-5  # a tail below it is a corrupted token, or one of 100,000
WIDTHS = (1, 12, 64)  # requests at once
NUM_TESTS = 2 + 3 + 4 * (len(WIDTHS) - 1)  # p-values of all checks here
FEWEST = 200  # tokens below which a check is inconclusive
WEAKEST = 0.25  # share of faulty answers that 9 of 10 audits find, at most, for a check to pass
_BOTH = 2.0  # roundings by which two log-probabilities move apart
_NEVER = 8.0  # roundings by which they do not


def too_few(result: Result, total: int, samples: Sequence[Sample]) -> Result:
    """Return the result of a check with too few tokens."""
    most = max((len(position.top) for one in samples for position in one.positions), default=0)
    note = f"{total} tokens of {len(samples)} answers, with {most} log-probabilities each, could be"
    note += f" compared; needed: {FEWEST}. Ask for more --answers, --copies or --minutes."
    return result._replace(verdict=Verdict.NOT_ENOUGH_DATA, note=note)


def share_found(num_answers: int) -> float:
    """Return which share of faulty answers 9 of 10 audits of so many have one of."""
    return 1.0 - 0.1 ** (1.0 / max(1, num_answers))


def too_weak(result: Result, share: float, num_asked: int) -> Result:
    """Return the result of a check that passes, and would also if many answers had a fault.

    Args:
        share: of faulty answers that 9 of 10 such checks find, which falls as the root of them.
        num_asked: of the answers.
    """
    needed = math.ceil(num_asked * (share / WEAKEST) ** 2)
    note = (
        f"{result.note} Too few to pass: 9 of 10 audits like this find a fault in {share:.0%} of "
        f"the answers; needed: in {WEAKEST:.0%}, for which this check asks for about {needed} "
        "answers. Ask for more --answers, --copies or --minutes."
    )
    return result._replace(verdict=Verdict.NOT_ENOUGH_DATA, note=note)


# --- Temperature 0: the likeliest token, again and again


def check_greedy(endpoint: Endpoint, prompts: Sequence[str], level: float) -> Result:
    """Check that tokens at temperature 0 are the target's likeliest, up to rounding.

    Args:
        level: the probability that one p-value of a correct server is below it.
    """
    samples = endpoint.sample(prompts, LENGTH, temperature=0.0)
    gaps = [_gap(position) for one in samples for position in one.positions]
    proves = "temperature 0 takes the target's likeliest token"
    statistic = "gap to the likeliest"
    result = Result("greedy", proves, statistic=statistic, num_answers=len(samples))
    if len(gaps) < FEWEST:
        return too_few(result, len(gaps), samples)
    result = _by_gaps(result, gaps, len(gaps), endpoint.rounding, level)
    limit = _BOTH * endpoint.rounding
    below, wrong = (sum(gap > least for gap in gaps) for least in (0.0, limit))
    note = f"{below} of {len(gaps)} tokens are not the likeliest, {wrong} of them by more than the"
    result = result._replace(note=f"{note} {limit:g} nats that rounding moves.")
    share = share_found(len(samples))
    return result if result.failed or share <= WEAKEST else too_weak(result, share, len(samples))


def _by_gaps(
    result: Result, gaps: Sequence[float], total: int, rounding: float, level: float
) -> Result:
    """Return FAIL where the gaps of ``total`` greedy tokens are more than rounding, else PASS."""
    worst = max(gaps, default=0.0)
    wrong = sum(gap > _BOTH * rounding for gap in gaps)
    result = result._replace(
        estimate=worst if math.isfinite(worst) else None,
        expected=0.0,
        p_value=p_value_of_tails(wrong, total, STRAY),
        alpha=level,
    )
    fails = result.is_rejected or worst > _NEVER * rounding
    return result._replace(verdict=Verdict.FAIL if fails else Verdict.PASS)


def p_value_of_tails(count: int, total: int, share: float) -> float:
    """Return the p-value of so many tokens or more on the other side of a limit."""
    from scipy.stats import binomtest

    return float(binomtest(count, total, share, alternative="greater").pvalue) if total else 1.0


def _gap(position: Position) -> float:
    """Return how far a token's log-probability is below that of the likeliest."""
    return max(position.top.values(), default=position.logprob) - position.logprob


def check_repeats(endpoint: Endpoint, prompts: Sequence[str], level: float) -> Result:
    """Check that greedy answers do not depend on batch, order, prefix cache or streaming.

    In a pass of another shape rounding lets another token win where two are nearly as likely. The
    gap of such tokens may be what moves both of them; a few gaps may be wider, and none much wider.
    """
    proves = f"greedy answers are equal alone, cached, streamed, in another order, in {CHUNK}"
    result = Result("repeats", proves, num_answers=num_repeats(prompts))
    ask = partial(endpoint.sample, length=LENGTH, temperature=0.0)
    crowd = [*repeated(prompts, CHUNK - 1), prompts[0]]
    samples = [*ask(prompts), *ask(prompts[::-1]), *ask(crowd)]
    samples += [*ask(prompts, chunk=1), *ask(prompts, chunk=1)]
    samples += ask(prompts, chunk=1, streamed=True)
    is_whole = len(samples) == result.num_answers
    result = result._replace(num_answers=len(samples))
    by_prompt: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.prompt].append(sample)
    repeated_ones = {prompt: some for prompt, some in by_prompt.items() if len(some) > 1}
    if not repeated_ones:
        return too_few(result, sum(len(one.tokens) for one in samples), samples)
    for prompt, (one, *rest) in repeated_ones.items():
        if any(other.text != one.text for other in rest if other.tokens == one.tokens):
            return _differs(result, prompt, "has another text when it is streamed")
    firsts = {prompt: _first_gap(one, rest) for prompt, (one, *rest) in repeated_ones.items()}
    worst = max(firsts, key=lambda prompt: firsts[prompt][1])
    places, gaps = zip(*firsts.values(), strict=True)
    result = _by_gaps(result, gaps, sum(places), endpoint.rounding, level)
    result = result._replace(statistic="largest gap of tokens that differ")
    if result.failed:
        return _differs(result, worst, f"differs from request to request, by {max(gaps):.2g} nats")
    if not is_whole:
        return too_few(result, sum(places), samples)
    note = f"{sum(gap > 0 for gap in gaps)} differ, first where two tokens are nearly as likely."
    return result._replace(note=note)


def num_repeats(prompts: Sequence[str]) -> int:
    """Return the number of answers of `check_repeats`."""
    return 5 * len(prompts) + CHUNK


def num_copies(count: int) -> int:
    """Return the most answers that `check_copies` asks for, of so many copies."""
    return count * len(WIDTHS) + 3 * math.ceil(count / BESIDE) * (len(WIDTHS) - 1)


def _differs(result: Result, prompt: str, how: str) -> Result:
    note = f"The answer to {prompt[:40]!r} {how}. A cache or a batch changes the model's output."
    return result._replace(verdict=Verdict.FAIL, note=note)


def _first_gap(one: Sample, others: Sequence[Sample]) -> tuple[int, float]:
    """Return how many tokens are compared, and by how much the likelihood of the last differs.

    By so much at least: a token that is not told is rarer than those that are.
    """
    columns = zip(*(each.tokens for each in (one, *others)), strict=False)
    for place, tokens in enumerate(columns):
        if len({*tokens}) > 1:
            top = one.positions[place].top
            own, *rest = (top.get(token, min(top.values(), default=0.0)) for token in tokens)
            return place + 1, max(abs(own - value) for value in rest)
    return len(one.tokens), 0.0


# --- Copies, alone and under load


class Copied(NamedTuple):
    """Hold what the answers to copies show, of one number of requests at once."""

    num_greedy: int  # answers at temperature 0
    gaps: list[float]  # of their tokens
    tails: list[float]  # of the tokens at temperature 1, uniform on [0, 1]
    is_corrupted: list[bool]  # of each answer: a token that rounding or chance hardly explains
    lacks: list[bool]  # of each answer: an identifier
    lacked_alone: list[bool]  # the same requests alone; empty for these themselves
    example: str = ""  # the end of a request with a corrupted answer, and that


Samples = Sequence[Sample | None]


def ask_copies(endpoint: Endpoint, copies: Sequence[Copy]) -> list[list[Sample | None]]:
    """Return the answers to all copies, by each of `WIDTHS` requests at once.

    Under load others hang up in the middle, want JSON or call a tool, beside those that are judged.
    """
    asked = [(copy.prompt, copy.params) for copy in copies]
    samples = list[list[Sample | None]]()
    for left in range(len(WIDTHS), 0, -1):
        with endpoint.within(1 / left):
            samples.append(endpoint.at_once(asked, WIDTHS[-left]))
    return samples


def judge_copies(
    copies: Sequence[Copy],
    samples: Sequence[Samples],
    rounding: float,
    level: float,
    seed: int = 0,
) -> tuple[list[Result], dict[str, list[float]]]:
    """Return a result for each of `WIDTHS`, and the ranks of its tokens at temperature 1."""
    results = list[Result]()
    ranks = dict[str, list[float]]()
    for width, loaded in zip(WIDTHS, samples, strict=True):
        alone = samples[0] if width > 1 else ()
        copied = copied_of(copies, loaded, alone, rounding, seed)
        results.append(result_of_copies(width, copied, rounding, level))
        ranks[results[-1].check] = [1.0 - tail for tail in copied.tails]
    return results, ranks


def copied_of(
    copies: Sequence[Copy],
    samples: Samples,
    alone: Samples,
    rounding: float,
    seed: int = 0,
) -> Copied:
    """Compare each token with the target's, and each text with its identifiers.

    Args:
        alone: the answers to the same requests, each asked alone; empty for these themselves.
    """
    uniforms = random.Random(seed)
    found = Copied(0, [], [], [], [], [])
    for copy, one, other in zip(copies, samples, alone or [None] * len(copies), strict=True):
        if one is None or (alone and other is None):
            continue
        if copy.is_greedy:
            gaps = [_gap(position) for position in one.positions]
            if other:  # where two texts part; all that a server shows that does not score texts
                gaps.append(_first_gap(other, [one])[1])
            found.gaps.extend(gaps)
            found = found._replace(num_greedy=found.num_greedy + 1)
            is_corrupted = max(gaps, default=0.0) > _NEVER * rounding
        else:
            ranks = (
                statistics.rank_uniform(token, top, uniforms.random())
                for token, _, top in one.positions
            )
            tails = [1.0 - rank for rank in ranks]
            found.tails.extend(tails)
            is_corrupted = min(tails, default=1.0) < RARE
        found.is_corrupted.append(is_corrupted)
        found.lacks.append(copy.is_lacking(one.text))
        if other:
            found.lacked_alone.append(copy.is_lacking(other.text))
        if is_corrupted and not found.example:
            example = f" First: {copy.prompt[-24:]!r} is answered by {one.text[:60]!r}."
            found = found._replace(example=example)
    return found


def result_of_copies(width: int, copied: Copied, rounding: float, level: float) -> Result:
    """Test whether copies hold nothing but what the model says, and lack no more than alone."""
    from scipy.stats import binomtest

    gaps = copied.gaps
    tails = copied.tails
    total = len(copied.is_corrupted)
    proves = f"identifiers are copied as the model copies them, with {width} at once"
    statistic = "share of corrupted answers"
    result = Result(f"copies-{width}", proves, statistic=statistic, num_answers=total)
    if len(gaps) + len(tails) < FEWEST:
        return too_few(result, len(gaps) + len(tails), [])
    corrupted = sum(copied.is_corrupted)
    lacking = sum(copied.lacks)
    low, high = binomtest(corrupted, total).proportion_ci(method="exact")
    p_values = _p_values_of(copied, rounding)
    worst = min(p_values, key=p_values.__getitem__)
    result = result._replace(
        estimate=corrupted / total,
        expected=0.0,
        p_value=min(1.0, len(p_values) * p_values[worst]),
        alpha=len(p_values) * level,
    )
    innocent = sum(a and not b for a, b in zip(copied.lacks, copied.is_corrupted, strict=True))
    note = (
        f"{corrupted} of {total} answers (95 %: {low:.1%} to {high:.1%}) hold a token that the "
        f"model hardly ever says; {lacking} lack an identifier, {innocent} of them by mistakes "
        "of the model's own."
    )
    largest = max(gaps, default=0.0)
    if result.is_rejected or largest > _NEVER * rounding:
        worst = worst if result.is_rejected else f"a gap of {largest:.2g} nats"
        note = f"{note} It fails by {worst}.{copied.example} Caches, slots or positions are wrong."
        return result._replace(verdict=Verdict.FAIL, note=note)
    share = share_found(copied.num_greedy)
    if share > WEAKEST:
        return too_weak(result._replace(note=note), share, total)
    note += f" 9 of 10 audits find a greedy token that is wrong in {share:.1%} of the answers."
    return result._replace(verdict=Verdict.PASS, note=note)


def _p_values_of(copied: Copied, rounding: float) -> dict[str, float]:
    """Return the p-values, by what they count."""
    wrong = sum(gap > _BOTH * rounding for gap in copied.gaps)
    p_values = {"tokens below the likeliest": p_value_of_tails(wrong, len(copied.gaps), STRAY)}
    for share in (STRAY, RARE):
        count = sum(tail < share for tail in copied.tails)
        moved = share * math.exp(_BOTH * rounding)
        p_value = p_value_of_tails(count, len(copied.tails), moved)
        p_values[f"tokens of the rarest {share:g}"] = p_value
    if pairs := [*zip(copied.lacked_alone, copied.lacks, strict=False)]:
        lost = pairs.count((False, True))
        regained = pairs.count((True, False))
        name = f"{lost} answers that lack what the same requests had alone, {regained} the reverse"
        p_values[name] = p_value_of_tails(lost, lost + regained, 0.5)
    return p_values
