"""Multiply few rows by a matrix that is read once: the products of a draft's layer.

For up to 64 rows memory is the bound: what counts is that weights are always on their way. So a
launch does all that belongs to its product. It normalizes rows by their root mean square (RMSNorm,
arXiv 1910.07467), applies SiLU and multiplies (SwiGLU, arXiv 2002.05202), and adds bias and
residual. The norm takes no pass of its own: rows are multiplied by its weights as they are loaded,
and products by the reciprocal root of the mean of squares, which is known after the last column.

Each program has some outputs, with all inputs: nothing is split and added up again. From sm_90 on
a launch begins while the one before it ends (programmatic dependent launch), and fetches its first
weights into L2, a KB of each row, or 4 KB behind attention, which leaves memory idle. Every program
of such a launch waits before it reads or writes anything else.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_smc.kernels.attention import work
from sglang_smc.smc.ops import MOST_SKINNY_ROWS, Fused


class Tiles(NamedTuple):
    """The tile sizes of one program, and the stages of its pipeline."""

    rows: Any
    outputs: Any  # with a gate, twice as many rows of the matrix
    inputs: Any
    stages: Any


@lru_cache
def blocks_of(
    num_rows: int, shape: tuple[int, int], element_size: int, gated: bool, chip: work.Chip
) -> Tiles:
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
    is_wide = rows > 16
    stages = 3 if chip.is_small else 4
    if is_wide or gated or chip.is_small:
        most = 64 if is_wide and (gated or chip.is_small) else 128
    else:
        most = 512 if inputs > 4096 else 256
        stages = 3 if most * element_size > 512 else 4
    at_once = math.gcd(outputs, 32 if gated or is_wide else 16)
    return Tiles(rows, at_once, math.gcd(inputs, most), stages)


def skinny(x: torch.Tensor, weight: torch.Tensor, fused: Fused) -> torch.Tensor:
    """Multiply rows by the transpose of a matrix, in one launch.

    Reference: `sglang_smc.smc.ops.skinny`, with the same arguments, up to the rounding of inputs
    and outputs. All tensors are contiguous.

    Raises ValueError as `blocks_of`.
    """
    num_rows, inputs = x.shape
    outputs = len(weight) // (1 + fused.gated)
    chip = work.chip_of(x.device)
    blocks = blocks_of(num_rows, (outputs, inputs), weight.element_size(), fused.gated, chip)
    assert not fused.gated or fused.bias is fused.beside is None, "which no layer has"
    rows = (one for one in (x, fused.beside, fused.residual) if one is not None)
    assert all(one.is_contiguous() for one in rows), "a row's place follows from its number"
    width = inputs * (1 if fused.beside is None else 2)
    assert weight.shape[1] == width, "matrix and rows do not fit"
    y = x.new_empty(num_rows, outputs, dtype=fused.dtype or x.dtype)
    lines = triton.cdiv(width * weight.element_size(), 128)
    fetched = min(triton.next_power_of_2(lines), 32 if fused.fetches_more else 8)
    launch: dict[str, Any] = {"launch_pdl": True} if chip.overlaps else {}
    _skinny[(outputs // blocks.outputs,)](
        x,
        weight,
        y,
        num_rows,
        fused._replace(gated=tl.constexpr(fused.gated), dtype=None, fetches_more=None),
        sizes=_Sizes(*map(tl.constexpr, (inputs, width, outputs, fetched))),
        blocks=Tiles(*map(tl.constexpr, blocks)),
        overlaps=chip.overlaps,
        num_warps=4,
        **launch,
    )
    return y


class _Sizes(NamedTuple):
    """Constants that the kernel is compiled for."""

    inputs: Any
    columns: Any  # of the matrix
    outputs: Any
    fetched: Any  # lines of 128 bytes of each row, before the launch ahead ends


@triton.jit(do_not_specialize=["num_rows"])
def _skinny(x, weight, y, num_rows, fused, sizes, blocks, overlaps: tl.constexpr):
    """Compute a block of outputs of all rows, transposed: weights are a dot's left operand."""
    output = tl.program_id(0) * blocks.outputs + tl.arange(0, blocks.outputs)
    row = tl.arange(0, blocks.rows)
    own = weight + output.to(tl.int64)[:, None] * sizes.columns
    up_from: tl.constexpr = sizes.outputs * sizes.columns if fused.gated else 0
    if overlaps:
        gdc_launch_dependents()
        _prefetch(own, sizes.columns, sizes.fetched)
        if fused.gated:
            _prefetch(own + up_from, sizes.columns, sizes.fetched)
        gdc_wait()
    sums, up = _sums(x, fused.norm, own, row, num_rows, fused.eps, sizes.inputs, up_from, blocks)
    if fused.beside is not None:
        norm = fused.beside_norm
        beside = own + sizes.inputs
        more, _ = _sums(
            fused.beside, norm, beside, row, num_rows, fused.eps, sizes.inputs, 0, blocks
        )
        sums += more
    if fused.scale is not None:
        sums *= tl.load(fused.scale + output)[:, None]
        if fused.gated:
            up *= tl.load(fused.scale + sizes.outputs + output)[:, None]
    if fused.bias is not None:
        sums += tl.load(fused.bias + output).to(tl.float32)[:, None]
    if fused.gated:
        sums = sums / (1 + tl.exp(-sums)) * up
    place = row[None, :] * sizes.outputs + output[:, None]
    present = (row < num_rows)[None, :]
    if fused.residual is not None:
        sums += tl.load(fused.residual + place, mask=present, other=0.0).to(tl.float32)
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
    blocks,
):
    """Return the products of normalized rows by a block of weights, and by the one ``up_from`` it.

    Both ``[outputs, rows]`` float32; the second is 0 where ``up_from`` is.
    """
    column = tl.arange(0, blocks.inputs)
    rows = x + row[:, None] * inputs + column[None, :]
    own = weight + column[None, :]
    sums = tl.zeros([blocks.outputs, blocks.rows], tl.float32)
    up = tl.zeros([blocks.outputs, blocks.rows], tl.float32)
    squares = tl.zeros([blocks.rows, blocks.inputs], tl.float32)  # added up once, at the end
    for begin in tl.range(0, inputs, blocks.inputs, num_stages=blocks.stages):
        given = tl.load(rows + begin, mask=(row < num_rows)[:, None], other=0.0)
        if norm is not None:
            exact = given.to(tl.float32)
            squares += exact * exact
            of_norm = tl.load(norm + begin + column).to(tl.float32)
            given = (exact * of_norm[None, :]).to(given.dtype)
        given = tl.trans(given)
        sums = tl.dot(tl.load(own + begin).to(given.dtype), given, sums)
        if up_from > 0:
            up = tl.dot(tl.load(own + up_from + begin).to(given.dtype), given, up)
    if norm is not None:
        root = tl.rsqrt(tl.sum(squares, 1) / inputs + eps)[None, :]
        sums = sums * root
        up = up * root
    return sums, up


@triton.jit
def _prefetch(rows, columns: tl.constexpr, lines: tl.constexpr):
    """Have the first lines of rows of weights fetched into L2, which nothing waits for."""
    line: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # numbers of 128 bytes
    at = tl.arange(0, lines) * line
    at = tl.minimum(at, columns - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(rows + at).to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
