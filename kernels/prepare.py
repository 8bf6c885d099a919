"""KV slots for what a round is about to draft: one launch."""

import torch
import triton
import triton.language as tl

_BLOCK = 128


def reserve(
    table: torch.Tensor,
    num_rows: int,
    max_particles: int,
    rows: torch.Tensor,
    *,
    allocated: torch.Tensor,
    starts: torch.Tensor,
    idle: torch.Tensor,
    unread: torch.Tensor,
    num_particles: torch.Tensor,
    num_columns: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Hand each particle free slots for its next positions, behind the one before them.

    Reference: `sglang_smc.memory.ledger.Ledger.reserve`, same arguments after the first three, and
    the same result.

    Args:
        table: ``[num_rows * (1 + max_particles), W]`` int32, written in place.
        num_rows: SGLang's rows, which come first.
        max_particles: rows of each request's particles.
    """
    shape = 1 + width, *starts.shape  # a column in one piece, since each is read by itself
    slots = torch.empty(shape, dtype=torch.int64, device=table.device).permute(1, 2, 0)
    of_groups = rows, allocated, starts, idle, unread, num_particles, num_columns
    _reserve[(triton.cdiv(slots.numel(), _BLOCK),)](
        table,
        *(argument.contiguous() for argument in of_groups),
        slots,
        table.stride(0),
        num_rows,
        max_particles,
        *slots.shape,
        block=_BLOCK,
    )
    return slots


@triton.jit
def _reserve(
    table,
    rows,
    allocated,
    starts,
    idle,
    unread,
    num_particles,
    num_columns,
    slots,
    stride,
    num_rows,
    max_particles,
    num_groups,
    padded_particles,
    padded_columns,
    block: tl.constexpr,
):
    cell = tl.program_id(0) * block + tl.arange(0, block)
    inside = cell < num_groups * padded_particles * padded_columns
    own = cell // padded_columns  # of this particle, in [G, N]
    group, particle = own // padded_particles, own % padded_particles
    column = cell % padded_columns - 1  # -1 is the position before
    request = tl.load(rows + group, mask=inside, other=0)
    start = tl.load(starts + own, mask=inside, other=0)
    runs = inside & (tl.load(idle + own, mask=inside, other=1) == 0)
    columns = tl.load(num_columns + group, mask=inside, other=0)
    first = tl.load(allocated + group, mask=inside, other=0)
    first -= tl.load(num_particles + group, mask=inside, other=0) * columns
    of_particle = table + (num_rows + request * max_particles + particle) * stride + start + column

    mine = runs & (column >= 0) & (column < columns)
    place = table + request * stride + first + particle * columns + column
    slot = tl.load(place, mask=mine, other=0)
    owed = runs & (column < 0) & (tl.load(unread + group, mask=inside, other=0) != 0)
    before = tl.load(of_particle, mask=owed & (start > 0), other=0)
    tl.store(of_particle, slot, mask=inside & (column >= 0))
    at = (column + 1) * num_groups * padded_particles + own
    tl.store(slots + at, tl.where(owed, before, slot).to(tl.int64), mask=inside)
