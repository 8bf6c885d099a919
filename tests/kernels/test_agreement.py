"""What particles have in common, and siblings' noise, kernel against reference."""

from typing import Any

import torch
from drawn import assert_same, drawn

from sglang_smc.kernels import agreement as kernel
from sglang_smc.smc import prefixes, randomness

EXACTLY: dict[str, Any] = {"rtol": 0, "atol": 0}


def generator_of(c: Any) -> tuple[torch.Generator, tuple[int, int]]:
    return torch.Generator().manual_seed(c.seed), (c.num_groups, c.num_particles)


def random_present(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """``[G, N]`` bool: particle 0 and some that follow it, not always all."""
    sizes = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    return torch.arange(shape[1]) < sizes


@drawn(
    10,
    num_groups=[1, 4],
    num_particles=[1, 2, 3, 8],
    width=[2, 63, 64, 65, 150],
    p_dead=[0.0, 0.5, 1.0],
)
def test_narrow(c: Any, device: str) -> None:
    """Texts with a token changed here or there, dead particles, drawn ones and heaviest ones."""
    generator, shape = generator_of(c)
    texts = (torch.rand(*shape, c.width, generator=generator) < 1.5 / c.width).long()
    present = random_present(shape, generator)
    lengths = torch.randint(c.width // 2, c.width, shape, generator=generator) * present
    log_weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    dead = torch.rand(shape, generator=generator) < c.p_dead
    arguments = (
        log_weights.masked_fill(dead | ~present, -torch.inf),
        texts,
        lengths,
        torch.randint(c.width, shape[:1], generator=generator),
        present,
        torch.rand(shape[:1], generator=generator, dtype=torch.float64),
        torch.rand(shape[:1], generator=generator) < 0.3,
    )
    assert_same(kernel.narrow, prefixes.narrow, arguments, device, rounding=1e-12)


@drawn(16, num_groups=[1, 4], num_particles=[1, 2, 3, 8, 9], width=[2, 3, 63, 64, 65, 150])
def test_common_tail(c: Any, device: str) -> None:
    """Texts that agree for long: each is a copy of one, with a token changed here or there.

    An absent particle has no say, by its tokens or its length.
    """
    generator, shape = generator_of(c)
    original = torch.randint(9, (c.num_groups, 1, c.width), generator=generator)
    changed = torch.rand(*shape, c.width, generator=generator) < 0.8 / (c.num_particles * c.width)
    wide = torch.zeros(*shape, c.width + 2, dtype=torch.int64)
    wide[:, :, 2:] = torch.where(changed, 9, original)
    lengths = torch.randint(c.width // 2, c.width, shape, generator=generator)
    arguments = wide[:, :, 2:], lengths, random_present(shape, generator)
    assert_same(kernel.common_tail, prefixes.common_tail, arguments, device)


@drawn(10, num_groups=[1, 4], num_particles=[*range(1, 10)])
def test_num_distinct(c: Any, device: str) -> None:
    generator, shape = generator_of(c)
    places = torch.randint(c.num_particles + 2, shape, generator=generator)
    arguments = places, present = places, random_present(shape, generator)
    assert_same(kernel.num_distinct, prefixes.num_distinct, arguments, device)
    each = zip(places, present, strict=True)
    expected = [len(set(own[here].tolist())) for own, here in each]
    assert prefixes.num_distinct(*arguments).tolist() == expected


@drawn(
    10,
    num_groups=[1, 2, 3],
    num_particles=[1, 2, 3, 5, 8, 13, 32],
    num_families=[1, 2, 3, 4],
    vocab_size=[0, 1, 2, 3],
)
def test_spread(c: Any, device: str) -> None:
    """Families in any order; some part by their token, and the same token makes none.

    Uniforms lie across, and tokens are a column of a longer chain.
    """
    generator, shape = generator_of(c)
    family = torch.randint(c.num_families, shape, generator=generator)
    same_text = (family.unsqueeze(2) == family.unsqueeze(1)).to(device)
    uniforms = torch.rand(*shape[::-1], generator=generator, dtype=torch.float64).to(device).t()
    chains = torch.randint(max(c.vocab_size, 1), (*shape, 3), generator=generator).to(device)
    tokens, before = chains[:, :, 1] if c.vocab_size else None, same_text.clone()
    found = kernel.stratify(uniforms, same_text, tokens)
    torch.testing.assert_close(found, randomness.stratify(uniforms, same_text, tokens), **EXACTLY)
    assert torch.equal(same_text, before), "the caller's siblings were changed"


def test_the_identity_of_all_groups_may_be_one_tensor(device: str) -> None:
    itself = torch.eye(3, dtype=torch.bool, device=device).expand(2, -1, -1)
    uniforms = torch.rand(2, 3, dtype=torch.float64, device=device)
    found = kernel.stratify(uniforms, itself, torch.arange(6, device=device).view(2, 3))
    assert torch.equal(found[0], uniforms) and torch.equal(found[1], itself)


@drawn(10, num_groups=[1, 2, 3], num_particles=[1, 2, 3, 5, 8], width=[1, 7, 64, 65, 200])
def test_same_text(c: Any, device: str) -> None:
    """Texts that agree to the end, part at any token, are of unlike length, or may not share.

    What stands behind a text's end tells no two apart.
    """
    generator, shape = generator_of(c)

    def draw(high: int, *more: int) -> torch.Tensor:
        return torch.randint(high, (*shape, *more), generator=generator)

    texts = draw(2**40, 2 + c.width)[:, :1].repeat(1, c.num_particles, 1)
    texts.scatter_(2, draw(2 + c.width, 1), draw(2, 1))
    lengths = (c.width - draw(3)).clamp_min(0)
    texts, lengths, may_stratify = (x.to(device) for x in (texts, lengths, draw(4) > 0))
    arguments = texts[:, :, 1:], lengths, may_stratify  # the ends of wider rows, as in a round
    found = kernel.same_text(*arguments)
    assert torch.equal(found, randomness.same_text(*arguments))
    stale = torch.arange(c.width + 1, device=device) > lengths.unsqueeze(2)
    texts[:, :, 1:][stale] = draw(9, c.width + 1).to(device)[stale]
    assert torch.equal(found, kernel.same_text(*arguments)), "read beyond the end"
