"""Between exact and SMC: what the evidence threshold trades, on models that hardly agree.

Seeds are fixed; margins are several times the noise.
"""

import itertools
import math

import pytest
import torch
from toy_laws import EOS, LENGTH, NUM_CONTEXTS, VOCAB, languages, law, run, total_variation
from toy_worker import Language, Outcome

from sglang_smc.options.server import SMCConfig

NOISE = 0.08  # TV of texts that follow p, at this many runs, is about .055


def hard_pair() -> tuple[Language, Language]:
    """After every third text or so the draft likes least what the target likes most.

    No text ends before its limit.
    """
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(NUM_CONTEXTS, VOCAB, generator=generator) * 1.2
    nearly = logits + torch.randn(NUM_CONTEXTS, VOCAB, generator=generator) * 0.3
    is_hard = torch.rand(NUM_CONTEXTS, 1, generator=generator) < 0.35
    draft = torch.where(is_hard, -1.5 * logits, nearly)
    logits[:, EOS] = draft[:, EOS] = -torch.inf
    return Language(logits), Language(draft)


def distance(outcome: Outcome) -> float:
    return total_variation(outcome, law([hard_pair()[0]] * LENGTH))


def sweep(num_particles: int, thresholds: tuple[float, ...]) -> list[Outcome]:
    """What `mixed` says with each threshold; an infinite one is `exact`."""
    choices = [
        {"mode": "mixed", "evidence_threshold": threshold}
        if math.isfinite(threshold)
        else {"mode": "exact"}
        for threshold in thresholds
    ]
    sizes = {"num_particles": num_particles, "num_steps": LENGTH - 2}
    return [run(SMCConfig(**sizes, **chosen), hard_pair()) for chosen in choices]


@pytest.mark.parametrize("num_particles", [1, 4])
def test_a_higher_threshold_is_nearer_to_p_and_slower(num_particles: int) -> None:
    """A coin on the wrong side, or a threshold that divides where it multiplies, turns it round."""
    found = sweep(num_particles, (0.0, 0.25, 1.0, math.inf))
    distances = [distance(outcome) for outcome in found]
    speeds = [outcome.num_tokens / outcome.num_rounds for outcome in found]
    assert all(later < earlier - 0.1 for earlier, later in itertools.pairwise(distances))
    assert all(later < earlier - 0.1 for earlier, later in itertools.pairwise(speeds))
    assert speeds[0] == LENGTH - 1, "0 keeps every whole block"
    assert distances[2] < 0.5 * distances[0], "1 is much nearer than SMC with one lineage"
    assert distances[3] < NOISE


@pytest.mark.parametrize("num_particles", [1, 4])
def test_texts_that_end_early_are_neither_lost_nor_preferred(num_particles: int) -> None:
    """How often a text of p ends before its limit, at 5 standard errors where all is verified.

    Going on with the result that has more tokens would lose early ends.
    """
    target, draft = languages()
    logits = target.logits.clone()
    logits[:, EOS] += 1.0
    pair = Language(logits), Language(draft.logits + logits - target.logits)
    of_texts = law([pair[0]] * LENGTH)
    expected = sum(mass for text, mass in of_texts.items() if EOS in text[1:4])
    num_runs = 3000
    error = math.sqrt(expected * (1 - expected) / num_runs)
    sizes = {"num_particles": num_particles, "num_steps": LENGTH - 1}
    for chosen, margin in (
        ({"mode": "exact"}, 5 * error),
        ({"mode": "mixed", "evidence_threshold": 1.0}, 0.045),
    ):
        outputs = run(SMCConfig(**sizes, **chosen), pair, num_runs=num_runs).outputs
        found = float((outputs[:, 1:4] == EOS).any(1).double().mean())
        assert abs(found - expected) < margin


@pytest.mark.parametrize(("num_particles", "resample_at"), [(1, "token"), (4, "block")])
def test_smc_is_nearer_to_p_with_a_threshold_than_without(
    num_particles: int, resample_at: str
) -> None:
    """Where q misses the mass of p, equal weights of equally wrong drafts say nothing of it."""
    plain, covered = (
        run(
            SMCConfig(
                num_particles=num_particles,
                num_steps=LENGTH - 2,
                resample_at=resample_at,
                evidence_threshold=threshold,
            ),
            hard_pair(),
        )
        for threshold in (0.0, 1.0)
    )
    assert distance(covered) < 0.75 * distance(plain)
    assert covered.num_rounds > plain.num_rounds
