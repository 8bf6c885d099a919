"""What is watched, kernel against reference: rows, tokens, moments, and who is left alone."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.kernels import watch as kernel
from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.smc import fidelity
from sglang_smc.state.transfer import each_tensor
from sglang_smc.tokens.distribution import FilterKinds, SamplingRules, TokenDistribution


class Case(NamedTuple):
    sums: torch.Tensor
    of: fidelity.Watchable
    path: fidelity.Path
    p: TokenDistribution
    steps: list[torch.Tensor]  # the draft's scores at each
    q_rules: SamplingRules
    kinds: FilterKinds


def case(
    seed: int, num_particles: int, max_steps: int, vocab: int, *, filtered: bool, dtype: torch.dtype
) -> Case:
    """Groups with K from 0, with filters or without, some greedy, some with a target of no law."""
    generator = torch.Generator().manual_seed(seed)
    size, width = 6, 2 * max_steps + 4

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def logits(num_rows: int) -> torch.Tensor:
        return (3 * torch.randn(size * num_rows, vocab, generator=generator)).to(dtype)

    of = fidelity.Watchable(
        torch.rand(size, generator=generator, dtype=torch.float64),
        whole(0, max_steps + 1, size),
        whole(0, 5, size) > 0,
        whole(0, 5, size) == 0,
    )
    starts = whole(0, max_steps, size, num_particles)
    path = fidelity.Path(
        whole(0, num_particles, size, num_particles),
        starts,
        starts + whole(0, max_steps + 2, size, num_particles),
        # A view, as a population has its tails.
        whole(0, vocab, size, num_particles, 2 + width)[:, :, 2:],
    )
    rules = SamplingRules(
        0.5 + torch.rand(size, generator=generator),
        torch.where(whole(0, 2, size) > 0, whole(2, vocab, size), vocab),
        torch.where(whole(0, 2, size) > 0, 0.7, 1.0),
        torch.where(whole(0, 2, size) > 0, 0.05, 0.0),
        of.greedy,
    )
    kinds = FilterKinds(filtered=filtered, greedy=True)
    p = TokenDistribution.of(
        TORCH, logits(num_particles * (max_steps + 1)).view(size, -1, vocab), rules, kinds
    )
    steps = [logits(num_particles) for _ in range(max_steps)]
    sums = torch.randn(size, num_particles, 4, generator=generator, dtype=torch.float64)
    return Case(sums, of, path, p, steps, rules, kinds)


def played(ops: object, case: Case) -> torch.Tensor:
    held = None
    for step, scores in enumerate(case.steps):
        held = ops.keep_column(held, scores, case.of, step)  # type: ignore[attr-defined]
    assert held is not None
    rows = held.unflatten(0, (len(case.sums), -1))
    q = TokenDistribution.of(TORCH, rows, case.q_rules, case.kinds)
    return ops.watch(case.sums, case.of, case.path, case.p, q)  # type: ignore[attr-defined]


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**16),
    num_particles=st.sampled_from([1, 3]),
    max_steps=st.sampled_from([1, 4]),
    vocab=st.sampled_from([7, 5000]),
    filtered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_is_watched(
    seed: int,
    num_particles: int,
    max_steps: int,
    vocab: int,
    filtered: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    """The same sums to rounding, and those of whom nothing is watched untouched to the last bit."""
    given_ = case(seed, num_particles, max_steps, vocab, filtered=filtered, dtype=dtype)
    expected = played(TORCH, given_)
    there: Case = each_tensor(lambda tensor: tensor.to(device), given_)
    found = played(kernel, there).cpu()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[..., 3], expected[..., 3])
    untouched = expected[..., 3] == given_.sums[..., 3]
    assert torch.equal(found[untouched], given_.sums[untouched])
    left_alone = ~given_.of.normalized | given_.of.greedy | (given_.of.num_steps == 0)
    assert torch.equal(expected[left_alone], given_.sums[left_alone])


@pytest.mark.parametrize("ops", ["torch", "kernels"])
def test_what_is_held_is_not_what_was_given(ops: str, device: str) -> None:
    """Verification reads the scores of all steps later: holding one must not write over another."""
    functions = TORCH if ops == "torch" else kernel
    steps = [torch.full((2, 9), float(step), device=device) for step in range(3)]
    of = fidelity.Watchable(
        torch.tensor([0.3, 0.99], dtype=torch.float64, device=device),
        torch.tensor([3, 3], device=device),
        torch.ones(2, dtype=torch.bool, device=device),
        torch.zeros(2, dtype=torch.bool, device=device),
    )
    held = None
    for step, scores in enumerate(steps):
        held = functions.keep_column(held, scores, of, step)
    assert held is not None
    assert held[:, 0].tolist() == [1.0, 2.0]  # columns 1, and 3 for which 2 stands
    assert [float(scores.unique()) for scores in steps] == [0.0, 1.0, 2.0]
