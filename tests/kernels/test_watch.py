"""What is watched, kernel against reference: rows, tokens, moments, and who is left alone."""

from typing import Any

import torch
from drawn import Case, copied, drawn

from sglang_smc.kernels import watch as kernel
from sglang_smc.ops import TORCH
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.fidelity import Path


def case(c: Case) -> tuple[Any, ...]:
    """Groups with K from 0, with filters or without, some greedy, some with a target of no law."""
    c.generator.manual_seed(c.seed)
    size = 6
    num_particles = c.num_particles
    max_steps = c.max_steps
    vocab = c.vocab

    def logits(num_rows: int) -> torch.Tensor:
        return (3 * c.normal(size * num_rows, vocab)).to(c.dtype)

    def or_else(filter_: Any, nothing: float) -> torch.Tensor:
        return torch.where(c.flags(0.5, size), filter_, nothing)

    num_steps = c.whole(0, max_steps + 1, size)
    greedy = c.flags(0.2, size)
    of = c.uniforms(size), num_steps, c.flags(0.8, size) & ~greedy
    starts = c.whole(0, max_steps, size, num_particles)
    path = (
        c.whole(0, num_particles, size, num_particles),
        starts,
        starts + c.whole(0, max_steps + 2, size, num_particles),
        # A view, as a population has its tails.
        c.whole(0, vocab, size, num_particles, 2 * max_steps + 6)[:, :, 2:],
    )
    filters = or_else(c.whole(2, vocab, size), vocab), or_else(0.7, 1.0), or_else(0.05, 0.0)
    rules = 0.5 + c.uniforms(size).float(), greedy, filters if c.filtered else None
    p = TokenDistribution.of(logits(num_particles * (max_steps + 1)).view(size, -1, vocab), *rules)
    steps = [logits(num_particles) for _ in range(max_steps)]
    return c.normal(size, num_particles, 4).double(), of, path, p, steps, rules


def played(ops: Any, case: tuple[Any, ...]) -> torch.Tensor:
    """Watch with the scores that the draft has at each of the steps."""
    sums, of, path, p, steps, q_rules = case
    held = ops.keep_column(list(map(TokenDistribution.of_log_probs, steps)), *of[:2])
    q = TokenDistribution.of(held.unflatten(0, (len(sums), -1)), *q_rules)
    return ops.watch(sums, Path(*of, *path), p, q)


@drawn(
    8,
    num_particles=[1, 3],
    max_steps=[1, 4],
    vocab=[7, 5000],
    filtered=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)
def test_what_is_watched(c: Case, device: str) -> None:
    """The same sums to rounding, and those of whom nothing is watched untouched to the last bit."""
    host = case(c)
    anew = case(c)
    there = copied(host, device)
    expected = played(TORCH, host)
    found = played(kernel, there).cpu()
    for steps in (host[4], [step.cpu() for step in there[4]]):
        same = all(map(torch.equal, steps, anew[4]))
        assert same, "verification reads the scores of all steps later"
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[..., 3], expected[..., 3])
    sums, of = host[:2]
    untouched = expected[..., 3] == sums[..., 3]
    assert torch.equal(found[untouched], sums[untouched])
    left_alone = ~of[2] | (of[1] == 0)
    assert torch.equal(expected[left_alone], sums[left_alone])
