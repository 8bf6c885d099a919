"""The law of the package's own rounds, with models that read their KV through the ledger.

Against `test_toy_smc.py` these add the steps themselves, slots, emission on the way and the lag
bound. Seeds are fixed; error probabilities are those of correct code, had they been drawn.
"""

import math

import pytest
import torch
from toy_laws import LENGTH, NUM_RUNS, languages, law, p_value, run, total_variation

from sglang_smc.options.server import SMCConfig


def settings(num_particles: int, num_steps: int, **more: object) -> SMCConfig:
    """The plain algorithm of the paper, which keeps what it drafts."""
    more = {"evidence_threshold": 0.0, **more}
    return SMCConfig(num_particles=num_particles, num_steps=num_steps, **more)


@pytest.mark.parametrize("max_lag", [1, LENGTH])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_one_particle_follows_q_where_drafted_and_p_where_bonus(
    num_steps: int, max_lag: int
) -> None:
    """Error probability 1e-4 each; the slightest misreading of KV changes every context."""
    target, draft = languages()
    outcome = run(settings(1, num_steps, max_lag=max_lag), (target, draft))
    drawn_by = [target if t % (num_steps + 1) == 0 else draft for t in range(LENGTH)]
    assert p_value(outcome, law(drawn_by)) > 1e-4
    assert p_value(outcome, law([target] * LENGTH)) < 1e-9, "the test could not tell them apart"


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("max_lag", [1, 3, LENGTH])
def test_draft_equal_to_target_is_exact(max_lag: int, resample_at: str) -> None:
    """Error probability 1e-4 each; exact evidence, since no weight ever leaves 1."""
    target, _ = languages()
    config = settings(4, 2, ess_threshold=1.0, resample_at=resample_at, max_lag=max_lag)
    outcome = run(config, (target, target))
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12


@pytest.mark.parametrize("max_lag", [1, 2, LENGTH])
@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize(("num_particles", "num_steps"), [(2, 1), (4, 2), (5, 4)])
def test_evidence_is_unbiased(
    num_particles: int, num_steps: int, resample_at: str, max_lag: int
) -> None:
    """E[Z-hat] = 1 within 4 standard errors (error probability 6e-5 each)."""
    config = settings(num_particles, num_steps, resample_at=resample_at, max_lag=max_lag)
    outcome = run(config, languages())
    evidence = outcome.log_evidence.exp()
    assert abs(evidence.mean() - 1) < 4 * evidence.std() / math.sqrt(NUM_RUNS)
    if num_steps + 1 < LENGTH:  # else one round may be all there is
        assert (outcome.num_forced > 0) == (max_lag < LENGTH)
        if max_lag < LENGTH or num_particles == 2:  # more siblings hardly ever agree by chance
            assert outcome.num_emitted_early > 0


@pytest.mark.parametrize("ess_threshold", [0.5, 1.0])
@pytest.mark.parametrize(("num_steps", "resample_at"), [(1, "block"), (2, "block"), (3, "token")])
def test_many_particles_come_near_the_target(
    num_steps: int, resample_at: str, ess_threshold: float
) -> None:
    """With this many runs noise alone makes a TV of about .04; one particle's law is .26 away.

    Threshold 1 resamples after every block, or token: a bonus token that is drawn behind another
    particle or another column than the one it follows puts the law far off.
    """
    target, draft = languages()
    config = settings(
        24, num_steps, resample_at=resample_at, ess_threshold=ess_threshold, max_lag=LENGTH
    )
    outcome = run(config, (target, draft))
    assert total_variation(outcome, law([target] * LENGTH)) < 0.06


def test_a_request_draws_the_same_text_alone_and_in_any_batch() -> None:
    config = settings(4, 2, max_lag=3)
    together = run(config, languages()).outputs
    for rows in ([7], [9, 7, 2000], [2999, 1]):
        alone = run(config, languages(), rows).outputs
        assert torch.equal(alone, together[torch.tensor(rows) - 1])
