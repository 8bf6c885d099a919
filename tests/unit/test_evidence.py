"""How many columns the evidence of a block covers."""

import math

import pytest
import torch

from sglang_smc.smc.evidence import covered_columns

INF = math.inf
ALMOST_ONE = math.nextafter(1.0, 0.0)


def covered(
    running: list[list[float]], threshold: float, coin: float, num_steps: int | None = None
) -> int:
    """For one group; ``running`` has a row for each column, the first before the block."""
    return int(
        covered_columns(
            torch.tensor([running], dtype=torch.float64),
            torch.tensor([threshold], dtype=torch.float64),
            torch.tensor([len(running) - 1 if num_steps is None else num_steps]),
            torch.tensor([coin], dtype=torch.float64),
        )
    )


FALLING = [[0.0, 0.0], [-1.0, -1.0], [-2.0, -2.0], [-3.0, -3.0]]


@pytest.mark.parametrize("coin", [0.0, 0.5, ALMOST_ONE])
def test_threshold_zero_keeps_all_that_lives(coin: float) -> None:
    assert covered(FALLING, 0.0, coin) == 3
    assert covered([[0.0, 0.0], [-900.0, -900.0], [-INF, -INF]], 0.0, coin) == 1
    assert covered([[0.0, 0.0], [-INF, 3.0], [-INF, -INF], [-INF, -INF]], 0.0, coin) == 1
    assert covered([[0.0, 0.0], [-INF, -INF]], 0.0, coin) == 0


@pytest.mark.parametrize("coin", [0.0, 0.5, ALMOST_ONE])
def test_an_infinite_threshold_keeps_none(coin: float) -> None:
    assert covered([[0.0], [700.0]], INF, coin) == 0


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0, INF])
def test_a_dead_column_is_never_kept(threshold: float) -> None:
    """Not even by the smallest coin."""
    assert covered([[0.0], [-INF]], threshold, 0.0) == 0


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_never_more_than_a_groups_own_columns(num_steps: int) -> None:
    assert covered(FALLING, 0.0, 0.5, num_steps) == num_steps


def test_the_most_columns_that_are_covered_though_one_before_is_not() -> None:
    running = [[0.0], [-5.0], [1.0], [-5.0]]
    assert covered(running, 1.0, 0.5) == 2


def test_evidence_is_what_the_block_multiplies_the_weights_by() -> None:
    """A group that brings log-weights along counts from there, not from zero."""
    for level in (-50.0, 0.0, 50.0):
        running = [[level, -INF], [level - 1.0, -INF]]
        assert covered(running, 1.0, math.exp(-1) - 1e-9) == 1
        assert covered(running, 1.0, math.exp(-1) + 1e-9) == 0
        assert covered(running, 0.5, 2 * math.exp(-1) - 1e-9) == 1
        assert covered(running, 0.5, 2 * math.exp(-1) + 1e-9) == 0


def test_absent_particles_do_not_dilute_the_evidence() -> None:
    assert covered([[0.0, 0.0, -INF], [-1.0, -1.0, -INF]], 1.0, 0.36) == 1


SIZE = 60_000


@pytest.mark.parametrize("num_particles", [1, 3])
def test_no_whole_block_is_kept_more_often_than_p_has_it(num_particles: int) -> None:
    """c = 1; each of 9 blocks at 4 standard errors. Keeping all would overdraw most of them by far.

    Of several chains one is drawn by weight.
    """
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    last = torch.zeros(SIZE, num_particles, dtype=torch.int64)
    running, blocks = [torch.zeros(SIZE, num_particles, dtype=torch.float64)], 0
    for step in range(2):
        context = last + step  # row 0 begins, rows 1 to 3 follow a token
        law = q[context]
        tokens = torch.multinomial(law.flatten(0, 1), 1, generator=generator).view_as(last)
        gained = p[context].log() - law.log()
        running.append(running[-1] + gained.gather(2, tokens.unsqueeze(2)).squeeze(2))
        blocks, last = blocks * 3 + tokens, tokens
    coins, draws = torch.rand(2, SIZE, generator=generator, dtype=torch.float64)
    kept = covered_columns(
        torch.stack(running, 1), torch.ones(SIZE).double(), torch.full((SIZE,), 2), coins
    )
    weights = running[-1].softmax(1).cumsum(1)
    winner = (weights < draws.unsqueeze(1)).sum(1).clamp_max(num_particles - 1)
    chosen = blocks.gather(1, winner.unsqueeze(1)).squeeze(1)
    found = torch.bincount(chosen[kept == 2], minlength=9) / SIZE
    expected = (p[0].unsqueeze(1) * p[1:4]).flatten()
    error = (expected * (1 - expected) / SIZE).sqrt()
    assert (found <= expected + 4 * error).all()
    everything = torch.bincount(chosen, minlength=9) / SIZE
    assert (everything > expected + 10 * error).any(), "the test could not tell them apart"
