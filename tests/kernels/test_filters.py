"""What filters keep, kernel against reference."""

import math
from unittest import mock

import pytest
import torch
from drawn import Case, drawn
from hypothesis import strategies as st
from laws import ALL, SamplingRules

from sglang_smc.kernels import sample as kernel
from sglang_smc.ops.triton_ops import KernelDistribution
from sglang_smc.smc import filters
from sglang_smc.smc.distribution import TokenDistribution

KINDS = KernelDistribution, TokenDistribution
ROUNDING = 1e-6  # of a mass: within it of top-p, a token may be kept or not


def rules_of(*requests: tuple[float, int, float, float]) -> SamplingRules:
    """Temperature, top-k, top-p and min-p of each."""
    temperature, top_k, top_p, min_p = map(torch.tensor, zip(*requests, strict=True))
    return SamplingRules(temperature, top_k, top_p, min_p, top_k == 1)


def check_kept(logits: torch.Tensor, rules: SamplingRules, device: str) -> torch.Tensor:
    """Both keep the same tokens, ``[R, V]`` bool, but for those where top-p's mass is reached.

    In rows of the same tokens they have the same law, and draw the same.
    """
    on_device = logits.to(device)
    temperature, top_k, top_p, min_p = (rule.to(device) for rule in rules[:4])
    laws = [kind(on_device, temperature).filtered(top_k, top_p, min_p) for kind in KINDS]
    kept = [law.kept for law in laws if law.kept is not None]
    found, expected = (~one.dropped(on_device).cpu() for one in kept)
    each = len(logits) // len(rules.top_k)
    temperature, top_p = (rule.repeat_interleave(each) for rule in (rules[0], rules[2]))
    scaled = (logits.float() / temperature.unsqueeze(1)).double()
    unit = filters.unit_of(temperature, top_p, logits.shape[1])
    top = (logits.float().amax(1) * unit).floor()
    keys = filters.keys_of(logits.float(), top, unit)
    is_same = (found == expected).all(1)
    for row in (~is_same).nonzero().flatten().tolist():
        order = keys[row].sort(stable=True).indices
        probs = scaled[row].softmax(0)[order]
        before = probs.cumsum(0) - probs
        differs = (found[row] != expected[row])[order] & (logits[row, order] > -torch.inf)
        assert ((before[differs] - top_p[row]).abs() < ROUNDING).all(), row
    uniforms = torch.linspace(0.03, 0.97, len(logits), dtype=torch.float64, device=device)
    tokens, expected_tokens = (law.sample(uniforms)[0].cpu()[is_same] for law in laws)
    assert torch.equal(tokens, expected_tokens)
    for name, rounding in (("log_sums", 1e-6), ("log_probs", 1e-5)):
        log, expected_log = (getattr(law, name)().cpu()[is_same] for law in laws)
        torch.testing.assert_close(log, expected_log, rtol=rounding, atol=rounding, equal_nan=True)
    return found


asked_of = st.tuples(
    st.sampled_from([1e-3, 0.6, 1.0, 2.5, 1e3]),
    st.sampled_from([ALL, 1, 2, 9, 40, 100]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.0, 0.2, 1.0]),
)


@drawn(
    10,
    requests=st.sampled_from([1, 3]).flatmap(lambda n: st.lists(asked_of, min_size=n, max_size=n)),
    vocab_size=[1, 5, 64, 256, 257, 1000],
    dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64],
    spread=[0.0, 1.0, 8.0, 60.0],
    forbidden=[0.0, 0.3, 0.95],
)
def test_small_rows(c: Case, device: str) -> None:
    """Ties, forbidden tokens and tiles, peaks; 4 tiles at most, the last of them not full."""
    logits = c.logits(3, c.vocab_size, spread=c.spread, forbidden=c.forbidden)
    logits = (logits.round() if c.seed % 2 else logits).to(c.dtype)
    with mock.patch.object(kernel, "_TILE", 256):
        check_kept(logits, rules_of(*c.requests), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_real_vocabulary(dtype: torch.dtype, device: str) -> None:
    """Ties by the hundred at the cut, in bfloat16; every filter alone, and all together."""
    logits = (Case(seed=1).normal(6, 9001) * 3).to(dtype)
    asked = (
        (1.0, 700, 1.0, 0.0),
        (0.6, ALL, 0.9, 0.0),
        (1.0, ALL, 1.0, 0.05),
        (0.6, 20, 0.95, 0.01),
        (1.0, 9001, 1.0, 0.0),
        (5.0, ALL, 0.999, 0.0),
    )
    found = check_kept(logits, rules_of(*asked), device)
    assert found.sum(1)[[0, 4]].tolist() == [700, 9001]
    assert 1 < found[3].sum() <= 20


def test_rows_without_a_law_are_not_cut_and_spoil_no_other(device: str) -> None:
    """NaN and infinities in the first, a middle and the last of three tiles."""
    logits = Case(seed=2).normal(6, 600)
    logits[0, 0] = logits[2, 599] = math.nan
    logits[1, 300] = math.inf
    logits[3] = -math.inf
    with mock.patch.object(kernel, "_TILE", 256):
        found = check_kept(logits, rules_of((0.7, 5, 0.9, 0.1)), device)
    assert found[:4].all()
    assert (found[4:].sum(1) <= 5).all()


def test_rows_may_lie_apart_and_a_row_may_be_alone(device: str) -> None:
    wide = Case(seed=3).normal(3, 60).to(device)
    rules = [rule.to(device) for rule in rules_of((1.0, 4, 1.0, 0.0))[:4]]
    view = wide[1:2, :37]
    assert view.stride(0) == 60
    temperature, *limits = rules
    kept = KernelDistribution(view, temperature).filtered(*limits).kept
    assert kept is not None and torch.equal(~kept.dropped(view), view >= view.topk(4).values[:, 3:])
    with pytest.raises(ValueError, match="must be 1"):
        KernelDistribution(wide.t(), temperature).filtered(*limits)
