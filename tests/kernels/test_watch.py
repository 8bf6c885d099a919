"""What is watched, kernel against reference: rows, tokens, moments, and who is left alone."""

from typing import Any, NamedTuple

import torch
from drawn import drawn

from sglang_smc.kernels import watch as kernel
from sglang_smc.kv.transfer import each_tensor
from sglang_smc.ops.interface import TORCH
from sglang_smc.smc import fidelity
from sglang_smc.smc.distribution import FilterKinds, SamplingRules, TokenDistribution


class Case(NamedTuple):
    sums: torch.Tensor
    of: fidelity.Watchable
    path: fidelity.Path
    p: TokenDistribution
    steps: list[torch.Tensor]  # the draft's scores at each
    q_rules: SamplingRules
    kinds: FilterKinds


def case(c: Any) -> Case:
    """Groups with K from 0, with filters or without, some greedy, some with a target of no law."""
    generator, size = torch.Generator().manual_seed(c.seed), 6
    num_particles, max_steps, vocab = c.num_particles, c.max_steps, c.vocab
    width = 2 * max_steps + 4

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def logits(num_rows: int) -> torch.Tensor:
        return (3 * torch.randn(size * num_rows, vocab, generator=generator)).to(c.dtype)

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
    kinds = FilterKinds(filtered=c.filtered, greedy=True)
    p = TokenDistribution.of(
        TORCH, logits(num_particles * (max_steps + 1)).view(size, -1, vocab), rules, kinds
    )
    steps = [logits(num_particles) for _ in range(max_steps)]
    sums = torch.randn(size, num_particles, 4, generator=generator, dtype=torch.float64)
    return Case(sums, of, path, p, steps, rules, kinds)


def played(ops: Any, case: Case) -> torch.Tensor:
    held: Any = None
    for step, scores in enumerate(case.steps):
        held = ops.keep_column(held, scores, case.of, step)
    rows = held.unflatten(0, (len(case.sums), -1))
    q = TokenDistribution.of(TORCH, rows, case.q_rules, case.kinds)
    return ops.watch(case.sums, case.of, case.path, case.p, q)


@drawn(
    8,
    num_particles=[1, 3],
    max_steps=[1, 4],
    vocab=[7, 5000],
    filtered=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)
def test_what_is_watched(c: Any, device: str) -> None:
    """The same sums to rounding, and those of whom nothing is watched untouched to the last bit."""
    given_ = case(c)
    there: Case = each_tensor(lambda tensor: tensor.to(device, copy=True), given_)
    expected, found = played(TORCH, given_), played(kernel, there).cpu()
    for one, theirs, drawn_anew in zip(given_.steps, there.steps, case(c).steps, strict=True):
        assert torch.equal(one, drawn_anew), "verification reads the scores of all steps later"
        assert torch.equal(theirs.cpu(), drawn_anew)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[..., 3], expected[..., 3])
    untouched = expected[..., 3] == given_.sums[..., 3]
    assert torch.equal(found[untouched], given_.sums[untouched])
    left_alone = ~given_.of.normalized | given_.of.greedy | (given_.of.num_steps == 0)
    assert torch.equal(expected[left_alone], given_.sums[left_alone])
