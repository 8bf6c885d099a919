"""Exact verification, kernel against reference: the tree, its shares, and where a group stops."""

from unittest import mock

import torch
from drawn import Case, copied, drawn

from sglang_smc.kernels import verify as kernel
from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ops import Ops

Arguments = tuple[
    torch.Tensor, torch.Tensor, TokenDistribution, list[TokenDistribution], torch.Tensor
]


def drafts(c: Case) -> Arguments:
    """Chains of a draft near p that share many tokens; some tokens are forbidden."""
    size, num_chains, num_steps = c.size, c.num_chains, c.num_steps
    p = c.normal(size, 1, num_steps + 1, c.vocab_size) * 2
    logits = torch.stack([p, p + c.normal(*p.shape) * c.spread])
    banned = c.flags(0.1, *logits.shape)
    banned[..., 0] = False
    logits = logits.masked_fill(banned, -torch.inf).expand(-1, -1, num_chains, -1, -1)
    of_q = logits[1].softmax(-1).flatten(0, 2)
    tokens = torch.multinomial(of_q, 1, generator=c.generator).view(size, num_chains, -1)
    lengths = c.whole(0, num_steps + 1, size, num_chains).maximum(c.whole(0, 9, size, 1))
    temperature, greedy = c.uniforms(size).float() + 0.5, c.flags(0.2, size)
    p_rows = logits[0].reshape(-1, c.vocab_size)
    law = TokenDistribution(p_rows, temperature, greedy=greedy)
    q = [
        TokenDistribution(column.reshape(-1, c.vocab_size), temperature.new_ones(size))
        for column in logits[1].unbind(2)[:-1]
    ]
    uniforms = c.uniforms(size)
    return tokens[..., :-1], lengths.clamp_max(num_steps), law, q, uniforms


@drawn(
    4,
    size=[3],
    num_chains=[1, 3, 8],
    num_steps=[1, 3],
    vocab_size=[2, 64, 300],
    spread=[0.0, 0.3, 2.0],
)
def test_a_tree(c: Case, device: str, kernels: Ops) -> None:
    """What does not exist holds anything, and spoils nothing."""
    tokens, lengths, p, q, uniforms = arguments = drafts(c)
    tree = verification.grow(tokens, lengths)
    layers = verification.descend(tree, p, q)
    wanted = verification.verify(*arguments)
    there = copied([tokens, lengths], device)
    of_p = kernels.distribution(*copied(tuple(p), device))
    of_q = [kernels.distribution(*copied(tuple(law), device)) for law in q]
    # The first pass of a draft gives logits of two tokens, of which the second's are these.
    rows = of_q[0].scores
    of_q[0] = of_q[0]._replace(scores=torch.stack([rows * 0, rows], 1)[:, 1])
    with mock.patch.multiple(kernel, _TILE=256, _CHUNK=32):
        columns = kernel.Columns.of(of_p, of_q, c.num_chains)
        grown = kernel.grow(*there, columns)
        down = copied(kernel.descend(grown, columns), "cpu")
        found = copied(kernel.verify(*there, of_p, of_q, uniforms.to(device)), "cpu")
    assert torch.equal(grown.nodes.cpu(), tree.nodes)
    left = torch.cat([down.residual.sum(3), down.shares[-1:]])
    assert torch.allclose(down.shares.double(), layers.shares, rtol=1e-4, atol=1e-5)
    assert torch.allclose(left.double(), layers.residual, rtol=1e-4, atol=1e-5)
    for name in ("num_columns", "winner", "rejects"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    uses = wanted.rejects
    assert torch.allclose(found.residuals[uses], wanted.residuals[uses], rtol=1e-4, atol=1e-5)
