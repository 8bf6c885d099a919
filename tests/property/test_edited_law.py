"""The law of the output where requests change logits: p's and q's edited alike, by own texts.

Laws to hold runs against come from SGLang's own penalties (`edit_cases.stock_edit`). Seeds are
fixed; error probabilities are those of correct code, had they been drawn.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from edit_cases import Echo, stock_edit
from toy_laws import EOS, LENGTH, NUM_RUNS, languages, law, p_value, run, total_variation
from toy_worker import PROMPT, Language, Outcome

from sglang_smc.options.server import SMCConfig

PENALTIES: dict[str, Any] = {
    "frequency_penalty": 1.2,
    "presence_penalty": -0.6,
    "repetition_penalty": 1.8,
    "logit_bias": {"1": 0.8, "2": -0.5},
}


PROCESSOR: dict[str, Any] = {"custom_logit_processor": Echo.to_str()}
LEAST: dict[str, Any] = {"min_new_tokens": 3}
ASKED = {
    "penalties": PENALTIES,
    "processor too": {**PENALTIES, **PROCESSOR},
    "a least length": LEAST,
}


class Edited(NamedTuple):
    """A language as SGLang's sampler would edit it."""

    language: Language
    asked: dict[str, Any]

    def after(self, output: tuple[int, ...]) -> torch.Tensor:
        own = {name: value for name, value in self.asked.items() if name not in PROCESSOR}
        logits = stock_edit(self.language.after(output), list(output), own, frozenset({EOS}))
        if "custom_logit_processor" in self.asked:
            logits[[*PROMPT, *output][-2]] += 1.5
        return logits


def config(num_particles: int, num_steps: int = 2, **more: Any) -> SMCConfig:
    return SMCConfig(
        num_particles=num_particles, num_steps=num_steps, **{"evidence_threshold": 0.0, **more}
    )


def edited_law(asked: dict[str, Any]) -> dict[tuple[int, ...], float]:
    return law([Edited(languages()[0], asked)] * LENGTH)  # type: ignore[list-item]


def check_evidence(outcome: Outcome, expected: float) -> None:
    """E[Z-hat] within 4 standard errors (error probability 6e-5)."""
    evidence = outcome.log_evidence.exp()
    assert abs(evidence.mean() - expected) < 4 * evidence.std() / math.sqrt(NUM_RUNS)


@pytest.mark.parametrize("name", list(ASKED))
def test_one_particle_follows_the_edited_q_where_drafted_and_p_where_bonus(name: str) -> None:
    """Error probability 1e-4 each; with either model unedited the law is another."""
    asked = ASKED[name]
    drawn_by = [Edited(languages()[t % 3 != 0], asked) for t in range(LENGTH)]
    outcome = run(config(1), languages(), asked=asked)
    assert p_value(outcome, law(drawn_by)) > 1e-4  # type: ignore[arg-type]
    for forgotten in (0, 1):
        others = [one.language if t % 3 != forgotten else one for t, one in enumerate(drawn_by)]
        assert p_value(outcome, law(others)) < 1e-6  # type: ignore[arg-type]


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("name", list(ASKED))
def test_a_draft_equal_to_the_target_is_exact(name: str, resample_at: str) -> None:
    """p and q are edited alike in every column, or weights would leave 1; tails part and stay."""
    target, _ = languages()
    equal = config(4, ess_threshold=1.0, resample_at=resample_at, max_lag=LENGTH)
    outcome = run(equal, (target, target), asked=ASKED[name])
    assert p_value(outcome, edited_law(ASKED[name])) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-5


@pytest.mark.parametrize("max_lag", [2, LENGTH])
def test_evidence_stays_unbiased(max_lag: int) -> None:
    check_evidence(run(config(5, max_lag=max_lag), languages(), asked=PENALTIES), 1.0)


def test_many_particles_come_near_the_edited_target() -> None:
    many = run(config(24, max_lag=LENGTH), languages(), asked=PENALTIES)
    assert total_variation(many, edited_law(PENALTIES)) < 0.06
    assert total_variation(many, edited_law({})) > 0.15, "the test could not tell them apart"


@pytest.mark.parametrize("mode", ["exact", "mixed"])
@pytest.mark.parametrize("name", list(ASKED))
def test_verified_rounds_follow_the_edited_target(name: str, mode: str) -> None:
    """Error probability 1e-4 each; evidence never suffices here."""
    chosen = {"mode": mode, **({"evidence_threshold": 1e9} if mode == "mixed" else {})}
    outcome = run(config(3), languages(), chosen=(chosen,), asked=ASKED[name])
    assert p_value(outcome, edited_law(ASKED[name])) > 1e-4
    assert p_value(outcome, edited_law({})) < 1e-9


def test_a_power_of_the_edited_target_has_its_normaliser_estimated() -> None:
    """Particles that differ in their first token count their own."""
    raised = {text: mass**2 for text, mass in edited_law(PENALTIES).items()}
    outcome = run(config(8), languages(), chosen=({"power": 2.0},), asked=PENALTIES)
    check_evidence(outcome, sum(raised.values()))


def test_a_request_draws_the_same_text_alone_and_in_any_batch() -> None:
    together = run(config(4, max_lag=3), languages(), asked=PENALTIES).outputs
    for rows in ([7], [9, 7, 2000]):
        alone = run(config(4, max_lag=3), languages(), rows, asked=PENALTIES).outputs
        assert torch.equal(alone, together[torch.tensor(rows) - 1])
    assert (together == EOS).any()


def test_requests_without_edits_draw_as_ever_beside_some_that_have_them() -> None:
    several = (PENALTIES, {}, LEAST)
    together = run(config(4, max_lag=3), languages(), num_runs=300, asked=several)
    for own, asked in enumerate(several):
        alone = run(config(4, max_lag=3), languages(), num_runs=300, asked=asked)
        assert torch.equal(together.outputs[own::3], alone.outputs[own::3])
        assert torch.equal(together.log_evidence[own::3], alone.log_evidence[own::3])
