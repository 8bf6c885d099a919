"""Which of two results a round goes on with: the block's by its evidence, or the verified one."""

import math

import pytest
import torch

from sglang_smc.smc.exact import Verified
from sglang_smc.smc.mixed import Block, judge, longer

NUM_STEPS, VOCAB = 4, 3


def one_group(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def judged(
    increments: list[list[float]],
    threshold: float,
    *,
    before_end: list[list[int]] | None = None,
    coin: float = 0.5,
    uniform: float = 0.0,
    absent: int = 0,
) -> Block:
    size, num_steps = len(increments), len(increments[0])
    present = torch.arange(size) < size - absent
    opened = torch.ones(1, size, num_steps) if before_end is None else torch.tensor([before_end])
    return judge(
        one_group(increments),
        opened.bool(),
        present.unsqueeze(0),
        torch.tensor([num_steps]),
        torch.tensor([threshold], dtype=torch.float64),
        torch.tensor([coin], dtype=torch.float64),
        torch.tensor([uniform], dtype=torch.float64),
    )


def test_threshold_zero_keeps_the_whole_block() -> None:
    found = judged([[-3.0] * 4, [-9.0] * 4], 0.0)
    assert (int(found.covered), int(found.num_columns)) == (4, 4)


def test_an_infinite_threshold_keeps_nothing_of_it() -> None:
    found = judged([[3.0] * 4, [9.0] * 4], math.inf)
    assert (int(found.covered), int(found.num_columns)) == (0, 0)


@pytest.mark.parametrize(("uniform", "winner"), [(0.2, 0), (0.3, 1), (0.99, 1)])
def test_the_chain_is_drawn_by_weight_where_the_block_is_cut(uniform: float, winner: int) -> None:
    """Weights 1 to 3 at the cut; behind it, where the coin does not reach, all would go to one."""
    increments = [[0.0, -50.0], [math.log(3), -50.0]]
    assert judged(increments, 1.0, uniform=uniform).winner == winner


def test_a_chain_that_ends_keeps_its_columns_up_to_the_end_and_its_weight() -> None:
    found = judged([[0.0, 9.0, 9.0]], 1.0, before_end=[[1, 0, 0]])
    assert (int(found.covered), int(found.num_columns)) == (3, 1)
    assert found.ess == 1.0


def test_absent_chains_are_never_drawn_and_do_not_count() -> None:
    for uniform in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        found = judged([[0.0], [0.0], [50.0]], 1.0, uniform=uniform, absent=1)
        assert found.winner < 2
        assert found.ess == 2.0


def log_p_with_marks() -> torch.Tensor:
    """``[1, 2, K + 1, V]`` that tells chain and column: token 0 has .1 * chain + .01 * column."""
    mass = 0.1 * torch.arange(2).view(2, 1) + 0.01 * torch.arange(NUM_STEPS + 1) + 0.05
    return torch.stack([mass, 1 - mass, torch.zeros_like(mass)], dim=2).log().unsqueeze(0)


NEXT = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)


def chosen(
    covered: int, kept: int, verified: int, ends_at: int | None = None
) -> tuple[Verified, bool]:
    """The block has chain 0, verification chain 1, whose text ends with token ``ends_at``."""
    one = torch.ones(1, dtype=torch.int64)
    block = Block(covered * one, kept * one, 0 * one, one.double())
    ends = torch.zeros(1, 2, NUM_STEPS, dtype=torch.bool)
    if ends_at is not None:
        ends[0, 1, ends_at] = True
    found = Verified(verified * one, one, NEXT)
    result, by_block = longer(block, found, log_p_with_marks(), ends, NUM_STEPS * one)
    return result, bool(by_block)


def test_the_block_where_it_reaches_further() -> None:
    result, by_block = chosen(3, 3, 2)
    assert by_block
    assert (int(result.num_columns), int(result.winner)) == (3, 0)
    assert result.next_probs[0, 0].item() == pytest.approx(0.05 + 0.03), "p behind its own last"


@pytest.mark.parametrize("covered", [0, 1, 2])
def test_verification_where_it_reaches_as_far(covered: int) -> None:
    result, by_block = chosen(covered, covered, 2)
    assert not by_block
    assert (int(result.num_columns), int(result.winner)) == (2, 1)
    assert torch.equal(result.next_probs, NEXT)


def test_an_early_end_is_no_reason_to_be_passed_over() -> None:
    """Counting tokens instead of columns would lose texts that end: on either side."""
    result, by_block = chosen(4, 1, 3)
    assert by_block and result.num_columns == 1, "a block whose winner ended after one token"
    result, by_block = chosen(3, 3, 1, ends_at=0)
    assert not by_block and result.num_columns == 1, "a verified text that is complete"
    assert chosen(3, 3, 1, ends_at=2)[1], "that end was not accepted"
