"""How much of a block its evidence keeps, and whether a round goes on with that or verifies."""

import math
from typing import Any

import pytest
import torch

from sglang_smc.smc.verification import Kept, Verified, draw_block, keep
from sglang_smc.smc.weighing import covered_columns

NUM_STEPS = 4


def of_group(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize("num_particles", [1, 3])
def test_no_whole_block_is_kept_more_often_than_p_has_it(num_particles: int) -> None:
    """c = 1, by enumeration of all chains, of which one is drawn by weight."""
    generator = torch.Generator().manual_seed(0)
    laws = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64).mul(1.5).softmax(-1)
    # Of p and q: row 0 begins, rows 1 to 3 follow a token; nine blocks of two.
    firsts = laws[:, 0].repeat_interleave(3, 1)
    p, q = blocks = firsts * laws[:, 1:].flatten(1)
    chains = torch.cartesian_prod(*[torch.arange(9)] * num_particles).view(-1, num_particles)
    gained = [(of[0] / of[1]).log()[chains] for of in (torch.ones(2, 9), firsts, blocks)]
    coins = (torch.arange(200).double() + 0.5).repeat(len(chains)) / 200
    ones = torch.ones_like(coins)
    running = torch.stack(gained, 1).repeat_interleave(200, 0)
    kept = covered_columns(running, ones, 2 * ones.long(), coins) == 2
    drawn = q[chains].prod(1, keepdim=True) * gained[-1].softmax(1)
    found, everything = (
        torch.zeros(9).double().index_add(0, chains.flatten(), (drawn * share).flatten())
        for share in (kept.view(-1, 200).double().mean(1, keepdim=True), 1.0)
    )
    assert (found <= p + 1 / 200).all()
    assert (everything > p + 0.05).any(), "the test could not tell them apart"


# Increments of the chains, threshold, uniform, chains absent, columns before an end; what is found:
# covered, columns, winner, effective sample size.
THREE = math.log(3.0)


@pytest.mark.parametrize(("uniform", "winner"), [(0.0, 0), (math.nextafter(1.0, 0.0), 1)])
def test_an_absent_chain_is_not_drawn_whatever_stands_in_its_place(
    uniform: float, winner: int
) -> None:
    gained, c, coin, place = of_group([[0.0], [0.0], [50.0]], 1.0, 0.5, uniform)
    open_, present = torch.ones(1, 3, 1).bool(), torch.tensor([[True, True, False]])
    found = draw_block(gained, open_, present, torch.tensor([1]), c, coin, place)
    assert tuple(map(float, found)) == pytest.approx((1, 1, winner, 2.0))


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


@pytest.mark.parametrize(
    ("block", "by_block", "num_columns", "winner"),
    [
        ((3, 3, 2), True, 3, 0),
        *(((covered, covered, 2), False, 2, 1) for covered in (0, 1, 2)),
        # Counting tokens instead of columns would lose texts that end: on either side.
        ((4, 1, 3), True, 1, 0),  # a block whose winner ended after one token
        ((3, 3, 1, 0), False, 1, 1),  # a verified text that is complete
        ((3, 3, 1, 2), True, 3, 1),  # that end was not accepted
    ],
)
def test_what_reaches_further_is_kept(
    block: tuple[int, ...], by_block: bool, num_columns: int, winner: int
) -> None:
    """Behind a block the next token is drawn from p, in the row behind its winner's last."""
    result = chosen(*block)
    found = result.by_block, result.rejects, result.num_columns, result.winner, result.row
    row = winner * (NUM_STEPS + 1) + num_columns
    assert [int(one) for one in found] == [by_block, not by_block, num_columns, winner, row]


def test_the_ess_is_that_of_the_block_unless_no_block_may_be_kept() -> None:
    """Weights of an exact round say nothing of its output, so all particles count."""
    (values,) = of_group([[THREE], [0.0]])
    one = torch.ones(1, dtype=torch.int64)
    nothing = Verified(0 * one, 0 * one, one.bool(), 0 * one, torch.ones(1, 3))
    flags = torch.ones(1, 2, 1, dtype=torch.bool)
    scores = torch.cat([values, values], 2), torch.zeros(1, 2, 1)
    of_chains = flags, ~flags, flags[:, :, 0], one
    for threshold, ess in ((1.0, 16 / 10), (math.inf, 2.0)):
        numbers = threshold * one.double(), 0.5 * one.double(), 0.5 * one.double()
        assert keep(nothing, *scores, *of_chains, *numbers).ess.item() == pytest.approx(ess)
