"""What filters keep, kernel against reference; and how little it takes to draw from that."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sorted_law import ALL
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from sglang_smc.kernels import filters as kernel
from sglang_smc.ops.interface import Ops
from sglang_smc.tokens import filters
from sglang_smc.tokens.distribution import FilterKinds, SamplingRules, TokenDistribution

ROUNDING = 1e-6  # of a mass: within it of top-p, a token may be kept or not


def rules_of(*requests: tuple[float, int, float, float]) -> SamplingRules:
    """Temperature, top-k, top-p and min-p of each."""
    temperature, top_k, top_p, min_p = map(torch.tensor, zip(*requests, strict=True))
    return SamplingRules(temperature, top_k, top_p, min_p, top_k == 1)


def check_kept(logits: torch.Tensor, rules: SamplingRules, device: str) -> torch.Tensor:
    """Both keep the same tokens, ``[R, V]`` bool, but for those where top-p's mass is reached."""
    arguments = [tensor.to(device) for tensor in (logits, *rules[:4])]
    found = ~kernel.keep_tokens(*arguments).dropped(arguments[0]).cpu()
    kept = filters.keep_tokens(logits, *rules[:4])
    expected = ~kept.dropped(logits)
    each = len(logits) // len(rules.top_k)
    temperature, top_p = (rule.repeat_interleave(each) for rule in (rules[0], rules[2]))
    probs = (logits.double() / temperature.unsqueeze(1)).softmax(1)
    for row in (found != expected).any(1).nonzero().flatten().tolist():
        keys = ((kept.peak[row] - logits[row].float()) * kept.rate[row]).clamp_max(filters.NUM_KEYS)
        order = keys.floor().sort(stable=True).indices
        before = probs[row, order].cumsum(0) - probs[row, order]
        differs = (found[row] != expected[row])[order] & (logits[row, order] > -torch.inf)
        assert ((before[differs] - top_p[row]).abs() < ROUNDING).all(), row
    return found


asked_of = st.tuples(
    st.sampled_from([1e-3, 0.6, 1.0, 2.5, 1e3]),
    st.sampled_from([ALL, 1, 2, 9, 40, 100]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.0, 0.2, 1.0]),
)


@settings(max_examples=14, deadline=None, derandomize=True, database=None)
@given(
    requests=st.sampled_from([1, 3]).flatmap(lambda n: st.lists(asked_of, min_size=n, max_size=n)),
    vocab_size=st.sampled_from([1, 5, 16, 33, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 60.0]),
    forbidden=st.sampled_from([0.0, 0.3, 0.95]),
    seed=st.integers(0, 2**16),
)
def test_small_rows(
    requests: list[tuple[float, int, float, float]],
    vocab_size: int,
    dtype: torch.dtype,
    spread: float,
    forbidden: float,
    seed: int,
    device: str,
) -> None:
    """Ties, forbidden tokens and tiles, peaks; 7 tiles at most, the last of them not full."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=generator) * spread
    if seed % 2:
        logits = logits.round()
    banned = torch.rand(logits.shape, generator=generator) < forbidden
    banned[torch.arange(3), torch.randint(vocab_size, (3,), generator=generator)] = False
    logits = logits.masked_fill(banned, -torch.inf).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_TILE", 16)
        check_kept(logits, rules_of(*requests), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_real_vocabulary(dtype: torch.dtype, device: str) -> None:
    """Ties by the hundred at the cut, in bfloat16; every filter alone, and all together."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(6, 9001, generator=generator) * 3).to(dtype)
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
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    logits[0, 0], logits[1, 20], logits[2, 39], logits[3] = math.nan, math.inf, math.nan, -math.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_TILE", 16)
        found = check_kept(logits, rules_of((0.7, 5, 0.9, 0.1)), device)
    assert found[:4].all()
    assert (found[4:].sum(1) <= 5).all()


def test_rows_may_lie_apart_and_a_row_may_be_alone(device: str) -> None:
    wide = torch.randn(3, 60, generator=torch.Generator().manual_seed(3)).to(device)
    rules = [rule.to(device) for rule in rules_of((1.0, 4, 1.0, 0.0))[:4]]
    view = wide[1:2, :37]
    assert view.stride(0) == 60
    kept = kernel.keep_tokens(view, *rules)
    assert torch.equal(~kept.dropped(view), view >= view.topk(4).values[:, 3:])
    with pytest.raises(ValueError, match="must be 1"):
        kernel.keep_tokens(wide.t(), *rules)


class Trace(TorchDispatchMode):
    """Kernels that ran, torch calls that computed, and the most numbers that one made room for.

    What the kernels' interpreter does for itself does not count.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.num_kernels, self.num_calls, self.most = 0, 0, 0
        execute = GridExecutor.__call__

        def run_kernel(*args: Any, **kwargs: Any) -> None:
            before = self.num_calls, self.most
            execute(*args, **kwargs)
            self.num_calls, self.most = before
            self.num_kernels += 1

        patch.setattr(GridExecutor, "__call__", run_kernel)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, torch.Tensor):
            self.num_calls += "empty" not in func.overloadpacket.__name__
            self.most = max(self.most, result.numel())
        return result


@pytest.fixture
def trace(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    if device != "cpu":
        pytest.skip("kernels are counted in Triton's interpreter")
    yield Trace(monkeypatch)


VOCAB = 9000
LOGITS = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(4))


def test_filters_take_five_launches_and_no_tensor_of_the_logits_size(
    trace: Trace, kernels: Ops
) -> None:
    """16 KB a row of 128k: here 3 tiles of 32 digits."""
    rules = rules_of((0.6, 20, 0.95, 0.0))
    uniforms = torch.tensor([0.2, 0.7], dtype=torch.float64)
    with trace:
        law = TokenDistribution.of(kernels, LOGITS, rules, FilterKinds(True, False))
        assert trace.num_kernels == 5
        tokens, _ = law.sample(kernels, uniforms)
        assert trace.num_kernels == 7
        law.score(kernels, tokens)
        assert trace.num_kernels == 9 and not trace.num_calls
        raised, _ = law.to_power(kernels, torch.full((2,), 2.0, dtype=torch.float64))
        raised.at(torch.tensor([1, 0])).sample(kernels, uniforms)
    assert trace.most <= 2 * 3 * 32 < VOCAB


def test_greedy_requests_add_no_launch_and_no_tensor_of_the_logits_size(
    trace: Trace, kernels: Ops
) -> None:
    rules, uniforms = rules_of((0.6, 1, 1.0, 0.0)), torch.tensor([0.2, 0.7], dtype=torch.float64)
    found = []
    for kinds in (FilterKinds(False, False), FilterKinds(False, True)):
        with trace:
            law = TokenDistribution.of(kernels, LOGITS, rules, kinds)
            tokens, log_p = law.sample(kernels, uniforms)
            scores = law.score(kernels, tokens)
        found.append((trace.num_kernels, trace.num_calls))
    assert found == [(4, 0), (8, 0)]
    assert trace.most <= 6
    assert torch.equal(tokens, LOGITS[0].argmax(1)) and not log_p.any() and not scores.any()


def test_log_probabilities_of_all_tokens_are_the_one_tensor_of_that_size(
    trace: Trace, kernels: Ops
) -> None:
    rules = rules_of((0.6, 20, 0.95, 0.0))
    law = TokenDistribution.of(kernels, LOGITS, rules, FilterKinds(True, False))
    with trace:
        found = law.log_probs(kernels)
    assert trace.most == found.numel() and found.dtype == torch.float32
    assert not trace.num_calls and trace.num_kernels == 7
