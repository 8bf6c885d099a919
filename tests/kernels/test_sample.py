"""Draws and their probabilities, kernel against reference."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from drawn import drawn, some_banned

from sglang_smc.kernels import sample as kernel
from sglang_smc.smc import distribution
from sglang_smc.smc.filters import KeptTokens, keep_tokens

LARGEST = math.nextafter(1.0, 0.0)
ROUNDING = 1e-6  # of a cumulative probability: within it of a boundary, either token is right


def check_draws(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    rows: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    kept: KeptTokens | None = None,
) -> None:
    cuts = rows, greedy, kept
    (found, log_probs), (expected, _) = (
        [x.cpu() for x in module.sample_and_score(logits, temperature, uniforms, *cuts)]
        for module in (kernel, distribution)
    )
    scores = distribution.score_tokens(logits, temperature, found.to(logits.device), *cuts).cpu()
    assert (scores > -torch.inf).all(), "a token of probability zero was drawn"
    torch.testing.assert_close(log_probs, scores, rtol=1e-5, atol=1e-5)
    by_kernel = kernel.score_tokens(logits, temperature, found.to(logits.device), *cuts)
    torch.testing.assert_close(by_kernel.cpu(), scores, rtol=1e-5, atol=1e-5)

    law = distribution.log_probs(logits, temperature, *cuts).cpu()
    cumulative = torch.nn.functional.pad(law.double().exp().cumsum(1), (1, 0))  # [D, V + 1]
    cumulative, u = cumulative / cumulative[:, -1:], uniforms.cpu()

    def margin(tokens: torch.Tensor) -> torch.Tensor:
        """How far each uniform lies inside its token's share; below 0 outside."""
        low, high = (cumulative.gather(1, (tokens + i).unsqueeze(1)).squeeze(1) for i in (0, 1))
        return torch.minimum(u - low, high - u)

    assert torch.equal(found[margin(expected) > ROUNDING], expected[margin(expected) > ROUNDING])
    assert (margin(found) > -ROUNDING).all()
    check_laws(logits, temperature, *cuts)


def noise(size: int, generator: torch.Generator) -> torch.Tensor:
    """Uniforms, the extreme ones among them."""
    extreme = torch.tensor([0.0, LARGEST], dtype=torch.float64)
    return torch.cat([extreme, torch.rand(size, generator=generator, dtype=torch.float64)])[:size]


@drawn(
    10,
    vocab_size=[1, 2, 5, 31, 32, 33, 64, 100],
    dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64],
    spread=[0.0, 1.0, 8.0, 60.0],
    forbidden=[0.0, 0.3, 0.95],
    num_groups=[6, 3, 1],
    kind=["plain", "greedy", "filtered", "both"],
)
def test_small_rows(c: Any, device: str) -> None:
    """Ties (spread 0, whole numbers), forbidden tokens and tiles, peaks; 4 tiles and more.

    A group has one temperature, and what filters it, for all of its rows.
    """
    generator = torch.Generator().manual_seed(c.seed)
    logits = (torch.randn(6, c.vocab_size, generator=generator) * c.spread).round()
    logits = some_banned(logits, c.forbidden, generator).to(device, c.dtype)
    uniforms = noise(6, generator).to(device)

    def of_groups(*values: float) -> torch.Tensor:
        return torch.tensor(values)[: c.num_groups].to(device)

    temperature = of_groups(0.01, 0.3, 0.7, 1.0, 1.7, 50.0)
    greedy, kept = None, None
    if c.kind in ("greedy", "both"):
        greedy = of_groups(True, False, False, True, False, True)
    if c.kind in ("filtered", "both"):
        top_k, top_p = of_groups(40, 9, 1 << 30, 1, 12, 2), of_groups(0.9, 0.99, 0.5, 1, 1, 0.7)
        kept = keep_tokens(logits, temperature, top_k, top_p, (1 - top_p) / 2)
    with mock.patch.object(kernel, "_TILE", 16):
        check_draws(logits, temperature, uniforms, None, greedy, kept)


def check_laws(logits: torch.Tensor, temperature: torch.Tensor, *cuts: Any) -> None:
    """The log-probabilities of all tokens, and what they are divided by."""
    for name, rounding in (("log_probs", 1e-5), ("log_sums", 1e-6)):
        found, expected = (
            getattr(module, name)(logits, temperature, *cuts) for module in (kernel, distribution)
        )
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)


def test_greedy_groups_take_the_first_of_the_largest_at_any_temperature(device: str) -> None:
    """Across tiles; where division would make equals of unequal ones, too."""
    logits = torch.zeros(4, 9000)
    logits[0, [8000, 5000, 4999]] = 3.0
    logits[1, 8999] = 1.0 + 2**-23
    logits[1, 17] = 1.0
    logits[2] = -torch.inf
    logits[2, 4321] = -7.0
    logits[3, :100] = -1.0
    logits, greedy = logits.to(device), torch.ones(4, dtype=torch.bool, device=device)
    temperature = torch.tensor([1e-30, 3.0, 1.0, 1e30], device=device)
    uniforms = noise(4, torch.Generator().manual_seed(1)).to(device)
    for module in (kernel, distribution):
        tokens, log_probs = module.sample_and_score(logits, temperature, uniforms, None, greedy)
        assert tokens.tolist() == [4999, 8999, 4321, 100]
        assert log_probs.tolist() == [0.0] * 4
        others = tokens.roll(1)
        scores = module.score_tokens(logits, temperature, others, None, greedy)
        assert scores.tolist() == [-torch.inf] * 4
        assert not module.log_sums(logits, temperature, None, greedy).any()
    check_laws(logits, temperature, None, greedy)


def test_a_tile_far_below_the_others_is_drawn_from_right(device: str) -> None:
    """Its masses relative to the row's largest logit are not numbers of float32."""
    logits = torch.full((2, 8192), -torch.inf)
    logits[:, 5000:5004] = torch.tensor([-400.0, -401.0, -402.0, -403.0])
    logits[0, 7] = 0.0
    uniforms = torch.tensor([LARGEST, 0.9], dtype=torch.float64, device=device)
    check_draws(logits.to(device), torch.ones(2, device=device), uniforms)


@pytest.mark.parametrize("vocab_size", [7, 4096, 9000])
def test_rows_without_a_law_give_token_0_and_nan_and_spoil_no_other(
    vocab_size: int, device: str
) -> None:
    """NaN, infinities and nothing but forbidden tokens, at either end and in a tile between."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(12, vocab_size, generator=generator)
    for row, place in enumerate((0, vocab_size // 2, vocab_size - 1)):
        logits[1 + 3 * row, place] = math.nan
        logits[2 + 3 * row, place] = torch.inf
    logits[10] = -torch.inf
    logits[11, :] = math.nan
    broken = [1, 2, 4, 5, 7, 8, 10, 11]
    whole = [row for row in range(12) if row not in broken]
    temperature = torch.linspace(0.5, 2.0, 12).to(device)
    uniforms = noise(12, generator).to(device)
    logits = logits.to(device)
    greedy = (torch.arange(12) % 5 == 4).to(device)
    filters = torch.full((12,), 3, device=device), torch.full((12,), 0.8, device=device)
    kept = keep_tokens(logits, temperature, *filters, torch.zeros(12, device=device))
    last = torch.full((12,), vocab_size - 1, device=device)
    for module in (kernel, distribution):
        for cuts in ((None, None, None), (None, greedy, None), (None, greedy, kept)):
            tokens, log_probs = module.sample_and_score(logits, temperature, uniforms, *cuts)
            assert tokens[broken].tolist() == [0] * len(broken)
            assert log_probs[broken].isnan().all()
            assert log_probs[whole].isfinite().all()
            scores = module.score_tokens(logits, temperature, last, *cuts)
            assert scores.isnan().nonzero().flatten().tolist() == broken
            every = module.log_probs(logits, temperature, *cuts)
            assert every.isnan().all(1).nonzero().flatten().tolist() == broken
            assert not every[whole].isnan().any()
            sums = module.log_sums(logits, temperature, *cuts)
            assert sums.isnan().nonzero().flatten().tolist() == broken
    check_draws(logits[whole], temperature[whole], uniforms[whole])


def test_draws_choose_their_rows(device: str) -> None:
    """Rows may come twice or never; temperatures and uniforms belong to the draws."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 60, generator=generator).to(device)[:, :40]  # rows lie apart
    rows = torch.tensor([4, 0, 0, 3, 4, 1, 4], device=device)
    temperature = torch.linspace(0.3, 2.0, 7, device=device)
    check_draws(logits, temperature, noise(7, generator).to(device), rows)
    # Of one group there may be more draws than rows, each with what is kept of its own row.
    one = temperature[:1], *(torch.tensor([x], device=device) for x in (6, 0.8, 0.0))
    kept = keep_tokens(logits, *one)
    check_draws(logits, temperature[:1], noise(7, generator).to(device), rows, None, kept)
    with pytest.raises(ValueError, match="must be 1"):
        kernel.score_tokens(logits.t(), temperature[:1], rows)


def test_rows_are_added_up_once_for_all_draws(device: str) -> None:
    """To the last bit as where each draw adds up its row; two groups of three rows."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 9000, generator=generator).to(device)
    temperature = torch.tensor([0.7, 1.5], device=device)
    rows = torch.tensor([2, 0, 2, 5, 3, 3], device=device)
    uniforms, tokens = noise(6, generator).to(device), torch.arange(6, device=device)
    greedy = torch.tensor([False, True], device=device)
    filters = (torch.full((2,), x, device=device) for x in (50, 0.9, 0.0))
    kept = keep_tokens(logits, temperature, *filters)
    for cuts in ((None, None), (greedy, None), (greedy, kept)):
        sums = kernel.row_sums(logits, temperature, *cuts)
        for run, more in (
            (kernel.sample_and_score, (uniforms,)),
            (kernel.score_tokens, (tokens,)),
            (kernel.log_probs, ()),
            (kernel.log_sums, ()),
        ):
            of_rows = logits, temperature, *more, rows, *cuts
            torch.testing.assert_close(run(*of_rows, sums), run(*of_rows), rtol=0, atol=0)
