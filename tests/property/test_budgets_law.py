"""What rounds of changing N and K answer: through the package's own steps, KV read by the ledger.

A population is resized by weight and banks what it weighed; one chain is verified; without drafts
the target decodes alone. Error probabilities are those of correct code, had seeds been drawn.
"""

from typing import Any

import pytest
from toy_laws import (
    LENGTH,
    SCRIPTS,
    assert_properly_weighted,
    languages,
    law,
    p_value,
    run,
    total_variation,
)

from sglang_smc.options.request import OFF, Budget
from sglang_smc.options.server import RESAMPLING_METHODS, SMCConfig


def weighing(num_particles: int, **more: Any) -> SMCConfig:
    """The plain algorithm, which keeps what it drafts; seldom resampled, so that weights differ."""
    more = {"evidence_threshold": 0.0, "ess_threshold": 0.2, "num_steps": 2, **more}
    return SMCConfig(num_particles=num_particles, **more)


@pytest.mark.parametrize(("script", "method"), zip(SCRIPTS, RESAMPLING_METHODS, strict=True))
def test_texts_stay_properly_weighted(script: str, method: str) -> None:
    """A mean weight that is not banked has mean 1: only functions of the text miss it."""
    pair = languages(difference=1.2)
    config = weighing(4, resampling_method=method)
    outcome = run(config, pair, budgets=SCRIPTS[script], num_runs=2500)
    assert_properly_weighted(outcome, law([pair[0]] * LENGTH))


@pytest.mark.parametrize("max_lag", [pytest.param(1, marks=pytest.mark.nightly), LENGTH])
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_draft_equal_to_target_stays_exact(script: str, max_lag: int) -> None:
    """Error probability 1e-4 each; a tail or a slot of another particle would change contexts."""
    target, _ = languages()
    outcome = run(weighing(4, max_lag=max_lag), (target, target), budgets=SCRIPTS[script])
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("mode", "budgets"),
    [
        ("smc", (OFF,)),
        ("smc", (Budget(1, 2),)),
        ("smc", (OFF, Budget(1, 2), Budget(1, 1))),
        ("mixed", (OFF,)),
        ("mixed", (Budget(1, 2),)),
        ("exact", (OFF, Budget(1, 2), Budget(1, 1))),
        *(("exact", SCRIPTS[script]) for script in SCRIPTS),
    ],
)
def test_one_chain_none_and_what_is_verified_follow_p(
    mode: str, budgets: tuple[Budget, ...]
) -> None:
    """Error probability 1e-4 each; weighed, one chain would follow q where it is drafted."""
    target, draft = languages()
    outcome = run(SMCConfig(num_particles=4, mode=mode), (target, draft), budgets=budgets)
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12


def test_who_asked_for_one_particle_gets_what_it_asked_for() -> None:
    """Error probability 1e-4: it is weighed, as without one, and so follows q where drafted."""
    target, draft = languages()
    chosen = ({"num_particles": 1, "num_steps": 2},)
    outcome = run(weighing(4), (target, draft), chosen=chosen, budgets=(Budget(1, 2),))
    drawn_by = [target if t % 3 == 0 else draft for t in range(LENGTH)]
    assert p_value(outcome, law(drawn_by)) > 1e-4


def test_a_power_keeps_its_particles() -> None:
    """With one particle left its texts would follow powers of next-token laws, which are far."""
    target, draft = languages()
    budgets = (OFF, Budget(1, 1))
    outcome = run(weighing(16, power=2.0), (target, draft), budgets=budgets, num_runs=800)
    sums = {text: mass**2 for text, mass in law([target] * LENGTH).items()}
    assert_properly_weighted(outcome, sums)
    expected = {text: mass / sum(sums.values()) for text, mass in sums.items()}
    assert total_variation(outcome, expected) < 0.12
