"""Check SMC against the target's own distribution, which every server can return."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_smc.tools.testing import statistics
from sglang_smc.tools.testing.laws import short_law
from sglang_smc.tools.testing.model import Answer, Model, Position
from sglang_smc.tools.testing.prompts import PROMPTS
from sglang_smc.tools.testing.result import Result, Verdict
from sglang_smc.tools.testing.statistics import Fit, Mean, Text

ALPHA = 2.5e-4
"""The probability that one check fails on a correct implementation."""

SWITCHES = (
    "start again with --speculative-smc-kernels torch --speculative-smc-round-graph off; if that "
    "mends it, a kernel or a captured round is wrong here. Report it with this table"
)
_TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_PILOT = 64
_WIDEST_EVIDENCE = 0.1  # of the mean; a wider standard error is inconclusive
_WIDEST_LAW = 0.05  # nats per token
_LARGEST_SHARE = 0.1  # of the sum, for one answer


def check_evidence(
    smc: Model,
    prompts: Sequence[str] = PROMPTS,
    *,
    num_answers: int = 1536,
    alpha: float = ALPHA,
    seed: int = 0,
) -> Result:
    """Check that E[Z] = 1 in mode smc with evidence threshold 0, for any N and K."""
    known = {
        "check": "evidence",
        "proves": "weights are p over q and resampling keeps them proper: E[Z] = 1",
        "statistic": "mean of exp(log evidence)",
        "expected": 1.0,
        "alpha": alpha,
    }
    if smc.settings["adaptive"]:
        return Result(**known, verdict=Verdict.NOT_APPLICABLE, note=_ADAPTIVE)
    smc.seed_from(seed)
    texts = token_ids(smc, prompts)
    settings = {
        "mode": "smc",
        "evidence_threshold": 0,
        "power": 1.0,
        "num_steps": min(2, smc.settings["num_steps"]),
    }
    temperature = _mildest(smc, texts, settings)
    evidence = _evidence(smc, _repeated(texts, num_answers), settings, temperature)
    mean = statistics.mean_of(evidence)
    p_value = statistics.p_value_of_mean(evidence, 1.0)
    known |= {
        "estimate": mean.estimate,
        "standard_error": mean.standard_error,
        "p_value": p_value,
        "num_answers": num_answers,
    }
    missing = _what_evidence_lacks(evidence, mean, smc.same_models)
    if missing:
        return Result(**known, verdict=Verdict.NOT_ENOUGH_DATA, note=missing)
    note = f"At temperature {temperature:g}, where the two models overlap enough."
    return judged(known, p_value, alpha, note, f"Weights or resampling are wrong: {SWITCHES}.")


def check_exact_answers(
    smc: Model,
    prompts: Sequence[str] = PROMPTS[:4],
    *,
    num_answers: int = 2048,
    alpha: float = ALPHA,
    seed: int = 10_000_000,
) -> Result:
    """Compare short answers of mode exact with the target's distribution, by a chi-square test."""
    smc.seed_from(seed)
    settings = {"mode": "exact", "power": 1.0, "num_steps": min(2, smc.settings["num_steps"])}
    fit = _fit(smc, token_ids(smc, prompts), num_answers // len(prompts), settings)
    proves = "answers of mode exact follow the target's own law"
    known = fitted("exact-answers", proves, fit, alpha, num_answers)
    advice = f"Mode exact is not lossless here: {SWITCHES}. Meanwhile serve without SMC."
    return judged_fit(known, fit, advice)


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
    smc.seed_from(seed)
    asked = _repeated(token_ids(smc, prompts), num_answers)
    answers = [a.text for a in smc.answers(asked, length, {"mode": mode, "power": 1.0})]
    of_draft = draft.score(asked, answers) if draft else None
    found = _measured(smc.score(asked, answers), of_draft, seed)
    known = {
        "check": f"law-of-{mode}",
        "statistic": "log p + H a token" if found.tilt is None else "log q/p a token",
        "expected": 0.0,
        "estimate": found.shown.estimate,
        "standard_error": found.shown.standard_error,
        "num_answers": num_answers,
    }
    if mode == "exact":
        return _judged_law(known, found, alpha)
    proves = "how far an approximate mode is from the target, token by token"
    return Result(**known, proves=proves, verdict=Verdict.MEASURED, note=_in_words(found))


def token_ids(model: Model, prompts: Sequence[str]) -> list[Text]:
    """Tokenize prompts; raise ValueError if one has no token."""
    texts = [model.token_ids(prompt) for prompt in prompts]
    if all(texts):
        return texts
    raise ValueError(
        f"--prompts: {prompts[texts.index(())]!r} has no token in this model's vocabulary; needed: "
        "one or more. Give other prompts."
    )


def judged(known: dict[str, Any], p_value: float, alpha: float, note: str, advice: str) -> Result:
    """Return PASS, or FAIL with advice, by a p-value."""
    if p_value < alpha:
        return Result(**known, verdict=Verdict.FAIL, note=f"{note} {advice}".strip())
    return Result(**known, verdict=Verdict.PASS, note=note)


def fitted(check: str, proves: str, fit: Fit, alpha: float, num_answers: int) -> dict[str, Any]:
    """Return the fields of a result for a chi-square."""
    return {
        "check": check,
        "proves": proves,
        "statistic": f"chi-square, {fit.df} df",
        "estimate": fit.statistic,
        "expected": float(fit.df),
        "standard_error": math.sqrt(2 * fit.df),
        "p_value": fit.p_value,
        "alpha": alpha,
        "num_answers": num_answers,
    }


def judged_fit(known: dict[str, Any], fit: Fit, advice: str) -> Result:
    """Return the verdict on a chi-square; with fewer than two cells it is inconclusive."""
    if fit.df:
        return judged(known, fit.p_value, known["alpha"], "", advice)
    note = "Each prompt has one likely answer only. Ask for more answers with --scale, or --prompts"
    return Result(**known, verdict=Verdict.NOT_ENOUGH_DATA, note=f"{note} that leave a choice.")


_ADAPTIVE = (
    "This server has --speculative-smc-adaptive, so that N and K are not the request's own. "
    "Start one without it."
)


class _Measured(NamedTuple):
    """Differences between answers and the target's distribution."""

    innovation: Mean
    tilt: Mean | None
    ranks: Fit
    p_value: float
    """The combined p-value: the smallest one times their number (Bonferroni)."""

    @property
    def shown(self) -> Mean:
        """Return the mean to report: log q/p towards the draft if available, else log p + H."""
        return self.innovation if self.tilt is None else self.tilt


def _measured(
    scored: list[list[Position]], of_draft: list[list[Position]] | None, seed: int
) -> _Measured:
    uniforms = random.Random(seed)
    lengths = [len(positions) for positions in scored]
    flat = [position for positions in scored for position in positions]
    ranks = statistics.uniformity(
        [statistics.rank_uniform(x.token, x.top, uniforms.random()) for x in flat]
    )
    innovations = [math.fsum(statistics.innovation(x.token, x.top) for x in xs) for xs in scored]
    p_values = [ranks.p_value, statistics.p_value_of_mean(innovations, 0.0)]
    tilt = None
    if of_draft is not None:
        tilts = list(map(_tilt, scored, of_draft))
        p_values.append(statistics.p_value_of_mean(tilts, 0.0))
        tilt = statistics.per_token(tilts, lengths)
    p_value = min(1.0, len(p_values) * min(p_values))
    return _Measured(statistics.per_token(innovations, lengths), tilt, ranks, p_value)


def _tilt(of_target: list[Position], of_draft: list[Position]) -> float:
    return math.fsum(
        statistics.tilt(x.token, x.top, y.top) for x, y in zip(of_target, of_draft, strict=True)
    )


def _judged_law(known: dict[str, Any], found: _Measured, alpha: float) -> Result:
    known = known | {
        "proves": "tokens of mode exact are as likely as the target's own, in long answers too",
        "alpha": alpha,
        "p_value": found.p_value,
    }
    note = _in_words(found)
    if found.shown.standard_error > _WIDEST_LAW and found.p_value >= alpha:
        note += " Ask for more answers with --scale."
        return Result(**known, verdict=Verdict.NOT_ENOUGH_DATA, note=note)
    return judged(known, found.p_value, alpha, note, f"Mode exact is not lossless: {SWITCHES}.")


def _in_words(found: _Measured) -> str:
    gap, error = found.innovation
    words = f"log p + H {gap:+.3f} ± {2 * error:.3f} nats a token"
    if abs(gap) > 2 * error:
        words += " (sharper than the target)" if gap > 0 else " (flatter than the target)"
    if found.tilt is not None:
        gap, error = found.tilt
        towards = f"log q/p {gap:+.3f} ± {2 * error:.3f} nats a token"
        if abs(gap) > 2 * error:
            towards += " (nearer to the draft)" if gap > 0 else " (further from the draft)"
        words = f"{towards}; {words}"
    return f"{words}; ranks p = {found.ranks.p_value:.2g}."


def _what_evidence_lacks(evidence: Sequence[float], mean: Mean, same_models: bool) -> str:
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


def _fit(smc: Model, prompts: Sequence[Text], size: int, settings: dict[str, Any]) -> Fit:
    """Return the summed chi-square of answers to each prompt under their exact distribution."""
    length = settings["num_steps"] + 2  # the prefill's token, a round, and the next round's first
    fits = Fit(0.0, 0)
    for prompt in prompts:
        law = short_law([smc] * length, prompt, statistics.SMALLEST_CELL / size)
        answers = smc.answers([prompt] * size, length, settings, ignore_eos=True)
        fits += statistics.goodness_of_fit([answer.text for answer in answers], law)
    return fits


def _mildest(smc: Model, texts: Sequence[Text], settings: dict[str, Any]) -> float:
    """Return the lowest temperature at which a few answers' evidence varies little.

    The tested answers are others, so that the choice does not bias them.
    """
    for temperature in _TEMPERATURES:
        evidence = _evidence(smc, _repeated(texts, _PILOT), settings, temperature)
        mean, error = statistics.mean_of(evidence)
        if error * math.sqrt(_PILOT) < 1.5 and 0.5 < mean < 2.0:
            break
    return temperature


def _evidence(
    smc: Model, asked: Sequence[Text], settings: dict[str, Any], temperature: float
) -> list[float]:
    length = 2 * settings["num_steps"] + 3  # two rounds and the prefill's token
    answers: list[Answer] = smc.answers(
        asked, length, settings, ignore_eos=True, temperature=temperature
    )
    return [math.exp(answer.log_evidence) for answer in answers]


def _repeated(texts: Sequence[Text], size: int) -> list[Text]:
    return [texts[index % len(texts)] for index in range(size)]
