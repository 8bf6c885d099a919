"""The law of the package's own rounds, with models that read their KV through the ledger.

Seeds are fixed, so a test passes always or never; error probabilities are those of correct code,
had they been drawn.
"""

from typing import Any

import pytest
import torch
from toy_laws import (
    EOS,
    LENGTH,
    NUM_RUNS,
    assert_properly_weighted,
    frequencies,
    languages,
    law,
    p_value,
    pairwise,
    run,
    total_variation,
    unstratified,
)
from toy_worker import Language

from sglang_smc.ops.interface import TORCH
from sglang_smc.options.server import RESAMPLING_METHODS, SMCConfig


def plain(num_particles: int, num_steps: int, **more: Any) -> SMCConfig:
    """The plain algorithm of the paper, which keeps what it drafts."""
    settings = {"evidence_threshold": 0.0, "max_lag": LENGTH, **more}
    return SMCConfig(num_particles=num_particles, num_steps=num_steps, **settings)


def draft_of(target: Language, kind: str) -> Language:
    """A draft that is near, one that ends texts at another rate, or one far off."""
    if kind == "hasty":
        return Language(target.logits + 1.5 * torch.eye(3)[EOS])
    return languages(difference=0.7 if kind == "near" else 1.2)[1]


@pytest.mark.parametrize(
    ("num_steps", "max_lag"), [(1, 1), (2, LENGTH), (2, 1), (4, LENGTH)], ids=str
)
def test_one_particle_follows_q_where_drafted_and_p_where_bonus(
    num_steps: int, max_lag: int
) -> None:
    """Error probability 1e-4 each; the slightest misreading of KV changes every context."""
    target, draft = languages()
    outcome = run(plain(1, num_steps, max_lag=max_lag), (target, draft))
    drawn_by = [target if t % (num_steps + 1) == 0 else draft for t in range(LENGTH)]
    assert p_value(outcome, law(drawn_by)) > 1e-4
    assert p_value(outcome, law([target] * LENGTH)) < 1e-9, "the test could not tell them apart"


@pytest.mark.parametrize("max_lag", [1, 3, LENGTH])
@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_draft_equal_to_target_is_exact(max_lag: int, resample_at: str) -> None:
    """Error probability 1e-4 each; exact evidence, since no mean weight ever leaves 1."""
    target, _ = languages()
    config = plain(4, 2, ess_threshold=1.0, resample_at=resample_at, max_lag=max_lag)
    outcome = run(config, (target, target))
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12
    # What lags is split in unequal parts.
    assert outcome.num_resampled == 0 or max_lag < LENGTH


@pytest.mark.parametrize(
    ("num_particles", "method", "ess_threshold", "num_steps", "max_lag", "kind_and_place"),
    pairwise(
        (1, 2, 3, 5, 8),
        RESAMPLING_METHODS,
        (0.0, 0.5, 0.9, 1.0),
        (1, 2, 3, 4),
        (1, 2, LENGTH),
        ("near block", "near token", "hasty block", "hasty token", "tempered block"),
    ),
)
def test_texts_are_properly_weighted(
    num_particles: int,
    method: str,
    ess_threshold: float,
    num_steps: int,
    max_lag: int,
    kind_and_place: str,
) -> None:
    """Red for a weight that is lost or counted twice, of a draft, a bonus token or an end; for a
    bonus token behind another particle than its own; for ancestors that do not follow weights.
    """
    kind, place = kind_and_place.split()
    target, _ = languages()
    settings: dict[str, Any] = {
        "resampling_method": method,
        "ess_threshold": ess_threshold,
        "max_lag": max_lag,
        "resample_at": place,
        "draft_temperature": 1.6 if kind == "tempered" else None,
    }
    draft = target if kind == "tempered" else draft_of(target, kind)
    outcome = run(plain(num_particles, num_steps, **settings), (target, draft))
    assert outcome.log_evidence.exp().std() > 0
    assert_properly_weighted(outcome, law([target] * LENGTH))
    if num_particles > 1 and ess_threshold == 1:
        assert outcome.num_resampled > NUM_RUNS / 2
    if num_particles > 1 and num_steps < 3:  # else a round or two are all there is
        assert (outcome.num_narrowed > 0) == (max_lag < LENGTH)
        assert outcome.num_emitted_early > 0 or max_lag == LENGTH


def test_siblings_that_share_their_noise_lower_the_variance_of_z_hat() -> None:
    """The same runs with and without; a variance has a relative error of about 5 % here."""
    spread, apart = (
        run(plain(4, 2), languages(), ops=ops, num_runs=3000)
        for ops in (TORCH, unstratified(TORCH))
    )
    assert_properly_weighted(spread, law([languages()[0]] * LENGTH))
    assert spread.log_evidence.exp().var() < 0.93 * apart.log_evidence.exp().var()


@pytest.mark.parametrize(
    ("num_particles", "resample_at"), [(1, "token"), (2, "block"), (16, "token")]
)
def test_tokens_that_the_target_never_says_never_come_out(
    num_particles: int, resample_at: str
) -> None:
    """q has mass where p has none: weight zero, and an exact target step where all die at once.

    With 16 particles noise makes a TV of about .07; one particle's law is .26 away.
    """
    target, draft = languages()
    least = target.logits.argmin(1, keepdim=True)
    cut = Language(target.logits.scatter(1, least, -torch.inf))
    expected = law([cut] * LENGTH)
    config = plain(num_particles, 3, ess_threshold=0.9, resample_at=resample_at)
    outcome = run(config, (cut, draft), num_runs=800)
    assert all(expected[text] > 0 for text in frequencies(outcome))
    assert not outcome.log_evidence.isnan().any()
    assert outcome.num_all_zero > 0 or num_particles > 2
    if num_particles == 16:
        assert total_variation(outcome, expected) < 0.12


def test_a_group_that_dies_entirely_takes_exact_target_steps() -> None:
    """Disjoint supports: every draft is refused, and the output follows p exactly (error 1e-4)."""
    target, _ = languages()
    endless, over = target.logits.clone(), target.logits.clone()
    endless[:, EOS], over[:, :EOS] = -torch.inf, -torch.inf
    outcome = run(plain(4, 3), (Language(endless), Language(over)))
    assert outcome.num_all_zero == outcome.num_rounds == (LENGTH - 1) * NUM_RUNS
    assert p_value(outcome, law([Language(endless)] * LENGTH)) > 1e-4
