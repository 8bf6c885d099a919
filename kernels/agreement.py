"""What the particles of a group have in common: one launch each, a program a group."""

import torch
import triton
import triton.language as tl

_BLOCK = 64  # tokens of each text that are read at once


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
