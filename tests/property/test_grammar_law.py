"""A grammar as a potential: whole texts follow p given that they are legal.

Not the law of a local mask, which renormalises p token by token. All rounds are the package's own,
through `toy_worker`; grammars are xgrammar's. Error probabilities are those of correct code, had
the seeds been drawn.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import toy_laws
from toy_grammar import conditional_law, local_law, maker, potential
from toy_laws import LENGTH, p_value, total_variation
from toy_worker import Outcome

from sglang_smc.options.budget import Budget
from sglang_smc.options.server import SMCConfig

# Behind an a only bb may come, behind a b anything: a local mask takes a far too often.
UNEVEN = "abb|b(a|b)*"
# Legal so far, and yet without an end: nobody has the letter c.
BLIND = "a(a|b)c|b(a|b)*"
PAIR = toy_laws.languages()
TARGET = PAIR[0]
PAGE = Path(__file__).parents[2] / "docs" / "targets.md"


def run(regex: str, *, pair: Any = PAIR, size: int = 2000, **settings: Any) -> Outcome:
    budgets = settings.pop("budgets", (None,))
    config = SMCConfig(**{"num_particles": 24, "num_steps": 2, **settings})
    return toy_laws.run(config, pair, num_runs=size, budgets=budgets, grammar=maker(regex))


def assert_unbiased(outcome: Outcome, expected: float) -> None:
    """E[Z-hat] within 4 standard errors (error probability 6e-5)."""
    evidence = outcome.log_evidence.exp()
    error = float(evidence.std()) / math.sqrt(len(evidence))
    assert abs(float(evidence.mean()) - expected) < 4 * error + 1e-12


def distance(one: dict, other: dict) -> float:
    return 0.5 * sum(abs(one[text] - other[text]) for text in one)


def test_the_two_laws_differ() -> None:
    assert distance(conditional_law(TARGET, UNEVEN), local_law(TARGET, UNEVEN)) > 0.2


@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_many_particles_come_near_p_given_the_grammar(resample_at: str) -> None:
    """Noise alone makes a TV of about .02; the local mask's law fails by the same measure."""
    outcome = run(UNEVEN, resample_at=resample_at)
    assert total_variation(outcome, conditional_law(TARGET, UNEVEN)) < 0.06
    assert total_variation(outcome, local_law(TARGET, UNEVEN)) > 0.15


def test_docs_targets_says_how_far_texts_are_from_p_given_the_grammar() -> None:
    """Noise alone makes a TV of about .03."""
    outcome = run(UNEVEN, num_particles=8)
    found = total_variation(outcome, conditional_law(TARGET, UNEVEN))
    assert found == pytest.approx(0.07, abs=0.02)
    assert "| 0.07 |" in PAGE.read_text()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_particles": 1},
        {"num_particles": 3, "num_steps": 1},
        {"num_particles": 4, "num_steps": 4},
        {"num_particles": 4, "resample_at": "token", "ess_threshold": 0.9},
        {"num_particles": 4, "max_lag": 1},
        {"num_particles": 4, "budgets": (Budget(4, 2), Budget(4, 0), Budget(1, 1))},
    ],
    ids=str,
)
def test_z_hat_is_unbiased_for_the_chance_of_a_legal_text(settings: dict[str, Any]) -> None:
    """At the first token, at drafts, at every bonus: each has its part of the masked mass."""
    assert_unbiased(run(UNEVEN, **settings), sum(potential(TARGET, UNEVEN).values()))


def test_a_power_of_p_within_a_grammar() -> None:
    power = 2.0
    raised = {text: mass**power for text, mass in potential(TARGET, UNEVEN).items()}
    total = sum(raised.values())
    outcome = run(UNEVEN, power=power)
    assert_unbiased(outcome, total)
    assert total_variation(outcome, {t: mass / total for t, mass in raised.items()}) < 0.06


@pytest.mark.parametrize("mode", ["exact", "mixed", "auto"])
def test_verification_follows_the_local_masks_law(mode: str) -> None:
    """p-value above 1e-4; mixed and auto are near it."""
    outcome = run(UNEVEN, mode=mode, num_particles=3)
    if mode == "exact":
        assert p_value(outcome, local_law(TARGET, UNEVEN)) > 1e-4
    else:
        assert total_variation(outcome, local_law(TARGET, UNEVEN)) < 0.12
    assert not outcome.log_evidence.any()


@pytest.mark.parametrize("mode", ["smc", "exact", "mixed", "auto"])
def test_every_text_is_legal(mode: str) -> None:
    legal = potential(TARGET, UNEVEN)
    outcome = run(UNEVEN, mode=mode, num_particles=2, num_steps=3, size=500)
    assert all(legal[tuple(text)] > 0 for text in outcome.outputs.tolist())


def test_particles_in_a_dead_end_weigh_nothing() -> None:
    """The mask lets an a come, and then nothing; texts that begin with b are all there is."""
    outcome = run(BLIND, num_particles=16)
    expected = conditional_law(TARGET, "b(a|b)*")
    survived = outcome.log_evidence > -math.inf
    assert float(survived.double().mean()) > 0.99
    kept = outcome._replace(outputs=outcome.outputs[survived])
    assert total_variation(kept, expected) < 0.06
    assert_unbiased(outcome, sum(potential(TARGET, "b(a|b)*").values()))


@pytest.mark.parametrize("mode", ["smc", "exact", "mixed"])
def test_who_has_no_way_out_is_told_by_a_weight_of_zero(mode: str) -> None:
    """One particle that begins with an a, or a verified text: the request is stuck."""
    outcome = run(BLIND, mode=mode, num_particles=1 if mode == "smc" else 3, size=400)
    stuck = outcome.log_evidence == -math.inf
    begins_with_a = outcome.outputs[:, 0] == 0
    assert stuck.any() and not stuck.all()
    assert bool((stuck == begins_with_a).all())


def test_a_batch_of_one_grammar_and_plain_requests() -> None:
    """Who has no grammar gets the tokens that it gets alone."""
    config = SMCConfig(num_particles=4, num_steps=2)
    grammars = maker(UNEVEN)
    made = iter(range(10**6))
    mixed = toy_laws.run(
        config, PAIR, num_runs=300, grammar=lambda: grammars() if next(made) % 2 else None
    )
    alone = toy_laws.run(config, PAIR, num_runs=300)
    legal = potential(TARGET, UNEVEN)
    assert (mixed.outputs[::2] == alone.outputs[::2]).all()
    assert all(legal[tuple(text)] > 0 for text in mixed.outputs[1::2].tolist())


def test_the_length_limit_cuts_legal_texts() -> None:
    """A text that must go on at the limit is legal, as far as it goes."""
    outcome = run("(ab){4}", num_particles=2, size=50)
    assert outcome.outputs.tolist() == [[0, 1, 0, 1, 0]] * 50
    assert LENGTH == 5
