"""Requests of one batch differ in N, K, mode and all else, and none of them notices.

A group that took a size, a threshold, a number or a slot of its neighbour would draw other texts
than among its own kind. Through the package's own steps, with KV read through the ledger.
"""

from typing import Any

import pytest
import torch
from toy_laws import LENGTH, languages, law, p_value, run

from sglang_smc.options.server import SMCConfig

CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 1, "num_steps": 1},
    {"num_particles": 3, "num_steps": 2, "resample_at": "token", "ess_threshold": 1.0},
    {"num_particles": 8, "num_steps": 4, "resampling_method": "ssp", "ess_threshold": 0.9},
    {"num_particles": 5, "resampling_method": "residual", "selection": "argmax"},
    {"num_particles": 3, "resampling_method": "stratified", "ess_threshold": 1.0},
    {"num_particles": 3, "resampling_method": "multinomial", "evidence_threshold": 1.0},
    {"mode": "exact", "num_particles": 3, "num_steps": 4},
    {"mode": "exact", "num_particles": 1, "num_steps": 2},
    {"mode": "mixed", "num_steps": 2, "evidence_threshold": 0.75},
    {"mode": "auto", "num_particles": 2, "num_steps": 1},
    {"power": 2.0, "num_particles": 3},
    {"draft_temperature": 2.0, "num_particles": 4, "evidence_threshold": 0},
)
PER_CHOICE = 40
SERVER = SMCConfig(num_particles=8, num_steps=4, max_lag=3)


@pytest.mark.parametrize("max_lag", [1, 3, LENGTH])
def test_a_request_draws_the_same_text_among_its_own_kind_and_among_all(max_lag: int) -> None:
    server = SMCConfig(num_particles=8, num_steps=4, max_lag=max_lag)
    num_runs = PER_CHOICE * len(CHOICES)
    together = run(server, languages(), num_runs=num_runs, chosen=CHOICES)
    for i, mine in enumerate(CHOICES):
        rows = list(range(1 + i, num_runs + 1, len(CHOICES)))
        apart = run(server, languages(), rows, num_runs=num_runs, chosen=(mine,))
        at = torch.tensor(rows) - 1
        assert torch.equal(together.outputs[at], apart.outputs), mine
        assert torch.allclose(together.log_evidence[at], apart.log_evidence, atol=1e-12), mine
        assert torch.allclose(together.fidelity[at], apart.fidelity, atol=1e-9), mine


def test_settings_matter_else_the_test_above_would_see_nothing() -> None:
    num_runs = PER_CHOICE * len(CHOICES)
    outputs = [
        run(SERVER, languages(), num_runs=num_runs, chosen=(mine,)).outputs for mine in CHOICES
    ]
    for i, first in enumerate(outputs):
        for second in outputs[i + 1 :]:
            assert not torch.equal(first, second)


@pytest.mark.parametrize("num_particles", [1, 3, 8])
def test_verified_texts_follow_p_beside_weighed_ones(num_particles: int) -> None:
    """Error probability 1e-4 each. Every other request weighs, with more particles and columns."""
    target, draft = languages()
    chosen = ({"mode": "exact", "num_particles": num_particles, "num_steps": 3}, {})
    outcome = run(SERVER, (target, draft), num_runs=6000, chosen=chosen)
    verified = outcome._replace(outputs=outcome.outputs[::2])
    assert p_value(verified, law([target] * LENGTH)) > 1e-4


def test_a_text_of_one_particle_follows_q_and_p_beside_larger_groups() -> None:
    """Error probability 1e-4."""
    target, draft = languages()
    chosen = ({"num_particles": 1, "num_steps": 2, "evidence_threshold": 0}, {})
    outcome = run(SERVER, (target, draft), num_runs=6000, chosen=chosen)
    alone = outcome._replace(outputs=outcome.outputs[::2])
    drawn_by = [target if t % 3 == 0 else draft for t in range(LENGTH)]
    assert p_value(alone, law(drawn_by)) > 1e-4
