"""Between exact and SMC: what the evidence threshold trades, on models that hardly agree.

Seeds are fixed; margins are several times the noise. All on the pure functions.
"""

import itertools
import math

import pytest
import torch
from toy_smc import Pair, Runs, Setup, frequencies, random_logits, simulate, table, target_law

SIZE, VOCAB, EOS = 8_000, 3, 1
NOISE = 0.075  # TV of 729 texts that follow p, at this size, is about .06


def hard_pair() -> Pair:
    """At every third place or so the draft likes least what the target likes most."""
    logits = random_logits(6, VOCAB, 1.2, seed=5)
    nearly = logits + random_logits(6, VOCAB, 0.3, seed=6)
    is_hard = torch.rand(6, VOCAB, 1, generator=torch.Generator().manual_seed(7)) < 0.35
    return Pair(table(logits), table(torch.where(is_hard, -1.5 * logits, nearly)))


def total_variation(runs: Runs, eos: int = -1) -> float:
    found = frequencies(runs.outputs, VOCAB) / len(runs.outputs)
    return 0.5 * float((found - target_law(hard_pair(), eos)).abs().sum())


def sweep(mode: str, num_particles: int, thresholds: tuple[float, ...]) -> list[Runs]:
    setup = Setup(num_particles, 4, mode=mode)
    return [
        simulate(hard_pair(), setup._replace(evidence_threshold=threshold), SIZE, seed=1)
        for threshold in thresholds
    ]


@pytest.mark.parametrize("num_particles", [1, 4])
def test_a_higher_threshold_is_nearer_to_p_and_slower(num_particles: int) -> None:
    """A coin on the wrong side, or a threshold that divides where it multiplies, turns it round."""
    found = sweep("mixed", num_particles, (0.0, 0.25, 1.0, math.inf))
    distances = [total_variation(runs) for runs in found]
    speeds = [runs.num_tokens / runs.num_rounds for runs in found]
    assert all(later < earlier - 0.1 for earlier, later in itertools.pairwise(distances))
    assert all(later < earlier - 0.1 for earlier, later in itertools.pairwise(speeds))
    assert speeds[0] == 5.0, "0 keeps every whole block"
    assert distances[2] < 0.5 * distances[0], "1 is much nearer than SMC with one lineage"
    assert distances[3] < NOISE


@pytest.mark.parametrize("num_particles", [1, 4])
def test_texts_that_end_early_are_neither_lost_nor_preferred(num_particles: int) -> None:
    """How often a text of p ends before its limit, at 5 standard errors where all is verified.

    Going on with the result that has more tokens would lose early ends: by .06 at c = 1.
    """
    logits = random_logits(6, VOCAB, 1.0, seed=20)
    pair = Pair(table(logits), table(logits + random_logits(6, VOCAB, 0.7, seed=21)))
    law, texts = target_law(pair, EOS), itertools.product(range(VOCAB), repeat=6)
    expected = sum(float(law[text]) for text in texts if EOS in text[1:4])
    for threshold, margin in ((math.inf, 0.0175), (1.0, 0.035)):
        setup = Setup(num_particles, 5, eos=EOS, mode="mixed", evidence_threshold=threshold)
        outputs = simulate(pair, setup, SIZE, seed=3).outputs
        found = float((outputs[:, 1:4] == EOS).any(1).double().mean())
        assert abs(found - expected) < margin


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("num_particles", [1, 4])
def test_smc_is_nearer_to_p_with_a_threshold_than_without(
    num_particles: int, resample_at: str
) -> None:
    """Where q misses the mass of p, equal weights of equally wrong drafts say nothing of it."""
    setup = Setup(num_particles, 4, 0.5, resample_at)
    plain = simulate(hard_pair(), setup, SIZE, seed=1)
    covered = simulate(hard_pair(), setup._replace(evidence_threshold=1.0), SIZE, seed=1)
    assert total_variation(covered) < 0.75 * total_variation(plain)
    assert covered.num_rounds > plain.num_rounds
