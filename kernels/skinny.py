"""Multiply few rows by a matrix that is read once: the products of a draft's layer.

For up to 64 rows memory is the bound: what counts is that weights are always on their way. So a
launch does all that belongs to its product. It normalizes rows by their root mean square (RMSNorm,
arXiv 1910.07467), applies SiLU and multiplies (SwiGLU, arXiv 2002.05202), and adds bias and
residual. The norm takes no pass of its own: rows are multiplied by its weights as they are loaded,
and products by the reciprocal root of the mean of squares, which is known after the last column.

Each program has some outputs, with all inputs: nothing is split and added up again. From sm_90 on
a launch begins while the one before it ends (programmatic dependent launch), and fetches its first
weights into L2. Every program of such a launch waits before it reads or writes anything else.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_smc.kernels.attention import work
from sglang_smc.smc.ops import MOST_SKINNY_ROWS


class Blocks(NamedTuple):
    """The tile sizes of one program, and the stages of its pipeline."""

    rows: int
    outputs: int  # with a gate, twice as many rows of the matrix
    inputs: int
    stages: int


@lru_cache
def blocks_of(
    num_rows: int, shape: tuple[int, int], element_size: int, gated: bool, chip: work.Chip
) -> Blocks:
    """Return the tiles for ``[outputs, inputs]`` of ``element_size`` bytes, to fit on the chip.

    Raises ValueError for sizes that no tile divides.
    """
    outputs, inputs = shape
    if num_rows > MOST_SKINNY_ROWS or outputs % 16 or inputs % 64:
        raise ValueError(
            f"{num_rows} rows of {inputs} inputs and {outputs} outputs; the kernel takes at most "
            f"{MOST_SKINNY_ROWS} rows, inputs in multiples of 64 and outputs in multiples of 16"
        )
    rows = max(16, triton.next_power_of_2(num_rows))
    is_wide, stages = rows > 16, 3 if chip.is_small else 4
    if is_wide or gated or chip.is_small:
        most = 64 if is_wide and (gated or chip.is_small) else 128
    else:
        most = 512 if inputs > 4096 else 256
        stages = 3 if most * element_size > 512 else 4
    at_once = math.gcd(outputs, 32 if gated or is_wide else 16)
    return Blocks(rows, at_once, math.gcd(inputs, most), stages)


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    beside: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Multiply rows by the transpose of a matrix, in one launch.

    Reference: `sglang_smc.smc.ops.skinny`, with the same arguments, up to the rounding of inputs
    and outputs. All tensors are contiguous.

    Raises ValueError as `blocks_of`.
    """
    (num_rows, inputs), outputs = x.shape, len(weight) // (1 + gated)
    chip = work.chip_of(x.device)
    blocks = blocks_of(num_rows, (outputs, inputs), weight.element_size(), gated, chip)
    assert not gated or bias is beside is None, "which no layer has"
    other, other_norm = beside or (None, None)
    rows = (one for one in (x, other, residual) if one is not None)
    assert all(one.is_contiguous() for one in rows), "a row's place follows from its number"
    assert weight.shape[1] == inputs * (1 if other is None else 2), "matrix and rows do not fit"
    y = x.new_empty(num_rows, outputs)
    launch: dict[str, Any] = {"launch_pdl": True} if chip.overlaps else {}
    _skinny[(outputs // blocks.outputs,)](
        x,
        norm,
        other,
        other_norm,
        weight,
        scale,
        bias,
        residual,
        y,
        num_rows,
        eps,
        inputs=inputs,
        columns=weight.shape[1],
        outputs=outputs,
        gated=gated,
        overlaps=chip.overlaps,
        block_rows=blocks.rows,
        block_outputs=blocks.outputs,
        block_inputs=blocks.inputs,
        stages=blocks.stages,
        num_warps=4,
        **launch,
    )
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _skinny(
    x,
    norm,
    other,
    other_norm,
    weight,
    scale,
    bias,
    residual,
    y,
    num_rows,
    eps,
    inputs: tl.constexpr,
    columns: tl.constexpr,
    outputs: tl.constexpr,
    gated: tl.constexpr,
    overlaps: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute a block of outputs of all rows, transposed: weights are a dot's left operand."""
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    row = tl.arange(0, block_rows)
    own = weight + output.to(tl.int64)[:, None] * columns
    if overlaps:
        gdc_launch_dependents()
        _prefetch(own, columns)
        if gated:
            _prefetch(own + outputs * columns, columns)
        gdc_wait()
    up_from: tl.constexpr = outputs * columns if gated else 0
    blocks: tl.constexpr = (block_outputs, block_inputs, stages)
    sums, up = _sums(x, norm, own, row, num_rows, eps, inputs, up_from, blocks)
    if other is not None:
        more, _ = _sums(other, other_norm, own + inputs, row, num_rows, eps, inputs, 0, blocks)
        sums += more
    if scale is not None:
        sums *= tl.load(scale + output)[:, None]
        if gated:
            up *= tl.load(scale + outputs + output)[:, None]
    if bias is not None:
        sums += tl.load(bias + output).to(tl.float32)[:, None]
    if gated:
        sums = sums / (1 + tl.exp(-sums)) * up
    place, present = row[None, :] * outputs + output[:, None], (row < num_rows)[None, :]
    if residual is not None:
        sums += tl.load(residual + place, mask=present, other=0.0).to(tl.float32)
    tl.store(y + place, sums, mask=present)


@triton.jit
def _sums(
    x,
    norm,
    weight,
    row,
    num_rows,
    eps,
    inputs: tl.constexpr,
    up_from: tl.constexpr,
    blocks: tl.constexpr,
):
    """Return the products of normalized rows by a block of weights, and by the one ``up_from`` it.

    Both ``[outputs, rows]`` float32; the second is 0 where ``up_from`` is.
    """
    column = tl.arange(0, blocks[1])
    rows = x + row[:, None] * inputs + column[None, :]
    own = weight + column[None, :]
    sums = tl.zeros([blocks[0], row.shape[0]], tl.float32)
    up = tl.zeros([blocks[0], row.shape[0]], tl.float32)
    squares = tl.zeros([row.shape[0]], tl.float32)
    for begin in tl.range(0, inputs, blocks[1], num_stages=blocks[2]):
        given = tl.load(rows + begin, mask=(row < num_rows)[:, None], other=0.0)
        if norm is not None:
            exact = given.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            of_norm = tl.load(norm + begin + column).to(tl.float32)
            given = (exact * of_norm[None, :]).to(given.dtype)
        given = tl.trans(given)
        sums = tl.dot(tl.load(own + begin).to(given.dtype), given, sums)
        if up_from > 0:
            up = tl.dot(tl.load(own + up_from + begin).to(given.dtype), given, up)
    if norm is not None:
        root = tl.rsqrt(squares / inputs + eps)[None, :]
        sums, up = sums * root, up * root
    return sums, up


@triton.jit
def _prefetch(rows, columns: tl.constexpr):
    """Have the first KB of rows of weights, or all, fetched into L2, which nothing waits for."""
    line: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # numbers of 128 bytes
    at = tl.arange(0, 8) * line
    at = tl.minimum(at, columns - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(rows + at).to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
