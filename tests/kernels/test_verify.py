"""Exact verification, kernel against reference: the tree, its shares, and where a group stops."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl
from drawn import Case, copied, drawn
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from sglang_smc.kernels import shares, tree
from sglang_smc.kernels import verify as kernel
from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ops import Ops

Arguments = tuple[
    torch.Tensor, torch.Tensor, TokenDistribution, list[TokenDistribution], torch.Tensor
]


def drafts(c: Case) -> Arguments:
    """Chains of a draft near p that share many tokens; some tokens are forbidden."""
    size = c.size
    num_chains = c.num_chains
    num_steps = c.num_steps
    p = c.normal(size, 1, num_steps + 1, c.vocab_size) * 2
    logits = torch.stack([p, p + c.normal(*p.shape) * c.spread])
    banned = c.flags(0.1, *logits.shape)
    banned[..., 0] = False
    logits = logits.masked_fill(banned, -torch.inf).expand(-1, -1, num_chains, -1, -1)
    of_q = logits[1].softmax(-1).flatten(0, 2)
    tokens = torch.multinomial(of_q, 1, generator=c.generator).view(size, num_chains, -1)
    lengths = c.whole(0, num_steps + 1, size, num_chains).maximum(c.whole(0, 9, size, 1))
    temperature = c.uniforms(size).float() + 0.5
    greedy = c.flags(0.2, size)
    p_rows = logits[0].reshape(-1, c.vocab_size)
    law = TokenDistribution(p_rows, temperature, greedy=greedy)
    q = [
        TokenDistribution(column.reshape(-1, c.vocab_size), temperature.new_ones(size))
        for column in logits[1].unbind(2)[:-1]
    ]
    uniforms = c.uniforms(size)
    return tokens[..., :-1], lengths.clamp_max(num_steps), law, q, uniforms


def dot_of_tf32(builder: InterpreterBuilder, a: Any, b: Any, sums: Any, *_: Any) -> Any:
    """What a tensor core adds up: it leaves out the last 13 bits of each number."""

    def cut(one: Any) -> np.ndarray:
        assert one.data.dtype == np.float32
        return (one.data.view(np.int32) & -(1 << 13)).view(np.float32)

    return TensorHandle(np.matmul(cut(a), cut(b)) + sums.data, sums.dtype.scalar)


@pytest.mark.parametrize("num_chains", [1, 3, 8])
@drawn(
    2,
    size=[3],
    num_steps=[1, 3],
    vocab_size=[2, 64, 300],
    spread=[0.0, 0.3, 2.0],
)
def test_a_tree(num_chains: int, c: Case, device: str, kernels: Ops) -> None:
    """What does not exist holds anything, and spoils nothing."""
    c.num_chains = num_chains
    tokens, lengths, p, q, uniforms = arguments = drafts(c)
    expected = verification.grow(tokens, lengths)
    layers = verification.descend(expected, p, q)
    wanted = verification.verify(*arguments)
    there = copied([tokens, lengths], device)
    of_p = kernels.distribution(*copied(tuple(p), device))
    of_q = [kernels.distribution(*copied(tuple(law), device)) for law in q]
    # The first pass of a draft gives logits of two tokens, of which the second's are these.
    rows = of_q[0].scores
    of_q[0] = of_q[0]._replace(scores=torch.stack([rows * 0, rows], 1)[:, 1])
    with (
        mock.patch.object(tree, "_TILE", 256),
        mock.patch.object(shares, "_TURN", tl.constexpr(128)),
        mock.patch.object(InterpreterBuilder, "create_dot", dot_of_tf32),
    ):
        columns = tree.Columns.of(of_p, of_q, c.num_chains)
        grown = tree.grow(*there, columns)
        down = copied(shares.descend(grown, columns), "cpu")
        found = copied(kernel.verify(*there, of_p, of_q, uniforms.to(device)), "cpu")
    assert torch.equal(grown.nodes.cpu(), expected.nodes)
    left = torch.cat([down.residual.sum(3), down.shares[-1:]])
    assert torch.allclose(down.shares.double(), layers.shares, rtol=0, atol=1e-6)
    assert torch.allclose(left.double(), layers.residual, rtol=0, atol=1e-6)
    for name in ("num_columns", "winner", "rejects"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    uses = wanted.rejects
    assert torch.allclose(found.residuals[uses], wanted.residuals[uses], rtol=0, atol=1e-6)
