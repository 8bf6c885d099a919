"""Draws and their probabilities, kernel against reference."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from drawn import Case, drawn

from sglang_smc.kernels import sample as kernel
from sglang_smc.ops.triton_ops import KernelDistribution
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.filters import keep_tokens

LARGEST = math.nextafter(1.0, 0.0)
KINDS = KernelDistribution, TokenDistribution
ROUNDING = 1e-6  # of a cumulative probability: within it of a boundary, either token is right


def check_draws(uniforms: torch.Tensor, *of: Any) -> None:
    """Draw from distributions of these fields."""
    by_kernel, by_torch = (kind(*of) for kind in KINDS)
    (found, log_probs), (expected, _) = (
        [x.cpu() for x in law.sample(uniforms)] for law in (by_kernel, by_torch)
    )
    scores = by_torch.score(found.to(uniforms.device)).cpu()
    assert (scores > -torch.inf).all(), "a token of probability zero was drawn"
    torch.testing.assert_close(log_probs, scores, rtol=1e-5, atol=1e-5)
    its = by_kernel.score(found.to(uniforms.device)).cpu()
    torch.testing.assert_close(its, scores, rtol=1e-5, atol=1e-5)

    every = by_torch.log_probs().cpu()
    cumulative = torch.nn.functional.pad(every.double().exp().cumsum(1), (1, 0))  # [D, V + 1]
    cumulative = cumulative / cumulative[:, -1:]
    u = uniforms.cpu()

    def margin(tokens: torch.Tensor) -> torch.Tensor:
        """How far each uniform lies inside its token's share; below 0 outside."""
        low, high = (cumulative.gather(1, (tokens + i).unsqueeze(1)).squeeze(1) for i in (0, 1))
        return torch.minimum(u - low, high - u)

    assert torch.equal(found[margin(expected) > ROUNDING], expected[margin(expected) > ROUNDING])
    assert (margin(found) > -ROUNDING).all()
    check_laws(*of)


def noise(c: Case, size: int) -> torch.Tensor:
    """Uniforms, the extreme ones among them."""
    extreme = torch.tensor([0.0, LARGEST], dtype=torch.float64)
    return torch.cat([extreme, c.uniforms(size)])[:size]


@drawn(
    10,
    vocab_size=[1, 2, 5, 31, 32, 33, 64, 100],
    dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64],
    spread=[0.0, 1.0, 8.0, 60.0],
    forbidden=[0.0, 0.3, 0.95],
    num_groups=[6, 3, 1],
    kind=["plain", "greedy", "filtered", "both"],
)
def test_small_rows(c: Case, device: str) -> None:
    """Ties (spread 0, whole numbers), forbidden tokens and tiles, peaks; 4 tiles and more."""
    logits = c.logits(6, c.vocab_size, spread=c.spread, forbidden=c.forbidden).round()
    logits = logits.to(device, c.dtype)
    uniforms = noise(c, 6).to(device)

    def of_groups(*values: float) -> torch.Tensor:
        return torch.tensor(values)[: c.num_groups].to(device)

    temperature = of_groups(0.01, 0.3, 0.7, 1.0, 1.7, 50.0)
    greedy = None
    kept = None
    if c.kind in ("greedy", "both"):
        greedy = of_groups(True, False, False, True, False, True)
    if c.kind in ("filtered", "both"):
        top_k = of_groups(40, 9, 1 << 30, 1, 12, 2)
        top_p = of_groups(0.9, 0.99, 0.5, 1, 1, 0.7)
        kept = keep_tokens(logits, temperature, top_k, top_p, (1 - top_p) / 2)
    with mock.patch.object(kernel, "_TILE", 16):
        check_draws(uniforms, logits, temperature, None, None, greedy, kept)


def check_laws(*of: Any) -> None:
    """The log-probabilities of all tokens, and what they are divided by."""
    for name, rounding in (("log_probs", 1e-5), ("log_sums", 1e-6)):
        found, expected = (getattr(kind(*of), name)() for kind in KINDS)
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
    logits = logits.to(device)
    greedy = torch.ones(4, dtype=torch.bool, device=device)
    temperature = torch.tensor([1e-30, 3.0, 1.0, 1e30], device=device)
    uniforms = noise(Case(seed=1), 4).to(device)
    for kind in KINDS:
        law = kind(logits, temperature, greedy=greedy)
        tokens, log_probs = law.sample(uniforms)
        assert tokens.tolist() == [4999, 8999, 4321, 100]
        assert log_probs.tolist() == [0.0] * 4
        assert law.score(tokens.roll(1)).tolist() == [-torch.inf] * 4
        assert not law.log_sums().any()
    check_laws(logits, temperature, None, None, greedy)


def test_a_tile_far_below_the_others_is_drawn_from_right(device: str) -> None:
    """Its masses relative to the row's largest logit are not numbers of float32."""
    logits = torch.full((2, 8192), -torch.inf)
    logits[:, 5000:5004] = torch.tensor([-400.0, -401.0, -402.0, -403.0])
    logits[0, 7] = 0.0
    uniforms = torch.tensor([LARGEST, 0.9], dtype=torch.float64, device=device)
    check_draws(uniforms, logits.to(device), torch.ones(2, device=device))


@pytest.mark.parametrize("vocab_size", [7, 4096, 9000])
def test_rows_without_law_give_token_0_and_nan_and_spoil_none(vocab_size: int, device: str) -> None:
    """NaN, infinities and nothing but forbidden tokens, at either end and in a tile between."""
    c = Case(seed=vocab_size)
    logits = c.normal(12, vocab_size)
    for row, place in enumerate((0, vocab_size // 2, vocab_size - 1)):
        logits[1 + 3 * row, place] = math.nan
        logits[2 + 3 * row, place] = torch.inf
    logits[10] = -torch.inf
    logits[11, :] = math.nan
    broken = [1, 2, 4, 5, 7, 8, 10, 11]
    whole = [row for row in range(12) if row not in broken]
    temperature = torch.linspace(0.5, 2.0, 12).to(device)
    uniforms = noise(c, 12).to(device)
    logits = logits.to(device)
    greedy = (torch.arange(12) % 5 == 4).to(device)
    filters = torch.full((12,), 3, device=device), torch.full((12,), 0.8, device=device)
    kept = keep_tokens(logits, temperature, *filters, torch.zeros(12, device=device))
    last = torch.full((12,), vocab_size - 1, device=device)
    for kind in KINDS:
        for cuts in ((None, None), (greedy, None), (greedy, kept)):
            law = kind(logits, temperature, None, None, *cuts)
            tokens, log_probs = law.sample(uniforms)
            assert not tokens[broken].any()
            assert log_probs[whole].isfinite().all()
            every = law.log_probs()
            assert every[broken].isnan().all() and not every[whole].isnan().any()
            for values in (log_probs, law.score(last), law.log_sums()):
                assert values.isnan().nonzero().flatten().tolist() == broken
    check_draws(uniforms[whole], logits[whole], temperature[whole])


def test_draws_choose_their_rows(device: str) -> None:
    """Rows may come twice or never; temperatures and uniforms belong to the draws."""
    c = Case(seed=3)
    logits = c.normal(5, 60).to(device)[:, :40]  # rows lie apart
    rows = torch.tensor([4, 0, 0, 3, 4, 1, 4], device=device)
    temperature = torch.linspace(0.3, 2.0, 7, device=device)
    check_draws(noise(c, 7).to(device), logits, temperature, rows)
    # Of one group there may be more draws than rows, each with what is kept of its own row.
    one = temperature[:1], *(torch.tensor([x], device=device) for x in (6, 0.8, 0.0))
    kept = keep_tokens(logits, *one)
    of = logits, temperature[:1], rows, None, None, kept
    check_draws(noise(c, 7).to(device), *of)
    with pytest.raises(ValueError, match="must be 1"):
        KernelDistribution(logits.t(), temperature[:1]).score(rows)


def test_rows_are_added_up_once_for_all_draws(device: str) -> None:
    """To the last bit as where each draw adds up its row; two groups of three rows."""
    c = Case(seed=7)
    logits = c.normal(6, 9000).to(device)
    temperature = torch.tensor([0.7, 1.5], device=device)
    rows = torch.tensor([2, 0, 2, 5, 3, 3], device=device)
    uniforms = noise(c, 6).to(device)
    tokens = torch.arange(6, device=device)
    greedy = torch.tensor([False, True], device=device)
    filters = (torch.full((2,), x, device=device) for x in (50, 0.9, 0.0))
    kept = keep_tokens(logits, temperature, *filters)
    for cuts in ((None, None), (greedy, None), (greedy, kept)):
        law = KernelDistribution(logits, temperature, None, None, *cuts)
        summed = law.summed()._replace(rows=rows)
        each = law._replace(rows=rows)
        found, expected = (
            (*law.sample(uniforms), law.score(tokens), law.log_probs(), law.log_sums())
            for law in (summed, each)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
