"""What particles have in common, and siblings' noise, kernel against reference."""

import torch
from drawn import Case, drawn

from sglang_smc.kernels import agreement as kernel
from sglang_smc.smc import randomness


@drawn(
    10,
    num_groups=[1, 2, 3],
    num_particles=[1, 2, 3, 5, 8, 13, 32],
    num_families=[1, 2, 3, 4],
    vocab_size=[0, 1, 2, 3],
)
def test_spread(c: Case, device: str) -> None:
    """Families in any order; some part by their token, and the same token makes none."""
    shape = c.num_groups, c.num_particles
    family = c.whole(0, c.num_families, *shape)
    same_text = (family.unsqueeze(2) == family.unsqueeze(1)).to(device)
    uniforms = c.uniforms(*shape[::-1]).to(device).t()
    chains = c.whole(0, max(c.vocab_size, 1), *shape, 3).to(device)
    tokens = chains[:, :, 1] if c.vocab_size else None
    before = same_text.clone()
    found = kernel.stratify(uniforms, same_text, tokens)
    for one, other in zip(found, randomness.stratify(uniforms, same_text, tokens), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(same_text, before), "the caller's siblings were changed"


def test_the_identity_of_all_groups_may_be_one_tensor(device: str) -> None:
    itself = torch.eye(3, dtype=torch.bool, device=device).expand(2, -1, -1)
    uniforms = torch.rand(2, 3, dtype=torch.float64, device=device)
    found = kernel.stratify(uniforms, itself, torch.arange(6, device=device).view(2, 3))
    assert torch.equal(found[0], uniforms) and torch.equal(found[1], itself)


@drawn(10, num_groups=[1, 2, 3], num_particles=[1, 2, 3, 5, 8], width=[1, 7, 64, 65, 200])
def test_same_text(c: Case, device: str) -> None:
    """Texts that agree to the end, part at any token, are of unlike length, or may not share."""
    shape = c.num_groups, c.num_particles
    texts = c.whole(0, 2**40, c.num_groups, 1, 2 + c.width).repeat(1, c.num_particles, 1)
    texts.scatter_(2, c.whole(0, 2 + c.width, *shape, 1), c.whole(0, 2, *shape, 1))
    lengths = c.whole(max(c.width - 2, 0), c.width + 1, *shape)
    texts, lengths, may_stratify = (x.to(device) for x in (texts, lengths, c.flags(0.75, *shape)))
    arguments = texts[:, :, 1:], lengths, may_stratify  # the ends of wider rows, as in a round
    found = kernel.same_text(*arguments)
    assert torch.equal(found, randomness.same_text(*arguments))
    stale = torch.arange(c.width + 1, device=device) > lengths.unsqueeze(2)
    texts[:, :, 1:][stale] = c.whole(0, 9, *shape, c.width + 1).to(device)[stale]
    assert torch.equal(found, kernel.same_text(*arguments)), "read beyond the end"
