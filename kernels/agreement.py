"""What particles have in common: who shares noise with whom, tails, roots. One launch each."""

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.randomness import _mix

_BLOCK = 64  # tokens of each tail that are read at once


def same_text(
    texts: torch.Tensor, lengths: torch.Tensor, may_stratify: torch.Tensor
) -> torch.Tensor:
    """The siblings among a group's particles, an equivalence ``[G, N, N]`` bool.

    Reference: `sglang_smc.smc.stratify.same_text`, same arguments, to the last bit of the hash.
    """
    num_groups, num_particles, width = texts.shape
    shape = num_groups, num_particles, num_particles
    found = torch.empty(shape, dtype=torch.bool, device=texts.device)  # [G, N, N]
    rows = texts.flatten(0, 1)  # a view of a population's texts, of which the first token is cut
    _same_text[(num_groups,)](
        rows,
        *rows.stride(),
        lengths.contiguous(),
        may_stratify.contiguous(),
        found,
        num_particles,
        width,
        padded=triton.next_power_of_2(num_particles),
        block=_BLOCK,
    )
    return found


def stratify(
    uniforms: torch.Tensor, same_text: torch.Tensor, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep as siblings those with equal tokens, then spread the uniforms of siblings evenly.

    Reference: `sglang_smc.smc.stratify.stratify`, same arguments, to the last bit.
    """
    num_groups, num_particles = uniforms.shape
    spread_out = torch.empty_like(uniforms, memory_format=torch.contiguous_format)  # [G, N]
    remaining = same_text  # [G, N, N]
    if tokens is not None:
        remaining = torch.empty_like(same_text, memory_format=torch.contiguous_format)
        tokens = tokens.contiguous()
    _stratify[(num_groups,)](
        uniforms.contiguous(),
        same_text.contiguous(),
        tokens,
        spread_out,
        remaining,
        num_particles,
        padded=triton.next_power_of_2(num_particles),
    )
    return spread_out, remaining


def common_tail(texts: torch.Tensor, lengths: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Number of leading tail tokens that all present particles of a group share, ``[G]``.

    Reference: `sglang_smc.smc.agreement.common_tail`, same arguments.
    """
    num_groups, num_particles, width = texts.shape
    shared = torch.empty(num_groups, dtype=torch.int64, device=texts.device)  # [G]
    _common_tail[(num_groups,)](
        texts,
        *texts.stride(),
        lengths.contiguous(),
        present.contiguous(),
        shared,
        num_particles,
        width,
        padded=triton.next_power_of_2(num_particles),
        block=_BLOCK,
    )
    return shared


def num_distinct(places: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """How many of a group's N places its present particles name, ``[G]``.

    Reference: `sglang_smc.smc.agreement.num_distinct`, same arguments.
    """
    num_groups, num_particles = places.shape
    found = torch.empty(num_groups, dtype=torch.int64, device=places.device)  # [G]
    _num_distinct[(num_groups,)](
        places.contiguous(),
        present.contiguous(),
        found,
        num_particles,
        padded=triton.next_power_of_2(num_particles),
    )
    return found


@triton.jit
def _same_text(
    texts,
    text_stride,
    token_stride,
    lengths,
    may_stratify,
    found,
    num_particles,
    width,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    group = tl.program_id(0)
    particle = tl.arange(0, padded)
    own = group * num_particles + particle
    here = particle < num_particles
    length = tl.load(lengths + own, mask=here, other=0)
    key = tl.zeros([padded], dtype=tl.uint64)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)[None, :]
        inside = here[:, None] & (column <= length[:, None])
        at = own[:, None] * text_stride + column * token_stride
        token = tl.load(texts + at, mask=inside, other=0)
        term = _mix(token.to(tl.uint64) ^ _mix(column.to(tl.uint64)))
        key += tl.sum(tl.where(inside, term, 0), 1)
    shares = tl.load(may_stratify + own, mask=here, other=0) != 0
    same = (key[:, None] == key[None, :]) & shares[:, None] & shares[None, :]
    one, other = particle[:, None], particle[None, :]
    pair = (group * num_particles + one) * num_particles + other
    inside_pair = (one < num_particles) & (other < num_particles)
    tl.store(found + pair, same | (one == other), mask=inside_pair)


@triton.jit
def _stratify(
    uniforms, same_text, tokens, spread_out, remaining, num_particles, padded: tl.constexpr
):
    group = tl.program_id(0)
    particle = tl.arange(0, padded)
    one, other = particle[:, None], particle[None, :]
    inside = (one < num_particles) & (other < num_particles)
    pair = (group * num_particles + one) * num_particles + other
    same = tl.load(same_text + pair, mask=inside, other=0) != 0
    if tokens is not None:
        drawn = tokens + group * num_particles
        token = tl.load(drawn + one, mask=one < num_particles, other=0)
        same = same & (token == tl.load(drawn + other, mask=other < num_particles, other=0))
        tl.store(remaining + pair, same, mask=inside)

    eldest = tl.min(tl.where(same, other, padded), 1)
    rank = tl.sum((same & (other < one)).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    here = particle < num_particles
    own = group * num_particles
    shared = tl.load(uniforms + own + eldest, mask=here, other=0.0)
    shifted = shared + rank.to(tl.float64) / count.to(tl.float64)
    tl.store(spread_out + own + particle, shifted - tl.floor(shifted), mask=here)


@triton.jit
def _common_tail(
    texts,
    group_stride,
    particle_stride,
    token_stride,
    lengths,
    present,
    shared,
    num_particles,
    width,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    group = tl.program_id(0)
    particle = tl.arange(0, padded)
    own = group * num_particles + particle
    here = particle < num_particles
    is_present = tl.load(present + own, mask=here, other=0) != 0
    length = tl.load(lengths + own, mask=here, other=0)
    common = tl.min(tl.where(is_present, length, width), 0) + 1  # with the token before
    of_group = texts + group * group_stride
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = column < width
        first = tl.load(of_group + column * token_stride, mask=inside, other=0)
        at = particle[:, None] * particle_stride + column[None, :] * token_stride
        asked = is_present[:, None] & inside[None, :]
        token = tl.load(of_group + at, mask=asked, other=0)
        differs = asked & (token != first[None, :])
        common = tl.minimum(common, tl.min(tl.min(tl.where(differs, column[None, :], width), 1), 0))
    tl.store(shared + group, tl.maximum(common - 1, 0).to(tl.int64))


@triton.jit
def _num_distinct(places, present, found, num_particles, padded: tl.constexpr):
    group = tl.program_id(0)
    particle = tl.arange(0, padded)
    own = group * num_particles + particle
    here = particle < num_particles
    is_present = tl.load(present + own, mask=here, other=0) != 0
    place = tl.load(places + own, mask=here, other=0)
    named = (place[None, :] == particle[:, None]) & is_present[None, :]
    count = tl.sum(tl.max(named.to(tl.int32), 1), 0)
    tl.store(found + group, count.to(tl.int64))
