"""Which of two results a round goes on with: the block's by its evidence, or the verified one."""

import math

import pytest
import torch

from sglang_smc.smc.exact import Verified
from sglang_smc.smc.mixed import Block, Kept, judge, keep

NUM_STEPS = 4


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


def chosen(covered: int, kept: int, verified: int, ends_at: int | None = None) -> Kept:
    """The block has chain 0, verification chain 1, whose text ends with token ``ends_at``.

    Chain 0 ends where fewer columns are ``kept`` than ``covered``.
    """
    one = torch.ones(1, dtype=torch.int64)
    ends = torch.zeros(1, 2, NUM_STEPS, dtype=torch.bool)
    if kept < covered:
        ends[0, 0, kept - 1] = True
    if ends_at is not None:
        ends[0, 1, ends_at] = True
    before_end = ends.cumsum(2) == ends
    log_p = torch.zeros(1, 2, NUM_STEPS + 1)
    log_p[0, :, covered:] = -torch.inf  # so the evidence covers no more
    if kept < covered:
        log_p[0, 1, kept:] = -torch.inf  # and chain 0 is drawn
    return keep(
        Verified(verified * one, one, one.bool(), 0 * one, torch.ones(1, 3)),
        log_p,
        torch.zeros(1, 2, NUM_STEPS),
        before_end,
        ends,
        torch.ones(1, 2, dtype=torch.bool),
        NUM_STEPS * one,
        one.double(),
        0.4 * one.double(),
        0.0 * one.double(),
    )


def test_the_block_where_it_reaches_further() -> None:
    result = chosen(3, 3, 2)
    assert result.by_block
    assert (int(result.num_columns), int(result.winner)) == (3, 0)
    assert result.row == 3 and not result.rejects, "from p, behind its own last"


@pytest.mark.parametrize("covered", [0, 1, 2])
def test_verification_where_it_reaches_as_far(covered: int) -> None:
    result = chosen(covered, covered, 2)
    assert not result.by_block
    assert (int(result.num_columns), int(result.winner)) == (2, 1)
    assert result.row == NUM_STEPS + 1 + 2 and result.rejects


def test_an_early_end_is_no_reason_to_be_passed_over() -> None:
    """Counting tokens instead of columns would lose texts that end: on either side."""
    result = chosen(4, 1, 3)
    assert result.by_block and result.num_columns == 1, "a block whose winner ended after one token"
    result = chosen(3, 3, 1, ends_at=0)
    assert not result.by_block and result.num_columns == 1, "a verified text that is complete"
    assert chosen(3, 3, 1, ends_at=2).by_block, "that end was not accepted"


def test_the_ess_is_that_of_the_block_unless_no_block_may_be_kept() -> None:
    """Weights of an exact round say nothing of its output, so all particles count."""
    values = one_group([[math.log(3.0)], [0.0]])
    one = torch.ones(1, dtype=torch.int64)
    nothing = Verified(0 * one, 0 * one, one.bool(), 0 * one, torch.ones(1, 3))
    flags = torch.ones(1, 2, 1, dtype=torch.bool)
    scores = torch.cat([values, values], 2), torch.zeros(1, 2, 1)
    of_chains = flags, ~flags, flags[:, :, 0], one
    for threshold, ess in ((1.0, 16 / 10), (math.inf, 2.0)):
        numbers = threshold * one.double(), 0.5 * one.double(), 0.5 * one.double()
        assert keep(nothing, *scores, *of_chains, *numbers).ess.item() == pytest.approx(ess)
