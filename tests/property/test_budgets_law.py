"""What rounds of changing N and K answer: through the package's own steps, KV read by the ledger.

A population is resized by weight and banks what it weighed; one chain is verified; without drafts
the target decodes alone. Error probabilities are those of correct code, had seeds been drawn.
"""

import math
from typing import Any

import pytest
import torch
from toy_laws import LENGTH, NUM_RUNS, VOCAB, languages, law, p_value, run, total_variation

from sglang_smc.options.budget import OFF, Budget
from sglang_smc.options.server import RESAMPLING_METHODS, SMCConfig

SCRIPTS = {
    "fewer": (Budget(4, 1), Budget(2, 1)),
    "more": (Budget(2, 1), Budget(4, 1)),
    "down to none and back": (Budget(4, 1), OFF, Budget(3, 1)),
    "one chain and back": (Budget(1, 1), Budget(4, 1)),
    "without drafts, then fewer": (Budget(4, 0), Budget(3, 1), Budget(2, 0)),
}


def weighing(num_particles: int, **more: Any) -> SMCConfig:
    """The plain algorithm, which keeps what it drafts; seldom resampled, so that weights differ."""
    more = {"evidence_threshold": 0.0, "ess_threshold": 0.2, "num_steps": 2, **more}
    return SMCConfig(num_particles=num_particles, **more)


@pytest.mark.parametrize(
    ("script", "method"),
    [
        *((script, "systematic") for script in SCRIPTS),
        *(
            pytest.param("down to none and back", method, marks=pytest.mark.thorough)
            for method in RESAMPLING_METHODS[1:]
        ),
    ],
)
def test_texts_stay_properly_weighted(script: str, method: str) -> None:
    """E[Z-hat f(x)] is p's mean of f, and so E[Z-hat] = 1 (error probability 6e-5 a line).

    Within 4 standard errors. A mean weight that is not banked has mean 1, so that only a function
    of the text would miss it: here how often each token is the text's third, and 1 itself.
    """
    target, draft = languages(difference=1.2)
    outcome = run(weighing(4, resampling_method=method), (target, draft), budgets=SCRIPTS[script])
    evidence, thirds = outcome.log_evidence.exp(), outcome.outputs[:, 2]
    expected = [0.0] * VOCAB
    for text, mass in law([target] * LENGTH).items():
        expected[text[2]] += mass
    lines = [evidence * (thirds == token) for token in range(VOCAB)]
    for line, mean in zip([*lines, evidence], [*expected, 1.0], strict=True):
        assert abs(line.mean() - mean) < 4 * line.std() / math.sqrt(NUM_RUNS)


@pytest.mark.parametrize("max_lag", [pytest.param(1, marks=pytest.mark.thorough), LENGTH])
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_draft_equal_to_target_stays_exact(script: str, max_lag: int) -> None:
    """Error probability 1e-4 each; a tail or a slot of another particle would change contexts."""
    target, _ = languages()
    outcome = run(weighing(4, max_lag=max_lag), (target, target), budgets=SCRIPTS[script])
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12


@pytest.mark.parametrize("mode", ["smc", "exact", "mixed"])
@pytest.mark.parametrize("budgets", [(OFF,), (Budget(1, 2),), (OFF, Budget(1, 2), Budget(1, 1))])
def test_who_is_reduced_to_one_chain_or_none_follows_p(
    budgets: tuple[Budget, ...], mode: str
) -> None:
    """Error probability 1e-4 each; weighed, one chain would follow q where it is drafted."""
    target, draft = languages()
    outcome = run(SMCConfig(num_particles=4, mode=mode), (target, draft), budgets=budgets)
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_verified_texts_follow_p_whatever_the_budgets(script: str) -> None:
    """Error probability 1e-4 each."""
    target, draft = languages()
    outcome = run(
        SMCConfig(num_particles=4, mode="exact"), (target, draft), budgets=SCRIPTS[script]
    )
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4


def test_who_asked_for_one_particle_gets_what_it_asked_for() -> None:
    """Error probability 1e-4: it is weighed, as without one, and so follows q where drafted."""
    target, draft = languages()
    chosen = ({"num_particles": 1, "num_steps": 2},)
    outcome = run(weighing(4), (target, draft), chosen=chosen, budgets=(Budget(1, 2),))
    drawn_by = [target if t % 3 == 0 else draft for t in range(LENGTH)]
    assert p_value(outcome, law(drawn_by)) > 1e-4


@pytest.mark.parametrize(
    ("budgets", "method"),
    [
        ((Budget(32, 2), OFF), "systematic"),
        *(
            pytest.param((Budget(32, 2), OFF), method, marks=pytest.mark.thorough)
            for method in RESAMPLING_METHODS[1:]
        ),
        ((Budget(32, 2), Budget(16, 1)), "systematic"),
        ((Budget(16, 1), Budget(32, 2)), "systematic"),
    ],
)
def test_many_particles_come_near_the_target(budgets: tuple[Budget, ...], method: str) -> None:
    """Noise alone makes a TV of about .04; unweighted, the first draw would put it .15 away."""
    target, draft = languages()
    config = weighing(32, resampling_method=method)
    outcome = run(config, (target, draft), budgets=budgets)
    assert total_variation(outcome, law([target] * LENGTH)) < 0.065


def test_a_power_keeps_its_particles() -> None:
    """With one particle left its texts would follow powers of next-token laws, which are far."""
    target, draft = languages()
    config = weighing(24, power=2.0)
    outcome = run(config, (target, draft), budgets=(OFF, Budget(1, 1)), num_runs=2500)
    sums = {text: mass**2 for text, mass in law([target] * LENGTH).items()}
    expected = {text: mass / sum(sums.values()) for text, mass in sums.items()}
    assert total_variation(outcome, expected) < 0.08


CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 3, "num_steps": 1, "resampling_method": "ssp"},
    {"num_particles": 1},
    {"num_particles": 2, "resampling_method": "residual", "resample_at": "token"},
    {"mode": "exact", "num_particles": 3},
    {"mode": "mixed", "num_particles": 4},
    {"power": 2.0, "num_particles": 3},
)


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_a_request_draws_the_same_text_among_its_own_kind_and_among_all(script: str) -> None:
    """Of a batch some change their N and some do not: none takes a neighbour's size or slot."""
    num_runs, budgets = 40 * len(CHOICES), SCRIPTS[script]
    server, pair = SMCConfig(num_particles=4, num_steps=2, max_lag=3), languages()
    together = run(server, pair, num_runs=num_runs, chosen=CHOICES, budgets=budgets)
    for i, mine in enumerate(CHOICES):
        rows = list(range(1 + i, num_runs + 1, len(CHOICES)))
        apart = run(server, pair, rows, num_runs=num_runs, chosen=(mine,), budgets=budgets)
        at = torch.tensor(rows) - 1
        assert torch.equal(together.outputs[at], apart.outputs), mine
        assert torch.allclose(together.log_evidence[at], apart.log_evidence, atol=1e-12), mine
