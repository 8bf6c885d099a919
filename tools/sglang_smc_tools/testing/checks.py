"""Check SMC against the models' own distributions, which every server can return."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from sglang_smc_tools.testing import statistics
from sglang_smc_tools.testing.model import CheckedAnswer, Model
from sglang_smc_tools.testing.report import Result, Verdict
from sglang_smc_tools.testing.statistics import Fit, Mean, Text

PROMPTS = (
    "Anna has 12 apples and buys 7 more. She then gives",
    "Once upon a time there was a small house at the end of",
    "To make a good cup of tea, you first",
    "The most important thing about the weather is that",
    "Ben reads 5 pages every day for 9 days. In all he reads",
    "My favourite place in the city is",
    "The river runs from the mountains to",
    "In the morning he always",
)
"""Default prompts, for models of any kind."""

FEW = 4  # prompts, for checks that need many answers to each
T = TypeVar("T")
ALPHA = 2.5e-4  # the probability that one check fails on a correct implementation

SWITCHES = (
    "start again with --speculative-smc-kernels torch --speculative-smc-round-graph off; if that "
    "mends it, a kernel or a captured round is wrong here. Report it with this table"
)
_ADAPTIVE = (
    "This server has --speculative-smc-adaptive on, so that N and K are not the request's own. "
    "Start one without it."
)
_TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_PILOT = 64
_NUM_EVIDENCE = 1536
MOST_OF_EVIDENCE = _NUM_EVIDENCE + _PILOT * len(_TEMPERATURES)  # answers of `check_evidence`
_WIDEST_EVIDENCE = 0.1  # of the mean; a wider standard error is inconclusive
_WIDEST_LAW = 0.05  # nats per token
_LARGEST_SHARE = 0.1  # of the sum, for one answer


def check_evidence(
    smc: Model,
    prompts: Sequence[str] = PROMPTS,
    *,
    num_answers: int = _NUM_EVIDENCE,
    alpha: float = ALPHA,
    seed: int = 0,
) -> Result:
    """Check that E[Z] = 1 in mode smc with evidence threshold 0, for any N and K."""
    result = Result(
        "evidence",
        "weights are p over q and resampling keeps them proper: E[Z] = 1",
        statistic="mean of exp(log evidence)",
        expected=1.0,
        alpha=alpha,
    )
    if smc.settings["adaptive"] == "on":
        return result._replace(note=_ADAPTIVE)
    texts = _token_ids(smc, prompts, seed)
    settings = {"mode": "smc", "evidence_threshold": 0, "num_steps": _two_steps(smc)}
    temperature = _mildest(smc, texts, settings)
    evidence = _evidence(smc, repeated(texts, num_answers), settings, temperature)
    mean = statistics.mean_of(evidence)
    p_value = statistics.p_value_of_mean(evidence, 1.0)
    result = result._replace(**mean._asdict(), p_value=p_value, num_answers=num_answers)
    if missing := _missing_of(evidence, mean, smc.same_models):
        return result._replace(verdict=Verdict.NOT_ENOUGH_DATA, note=missing)
    note = f"At temperature {temperature:g}, where the two models overlap enough."
    return _by_p_value(result, note, f"Weights or resampling are wrong: {SWITCHES}.")


def check_exact_answers(
    smc: Model,
    prompts: Sequence[str] = PROMPTS[:FEW],
    *,
    num_answers: int = 2048,
    alpha: float = ALPHA,
    seed: int = 10_000_000,
) -> Result:
    """Compare short answers of mode exact with the target's distribution, by a chi-square test."""
    settings = {"mode": "exact", "num_steps": _two_steps(smc)}
    length = settings["num_steps"] + 2  # the prefill's token, a round, and the next round's first
    proves = "answers of mode exact follow the target"
    result = Result("exact-answers", proves, alpha=alpha, num_answers=num_answers)
    advice = f"Mode exact is not lossless here: {SWITCHES}. Meanwhile serve without SMC."
    texts = _token_ids(smc, prompts, seed)
    return _by_chi_square(result, smc, texts, length, settings, [smc] * length, advice)


def check_draft_law(
    smc: Model,
    prompts: Sequence[str] = PROMPTS[:FEW],
    *,
    draft: Model | None = None,
    num_answers: int = 2048,
    alpha: float = ALPHA,
    seed: int = 30_000_000,
) -> Result:
    """Check that the drafted tokens of answers with N = 1 and c = 0 follow q.

    Args:
        draft: the draft model; q is then its own distribution. Without it q follows from the
            answers' weights, and must equal the distribution that they were sampled from.
    """
    whose = "what they are weighed by" if draft is None else "the draft"
    result = Result("draft-distribution", f"drafted tokens follow {whose}")
    if smc.settings["adaptive"] == "on":
        return result._replace(note=_ADAPTIVE)
    num_steps = 1 if draft is None else _two_steps(smc)
    settings = {"mode": "smc", "num_particles": 1, "num_steps": num_steps}
    settings |= {"evidence_threshold": 0, "draft_temperature": 1.0}
    models = [] if draft is None else [smc, *[draft] * num_steps]
    result = result._replace(alpha=alpha, num_answers=num_answers)
    advice = f"Drafts do not follow the draft model, or are weighed by something else: {SWITCHES}."
    texts = _token_ids(smc, prompts, seed)
    return _by_chi_square(result, smc, texts, 1 + num_steps, settings, models, advice)


def check_equal_models(
    smc: Model,
    prompts: Sequence[str] = PROMPTS,
    *,
    num_answers: int = 64,
    length: int = 32,
    seed: int = 40_000_000,
) -> Result:
    """Check a draft that is the target: evidence is 1 up to rounding, without resampling."""
    result = Result(
        "equal-models",
        "drafting and scoring give one model the same numbers, so weights stay equal",
        statistic="largest |log evidence| a token",
        expected=0.0,
    )
    if not smc.same_models:
        note = "The draft is another model. --target DIR --draft DIR makes a server for this check."
        return result._replace(note=note)
    asked = repeated(_token_ids(smc, prompts, seed), num_answers)
    answers = smc.answers(asked, length, {"mode": "smc", "evidence_threshold": 0})
    worst = max(abs(answer.log_evidence) / len(answer.text) for answer in answers)
    resamplings = sum(answer.meta["spec_smc_resample_ct"] for answer in answers)
    result = result._replace(estimate=worst, num_answers=num_answers)
    note = f"{resamplings} resamplings; rounding allows {smc.rounding:g} nats a token."
    if not resamplings and worst <= smc.rounding:
        return result._replace(verdict=Verdict.PASS, note=note)
    note += f" The same text is scored differently in drafting and in verification: {SWITCHES}."
    return result._replace(verdict=Verdict.FAIL, note=note)


def check_mode(
    smc: Model,
    mode: str = "exact",
    prompts: Sequence[str] = PROMPTS,
    *,
    draft: Model | None = None,
    num_answers: int = 128,
    length: int = 16,
    alpha: float = ALPHA,
    seed: int = 20_000_000,
) -> Result:
    """Compare log-probabilities of a mode's answers with their expectation under the target.

    Args:
        mode: ``exact`` must pass; for other modes the distance is measured.
        draft: the draft model; with it the distance is measured towards the draft.
        length: maximum tokens of an answer.
    """
    from scipy.stats import kstest  # half a second, which --help skips

    asked = repeated(_token_ids(smc, prompts, seed), num_answers)
    answers = [answer.text for answer in smc.answers(asked, length, {"mode": mode})]
    scored = smc.score(asked, answers)
    uniforms = random.Random(seed)
    places = [place for positions in scored for place in positions]
    shares = [statistics.rank_uniform(x.token, x.top, uniforms.random()) for x in places]
    ranks = float(kstest(shares, "uniform").pvalue)
    gaps = [math.fsum(statistics.innovation(x.token, x.top) for x in xs) for xs in scored]
    p_values = [ranks, statistics.p_value_of_mean(gaps, 0.0)]
    lengths = [len(positions) for positions in scored]
    shown = statistics.per_token(gaps, lengths)
    statistic = "log p + H a token"
    note = _gap("log p + H", shown, "sharper than the target", "flatter than the target")
    if draft is not None:
        gaps = [
            math.fsum(statistics.tilt(x.token, x.top, y.top) for x, y in zip(xs, ys, strict=True))
            for xs, ys in zip(scored, draft.score(asked, answers), strict=True)
        ]
        p_values.append(statistics.p_value_of_mean(gaps, 0.0))
        shown = statistics.per_token(gaps, lengths)
        statistic = "log q/p a token"
        towards = _gap("log q/p", shown, "nearer to the draft", "further from the draft")
        note = f"{towards}; {note}"
    note += f"; ranks p = {ranks:.2g}."
    result = Result(
        f"distribution-of-{mode}",
        "how far an approximate mode is from the target, token by token",
        Verdict.MEASURED,
        note,
        statistic,
        expected=0.0,
        num_answers=num_answers,
        **shown._asdict(),
    )
    if mode != "exact":
        return result
    result = result._replace(
        proves="tokens of mode exact are as likely as the target's own, in long answers too",
        alpha=alpha,
        p_value=min(1.0, len(p_values) * min(p_values)),  # Bonferroni's
    )
    if shown.standard_error > _WIDEST_LAW and not result.is_rejected:
        note += " Ask for more answers with --scale."
        return result._replace(verdict=Verdict.NOT_ENOUGH_DATA, note=note)
    return _by_p_value(result, note, f"Mode exact is not lossless: {SWITCHES}.")


def _gap(name: str, mean: Mean, above: str, below: str) -> str:
    gap, error = mean
    side = f" ({above if gap > 0 else below})" if abs(gap) > 2 * error else ""
    return f"{name} {gap:+.3f} ± {2 * error:.3f} nats a token{side}"


# --- Verdicts


def _by_p_value(result: Result, note: str, advice: str) -> Result:
    """Return PASS, or FAIL with advice, by the p-value."""
    if result.is_rejected:
        return result._replace(verdict=Verdict.FAIL, note=f"{note} {advice}".strip())
    return result._replace(verdict=Verdict.PASS, note=note)


def _by_chi_square(
    result: Result,
    smc: Model,
    prompts: Sequence[Text],
    length: int,
    settings: dict[str, Any],
    models: Sequence[Model],
    advice: str,
) -> Result:
    """Compare answers of ``length`` tokens with their distribution, over all prompts together.

    Args:
        models: those whose distributions the tokens follow; none for what weights imply.
    """
    size = result.num_answers // len(prompts)
    fits = []
    for prompt in prompts:
        answers = smc.answers([prompt] * size, length, settings, ignore_eos=True)
        if models:
            law = short_law(models, prompt, statistics.SMALLEST_CELL / size)
        else:
            law = claimed_law(smc, prompt, answers)
        fits.append(statistics.goodness_of_fit([answer.text for answer in answers], law))
    fit = Fit(*map(sum, zip(*fits, strict=True)))
    result = result._replace(
        statistic=f"chi-square, {fit.df} df",
        estimate=fit.statistic,
        expected=float(fit.df),
        standard_error=math.sqrt(2 * fit.df),
        p_value=fit.p_value,
    )
    if fit.df:
        return _by_p_value(result, "", advice)
    note = "Each prompt has one likely answer only. Ask for more answers with --scale, or --prompts"
    return result._replace(verdict=Verdict.NOT_ENOUGH_DATA, note=f"{note} that leave a choice.")


# --- Answers


def _token_ids(smc: Model, prompts: Sequence[str], seed: int) -> list[Text]:
    """Tokenize prompts, and let answers begin with ``seed``; refuse a prompt without a token."""
    smc.seeds = itertools.count(seed)
    texts = [smc.token_ids(prompt) for prompt in prompts]
    if all(texts):
        return texts
    raise ValueError(
        f"--prompts: {prompts[texts.index(())]!r} has no token in this model's vocabulary; needed: "
        "one or more. Give other prompts."
    )


def repeated(texts: Sequence[T], size: int) -> list[T]:
    return [texts[index % len(texts)] for index in range(size)]


def _two_steps(smc: Model) -> int:
    return min(2, smc.settings["num_steps"])


def _mildest(smc: Model, texts: Sequence[Text], settings: dict[str, Any]) -> float:
    """Return the lowest temperature at which a few answers' evidence varies little.

    The tested answers are others, so that the choice does not bias them.
    """
    for temperature in _TEMPERATURES:
        evidence = _evidence(smc, repeated(texts, _PILOT), settings, temperature)
        mean, error = statistics.mean_of(evidence)
        if error * math.sqrt(_PILOT) < 1.5 and 0.5 < mean < 2.0:
            break
    return temperature


def _evidence(
    smc: Model, asked: Sequence[Text], settings: dict[str, Any], temperature: float
) -> list[float]:
    length = 2 * settings["num_steps"] + 3  # two rounds and the prefill's token
    how = {"ignore_eos": True, "temperature": temperature}
    return [math.exp(one.log_evidence) for one in smc.answers(asked, length, settings, **how)]


def _missing_of(evidence: Sequence[float], mean: Mean, same_models: bool) -> str:
    """Return why the mean of these values is inconclusive, or an empty string."""
    share = max(evidence) / max(math.fsum(evidence), 1e-300)
    if mean.standard_error > _WIDEST_EVIDENCE * mean.estimate or share > _LARGEST_SHARE:
        return (
            f"The heaviest answer is {share:.0%} of the sum: the draft misses what the target "
            "says. Ask for more answers with --scale, or for --prompts that both models know."
        )
    if mean.standard_error == 0.0 and not same_models:
        return "No answer was weighed: the evidence is always 1. Is the draft a copy of the target?"
    return ""


# --- Distributions of short texts

Law = dict[Text, float]
"""Prefix -> mass of the texts of which it is the longest prefix here. The sum may be below 1."""


def short_law(models: Sequence[Model], prompt: Text, smallest: float) -> Law:
    """Return the distribution of texts after a prompt, the i-th token sampled from the i-th model.

    Prefixes with a mass of at least ``smallest`` are extended; the remaining mass of a prefix,
    that of its rarer tokens, is the mass of the prefix itself.
    """
    law: Law = {}
    frontier: Law = {(): 1.0}
    for model in models:
        longer: Law = {}
        tops = model.following([(*prompt, *prefix) for prefix in frontier])
        for (prefix, mass), top in zip(frontier.items(), tops, strict=True):
            masses = {(*prefix, token): mass * math.exp(value) for token, value in top.items()}
            common = {text: mass for text, mass in masses.items() if mass >= smallest}
            longer |= common
            law[prefix] = max(0.0, mass - math.fsum(common.values()))
        frontier = longer
    return law | frontier


def claimed_law(target: Model, prompt: Text, answers: Iterable[CheckedAnswer]) -> Law:
    """Return the distribution of one-particle, one-round answers that their weights imply.

    The evidence of such an answer is p over the probability with which it was sampled.
    """
    evidence = {answer.text: answer.log_evidence for answer in answers}
    scored = target.score([prompt] * len(evidence), list(evidence))
    return {
        text: math.exp(math.fsum(position.logprob for position in positions) - log_evidence)
        for (text, log_evidence), positions in zip(evidence.items(), scored, strict=True)
    }
