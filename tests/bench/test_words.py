"""The study of a discouraged word: what it compares."""

import math

import pytest
from words.run import WEIGHT, Counted, N, rows_of


def counted(index: int, sample: int, words: int) -> Counted:
    return Counted(index, {}, [5], sample, words)


def test_particles_are_compared_with_weighted_samples_of_the_same_prompts() -> None:
    """Half of the plain samples use the word once; particles never do, or always."""
    plain = [counted(i, sample, sample % 2) for i in (0, 1) for sample in range(4 * N)]
    steered = [counted(i, sample, i) for i in (0, 1) for sample in range(N // 4)]
    rows = rows_of(plain, steered)
    weighted = math.exp(WEIGHT) / (1 + math.exp(WEIGHT))
    assert [row.words.mean for row in rows] == pytest.approx([0.5, weighted, 0.5, weighted])
    assert rows[2].from_steered.mean == pytest.approx(0.5 - weighted)
    assert rows[3].from_steered is None
