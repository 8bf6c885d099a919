"""The law of the package's own rounds, with models that read their KV through the ledger.

Seeds are fixed, so a test passes always or never; error probabilities are those of correct code,
had they been drawn.
"""

import math

import pytest
import torch
from toy_laws import (
    EOS,
    LENGTH,
    NUM_RUNS,
    frequencies,
    languages,
    law,
    p_value,
    run,
    total_variation,
    unstratified,
)
from toy_worker import Language, Outcome

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.options.server import RESAMPLING_METHODS, SMCConfig


def settings(num_particles: int, num_steps: int, **more: object) -> SMCConfig:
    """The plain algorithm of the paper, which keeps what it drafts."""
    more = {"evidence_threshold": 0.0, **more}
    return SMCConfig(num_particles=num_particles, num_steps=num_steps, **more)


def assert_unit_mean_evidence(outcome: Outcome) -> None:
    """E[Z-hat] = 1 within 4 standard errors (error probability 6e-5)."""
    evidence = outcome.log_evidence.exp()
    assert evidence.std() > 0
    assert abs(evidence.mean() - 1) < 4 * evidence.std() / math.sqrt(len(evidence))


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
    """Error probability 1e-4 each; exact evidence, since no mean weight ever leaves 1."""
    target, _ = languages()
    config = settings(4, 2, ess_threshold=1.0, resample_at=resample_at, max_lag=max_lag)
    outcome = run(config, (target, target))
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12
    # What lags is split in unequal parts.
    assert outcome.num_resampled == 0 or max_lag < LENGTH


@pytest.mark.parametrize("max_lag", [1, 2, LENGTH])
@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize(("num_particles", "num_steps"), [(2, 1), (4, 2), (5, 4)])
def test_evidence_is_unbiased(
    num_particles: int, num_steps: int, resample_at: str, max_lag: int
) -> None:
    config = settings(num_particles, num_steps, resample_at=resample_at, max_lag=max_lag)
    outcome = run(config, languages())
    assert_unit_mean_evidence(outcome)
    if num_steps + 1 < LENGTH:  # else one round may be all there is
        assert (outcome.num_narrowed > 0) == (max_lag < LENGTH)
        if max_lag < LENGTH or num_particles == 2:  # more siblings hardly ever agree by chance
            assert outcome.num_emitted_early > 0


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("method", RESAMPLING_METHODS)
def test_evidence_is_unbiased_with_every_scheme(method: str, resample_at: str) -> None:
    config = settings(
        5, 2, ess_threshold=0.9, resample_at=resample_at, resampling_method=method, max_lag=LENGTH
    )
    outcome = run(config, languages())
    assert outcome.num_resampled > NUM_RUNS / 2
    assert_unit_mean_evidence(outcome)


@pytest.mark.parametrize(("num_particles", "ess_threshold"), [(1, 1.0), (8, 0.0), (8, 1.0)])
def test_evidence_is_unbiased_whether_always_or_never_resampled(
    num_particles: int, ess_threshold: float
) -> None:
    config = settings(num_particles, 1, ess_threshold=ess_threshold, max_lag=LENGTH)
    outcome = run(config, languages())
    assert (outcome.num_resampled > NUM_RUNS) == (num_particles * ess_threshold > 1)
    assert_unit_mean_evidence(outcome)


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


def bias_of_what_one_particle_overrates(config: SMCConfig, num_runs: int, *, alone: bool) -> float:
    """How much more often than p the texts come out that are likelier with N = 1; times N."""
    target, draft = languages(difference=1.5)
    expected = law([target] * LENGTH)
    of_one = law([target if place % 3 == 0 else draft for place in range(LENGTH)])
    overrated = [text for text, mass in expected.items() if of_one[text] > mass]
    ops = unstratified(TORCH) if alone else TORCH
    found = frequencies(run(config, (target, draft), num_runs=num_runs, ops=ops))
    share = sum(found.get(text, 0) for text in overrated) / num_runs
    return config.num_particles * (share - sum(expected[text] for text in overrated))


@pytest.mark.parametrize(
    "method",
    [
        "systematic",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in RESAMPLING_METHODS[1:]),
    ],
)
def test_law_tends_to_the_target_as_one_over_n(method: str) -> None:
    """N * bias settles; with 5000 runs it has a standard error below .06 at N = 8.

    Siblings that share their noise bring it down faster still.
    """
    scaled = []
    for num_particles in (2, 4, 8):
        config = settings(num_particles, 2, resampling_method=method, max_lag=LENGTH)
        scaled.append(bias_of_what_one_particle_overrates(config, 5000, alone=True))
    assert min(scaled) > 0.3
    assert max(scaled) < 0.85
    assert bias_of_what_one_particle_overrates(config, 5000, alone=False) < scaled[-1]


@pytest.mark.parametrize(("num_particles", "num_steps"), [(4, 2), (8, 2)])
def test_siblings_that_share_their_noise_lower_the_variance_of_z_hat(
    num_particles: int, num_steps: int
) -> None:
    """The same runs with and without; a variance has a relative error of about 5 % here."""
    config = settings(num_particles, num_steps, max_lag=LENGTH)
    spread, apart = (run(config, languages(), ops=ops) for ops in (TORCH, unstratified(TORCH)))
    assert_unit_mean_evidence(spread)
    assert spread.log_evidence.exp().var() < 0.93 * apart.log_evidence.exp().var()


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_end_inside_a_block_is_weighed_as_any_token(num_steps: int, resample_at: str) -> None:
    """The two models end texts at very different rates; an end that does not weigh would show."""
    target, _ = languages()
    hasty = target.logits.clone()
    hasty[:, EOS] += 1.5
    config = settings(24, num_steps, ess_threshold=0.9, resample_at=resample_at, max_lag=LENGTH)
    outcome = run(config, (target, Language(hasty)))
    assert total_variation(outcome, law([target] * LENGTH)) < 0.06
    assert_unit_mean_evidence(outcome)


@pytest.mark.parametrize("temperature", [0.6, 1.6])
def test_a_draft_with_another_temperature_is_corrected(temperature: float) -> None:
    target, _ = languages()
    config = settings(24, 2, draft_temperature=temperature, max_lag=LENGTH)
    outcome = run(config, (target, target))
    assert total_variation(outcome, law([target] * LENGTH)) < 0.06
    assert_unit_mean_evidence(outcome)


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("num_particles", [1, 2, 24])
def test_tokens_that_the_target_never_says_never_come_out(
    num_particles: int, resample_at: str
) -> None:
    """q has mass where p has none: weight zero, and an exact target step where all die at once."""
    target, draft = languages()
    least = target.logits.argmin(1, keepdim=True)
    cut = Language(target.logits.scatter(1, least, -torch.inf))
    expected = law([cut] * LENGTH)
    config = settings(num_particles, 3, ess_threshold=0.9, resample_at=resample_at, max_lag=LENGTH)
    outcome = run(config, (cut, draft))
    assert all(expected[text] > 0 for text in frequencies(outcome))
    assert not outcome.log_evidence.isnan().any()
    assert outcome.num_all_zero > 0 or num_particles > 2
    if num_particles == 24:
        assert total_variation(outcome, expected) < 0.06


def test_a_group_that_dies_entirely_takes_exact_target_steps() -> None:
    """Disjoint supports: every draft is refused, and the output follows p exactly (error 1e-4)."""
    target, _ = languages()
    endless, over = target.logits.clone(), target.logits.clone()
    endless[:, EOS], over[:, :EOS] = -torch.inf, -torch.inf
    outcome = run(settings(4, 3, max_lag=LENGTH), (Language(endless), Language(over)))
    assert outcome.num_all_zero == outcome.num_rounds == (LENGTH - 1) * NUM_RUNS
    assert p_value(outcome, law([Language(endless)] * LENGTH)) > 1e-4
