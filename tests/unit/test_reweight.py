"""A block of drafts, from its scores to its ancestors: what joins the parts of that."""

import math

import pytest
import torch

from sglang_smc.smc import rounds


def reweight_and_resample(
    log_p: torch.Tensor, before_end: torch.Tensor, power: float, tau: float
) -> rounds.Reweighted:
    """One group, log q = -1 throughout."""
    weights = torch.zeros(log_p.shape[:2], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    rules = rounds.WeightRules(
        num_steps=torch.tensor([log_p.shape[2]]),
        ess_threshold=one * tau,
        at_token=one == 0,
        evidence_threshold=one * 0,
    )
    return rounds.reweight_and_resample(
        weights,
        log_p,
        torch.full_like(log_p, -1.0),
        before_end,
        one * power,
        rules,
        torch.ones_like(weights, dtype=torch.bool),
        one * 0.5,
        torch.full_like(weights, 0.5),
        torch.tensor([0]),
        ("systematic",),
    )


def test_closed_columns_weigh_nothing_and_are_not_kept() -> None:
    """Particle 1 ends with its first token; its later scores belong to nobody."""
    log_p = torch.tensor([[[-1.0, -1.0, -1.0], [-2.0, -9.0, math.nan]]])
    before_end = torch.tensor([[[True, True, True], [True, False, False]]])
    found = reweight_and_resample(log_p, before_end, power=1.0, tau=0.0)
    assert found.num_kept.tolist() == [[3, 1]]
    assert found.cut.log_weights.tolist() == [[0.0, -1.0]]
    assert found.resampled.ancestors.tolist() == [[0, 1]]


def test_the_power_acts_on_the_target_alone() -> None:
    log_p = torch.tensor([[[-1.0], [-2.0]]])
    found = reweight_and_resample(log_p, torch.ones(1, 2, 1, dtype=torch.bool), power=3.0, tau=0.0)
    assert found.cut.log_weights.tolist() == [[-2.0, -5.0]]


def test_columns_that_the_cut_drops_are_kept_by_no_particle() -> None:
    log_p = torch.tensor([[[-1.0, -1.0, -math.inf], [-1.0, -90.0, -math.inf]]])
    found = reweight_and_resample(log_p, torch.ones(1, 2, 3, dtype=torch.bool), power=1.0, tau=0.9)
    assert found.num_kept.tolist() == [[2, 2]]
    assert found.resampled.ancestors.tolist() == [[0, 0]]
    assert found.resampled.log_evidence.item() == pytest.approx(math.log(0.5))
