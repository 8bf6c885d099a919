"""A head finds the target's state before each particle's last token, whatever became of particles.

A toy head must draw the very texts that a toy language model of its law does: one state of another
particle, or of another position, is another context.
"""

from typing import Any

import pytest
import torch
from toy_head import HeadWorker
from toy_laws import run
from toy_worker import ToyWorker

from sglang_smc.options.request import Budget


@pytest.mark.parametrize(
    "settings",
    [
        {"evidence_threshold": 0.0},
        {"ess_threshold": 1.0},
        {"num_particles": 5, "num_steps": 2, "resample_at": "token", "max_lag": 2},
        {"num_particles": 3, "num_steps": 4, "mode": "auto"},
        {"num_particles": 3, "num_steps": 4, "mode": "exact"},
        {
            "ess_threshold": 0.9,
            "chosen": ({}, {"num_particles": 2}, {"num_steps": 1}, {"mode": "exact"}),
        },
        {"adaptive": "on", "budgets": (None, Budget(1, 0), Budget(2, 3), Budget(4, 1))},
        {"adaptive": "on", "budgets": (None, *[Budget(1, 0)] * 7, Budget(1, 3))},
        {"mode": "exact", "chosen": ({}, {"num_steps": 0, "num_particles": 1})},
    ],
)
def test_states_follow_particles(settings: dict[str, Any]) -> None:
    given = {"num_particles": 4, "num_steps": 3, "num_runs": 60, "limit": 24, **settings}
    by_head, by_model = (run(kind=kind, **given) for kind in (HeadWorker, ToyWorker))
    assert torch.equal(by_head.outputs, by_model.outputs)
    assert torch.allclose(by_head.log_evidence, by_model.log_evidence)
    assert by_head.num_rounds < by_head.num_tokens, "nothing that was drafted was kept"
