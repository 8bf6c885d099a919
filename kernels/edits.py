"""Apply penalties, biases and min_new_tokens in one pass over the logits of requests that set them.

Each program owns one tile of one row: it counts the tokens of the row's sequence that lie in its
tile, and writes nothing else. So the order of programs does not matter, and nothing as wide as the
vocabulary is allocated.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.tensors import as_float, check_contiguous, contiguous, tiles
from sglang_smc.smc.edits import EditColumns, Edits

_TILE = 2048  # logits per program; a row of 152k has 75 tiles
_BLOCK = tl.constexpr(32)  # tokens of a sequence that a program loads at once


def edit_logits(logits: torch.Tensor, edits: Edits, drafts: torch.Tensor, first: int) -> None:
    """Edit logits of either model, in place; those of requests without edits are unchanged.

    Reference: `sglang_smc.smc.edits.edit_logits`, same arguments, bit-identical up to a compiler's
    fusion of products and sums.
    """
    check_contiguous(logits)
    num_groups, num_particles, num_columns, vocab_size = logits.shape
    tile, num_tiles = tiles(vocab_size, _TILE)
    rows = _Rows(
        logits,
        logits.stride(0),
        logits.stride(1),
        logits.stride(2),
        vocab_size,
        edits.columns,
        *contiguous((edits.rows, edits.min_new_tokens, edits.stop_mask, edits.starts)),
    )
    texts = edits.texts.flatten(0, 1)  # a view of a population's texts
    drafts, lengths = contiguous((drafts, edits.lengths))
    _edit[(num_groups * num_particles * num_columns, num_tiles)](
        rows,
        _Texts(texts, as_float(texts.stride(0)), texts.stride(1), lengths),
        drafts,
        drafts.shape[2],
        first,
        num_particles,
        num_columns,
        tile=tile,
        num_warps=8,
    )


class _Rows(NamedTuple):
    """The logits ``[G, N, C, V]``, and their edits."""

    logits: torch.Tensor
    group_stride: int
    particle_stride: int
    column_stride: int
    vocab_size: int
    columns: EditColumns
    rows: torch.Tensor
    min_new_tokens: torch.Tensor
    stop_mask: torch.Tensor
    starts: torch.Tensor


class _Texts(NamedTuple):
    """Sequences, and their lengths."""

    tokens: torch.Tensor
    stride: float  # see `as_float`
    token_stride: int
    lengths: torch.Tensor


def count_tokens(
    columns: EditColumns, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Count newly emitted tokens, for the requests that penalize.

    Reference: `sglang_smc.smc.edits.count_tokens`, same arguments, equal counts: sums of integers
    do not depend on their order.
    """
    _count[(len(rows),)](
        columns,
        rows.contiguous(),
        _Texts(tokens, as_float(tokens.stride(0)), tokens.stride(1), lengths.contiguous()),
        columns.counts.shape[1],
        num_warps=1,
    )


@triton.jit
def _counted(counts, tokens, text, stride, length, lowest, tile: tl.constexpr):
    """Add each token's number of occurrences in a sequence, for a tile from token ``lowest``."""
    for start in range(0, length, _BLOCK):
        place = start + tl.arange(0, _BLOCK)
        some = tl.load(text + place * stride, mask=place < length, other=-1)
        if tl.max(((some >= lowest) & (some < lowest + tile)).to(tl.int32), 0) > 0:
            for one in range(start, tl.minimum(start + _BLOCK, length)):
                counts += (tokens == tl.load(text + one * stride).to(tl.int32)).to(tl.int32)
    return counts


@triton.jit
def _penalized(values, counts, rates):
    """Apply penalties as the reference does, with torch's rounding of the division."""
    occurs = counts > 0
    lowered = values - (
        tl.load(rates) * counts.to(tl.float32) + tl.load(rates + 1) * occurs.to(tl.float32)
    )
    factor = tl.where(occurs, tl.load(rates + 2), 1.0)
    return tl.where(lowered < 0, lowered * factor, tl.div_rn(lowered, factor))


@triton.jit(do_not_specialize=["num_drafted", "first", "num_particles", "num_columns"])
def _edit(
    rows,
    texts,
    drafts,
    num_drafted,
    first,
    num_particles,
    num_columns,
    tile: tl.constexpr,
):
    own = tl.program_id(0) // num_columns  # the text, in [G, N]
    column = tl.program_id(0) % num_columns
    group = own // num_particles
    particle = own % num_particles
    row = tl.load(rows.rows + group)  # int64, since it is multiplied by the vocabulary size
    place = first + column  # drafts before this row
    is_penalized = tl.load(rows.columns.penalizes + row) != 0
    is_biased = tl.load(rows.columns.biases + row) != 0
    is_early = tl.load(rows.starts + own) + place < tl.load(rows.min_new_tokens + group)
    if is_penalized | is_biased | is_early:
        lowest = tl.program_id(1) * tile
        tokens = lowest + tl.arange(0, tile)
        inside = tokens < rows.vocab_size
        at = row * rows.vocab_size + tokens
        logits = rows.logits + group.to(tl.int64) * rows.group_stride
        logits += particle.to(tl.int64) * rows.particle_stride
        logits += column.to(tl.int64) * rows.column_stride
        values = tl.load(logits + tokens, mask=inside, other=0.0).to(tl.float32)
        if is_penalized:
            found = tl.load(rows.columns.counts + at, mask=inside, other=0)
            length = tl.load(texts.lengths + own).to(tl.int32)
            text = texts.tokens + own * tl.cast(texts.stride, tl.int32)
            stride = texts.token_stride
            found = _counted(found, tokens, text, stride, length, lowest, tile)
            draft = drafts + own * num_drafted
            found = _counted(found, tokens, draft, 1, place, lowest, tile)
            values = _penalized(values, found, rows.columns.rates + row * 3)
        if is_biased:
            values += tl.load(rows.columns.bias + at, mask=inside, other=0.0)
        if is_early:
            of_group = rows.stop_mask + group.to(tl.int64) * rows.vocab_size
            stops = tl.load(of_group + tokens, mask=inside, other=0) != 0
            values = tl.where(stops, -float("inf"), values)
        tl.store(logits + tokens, values.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _count(columns, rows, texts, vocab_size):
    group = tl.program_id(0)
    row = tl.load(rows + group)
    if tl.load(columns.penalizes + row) != 0:
        length = tl.load(texts.lengths + group).to(tl.int32)
        for start in range(0, length, _BLOCK):
            place = start + tl.arange(0, _BLOCK)
            inside = place < length
            text = texts.tokens + group * tl.cast(texts.stride, tl.int32)
            token = tl.load(text + place * texts.token_stride, mask=inside)
            tl.atomic_add(columns.counts + row * vocab_size + token, 1, mask=inside, sem="relaxed")
