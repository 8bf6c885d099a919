"""Check the draft: equal models, and the distribution of drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_smc.tools.testing import statistics
from sglang_smc.tools.testing.checks import ALPHA, SWITCHES, fitted, judged_fit, token_ids
from sglang_smc.tools.testing.laws import claimed_law, short_law
from sglang_smc.tools.testing.model import Model
from sglang_smc.tools.testing.prompts import PROMPTS
from sglang_smc.tools.testing.result import Result, Verdict
from sglang_smc.tools.testing.statistics import Fit

_ADVICE = f"Drafts do not follow the draft model, or are weighed by another law: {SWITCHES}."


def check_draft_law(
    smc: Model,
    prompts: Sequence[str] = PROMPTS[:4],
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
    proves = "drafted tokens follow the law they are weighed by"
    if draft is not None:
        proves = "drafted tokens follow the draft's own law"
    if smc.settings["adaptive"]:
        note = "This server has --speculative-smc-adaptive, and verifies single particles. "
        return Result("draft-law", proves, Verdict.NOT_APPLICABLE, note + "Start one without it.")
    smc.seed_from(seed)
    texts, size = token_ids(smc, prompts), num_answers // len(prompts)
    fits = Fit(0.0, 0)
    for prompt in texts:
        num_steps = 1 if draft is None else min(2, smc.settings["num_steps"])
        settings = {
            "mode": "smc",
            "num_particles": 1,
            "num_steps": num_steps,
            "evidence_threshold": 0,
            "power": 1.0,
            "draft_temperature": 1.0,
        }
        answers = smc.answers([prompt] * size, 1 + num_steps, settings, ignore_eos=True)
        if draft is None:
            law = claimed_law(smc, prompt, answers)
        else:
            law = short_law([smc, *[draft] * num_steps], prompt, statistics.SMALLEST_CELL / size)
        fits += statistics.goodness_of_fit([answer.text for answer in answers], law)
    return judged_fit(fitted("draft-law", proves, fits, alpha, num_answers), fits, _ADVICE)


def check_equal_models(
    smc: Model,
    prompts: Sequence[str] = PROMPTS,
    *,
    num_answers: int = 64,
    length: int = 32,
    seed: int = 40_000_000,
) -> Result:
    """Check a draft that is the target: evidence is 1 up to rounding, without resampling."""
    known = {
        "check": "equal-models",
        "proves": "drafting and scoring give one model the same numbers, so weights stay equal",
        "statistic": "largest |log evidence| a token",
        "expected": 0.0,
    }
    if not smc.same_models:
        note = "The draft is another model. --target DIR --draft DIR makes a server for this check."
        return Result(**known, verdict=Verdict.NOT_APPLICABLE, note=note)
    smc.seed_from(seed)
    texts = token_ids(smc, prompts)
    asked = [texts[index % len(texts)] for index in range(num_answers)]
    settings = {"mode": "smc", "evidence_threshold": 0, "power": 1.0}
    answers = smc.answers(asked, length, settings)
    worst = max(abs(answer.log_evidence) / len(answer.text) for answer in answers)
    resamplings = sum(answer.meta["spec_smc_resample_ct"] for answer in answers)
    known |= {"estimate": worst, "num_answers": num_answers}
    note = f"{resamplings} resamplings; rounding allows {smc.rounding:g} nats a token."
    if resamplings or worst > smc.rounding:
        note += f" The same text is scored differently in drafting and in verification: {SWITCHES}."
        return Result(**known, verdict=Verdict.FAIL, note=note)
    return Result(**known, verdict=Verdict.PASS, note=note)
