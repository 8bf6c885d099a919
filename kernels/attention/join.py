"""Join the softmaxes of spans of keys, the last step of attention."""

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.attention.work import MAX_SPANS

NUMBERS_PER_WARP = 1024  # of the tile that a program joins: 32 a thread


def join_spans(
    partial: torch.Tensor,
    log_sums: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
) -> None:
    """Write the joined attention of all spans, in one launch.

    Args:
        partial: ``[spans, tokens, q_heads, head_dim]`` float32, the attention over each span.
        log_sums: ``[spans, tokens, q_heads]`` float32 log-sum-exp of each span, to base 2.
        output: ``[..., q_heads, head_dim]``, contiguous.
        sinks: ``[q_heads]`` scores of a key without a value.
        value_scale: factor of the output.
    """
    spans, tokens, q_heads, head_dim = partial.shape
    assert spans <= MAX_SPANS, "one program joins all"
    block_dim, block_spans = triton.next_power_of_2(head_dim), triton.next_power_of_2(spans)
    _join_spans[(tokens * q_heads,)](
        partial,
        log_sums,
        sinks,
        output,
        tokens * q_heads,
        spans,
        value_scale,
        q_heads=q_heads,
        head_dim=head_dim,
        block_dim=block_dim,
        block_spans=block_spans,
        has_sinks=sinks is not None,
        num_warps=triton.cdiv(block_spans * block_dim, NUMBERS_PER_WARP),
    )


@triton.jit(do_not_specialize=["num_rows", "spans"])
def _join_spans(
    partial_ptr,
    log_sum_ptr,
    sinks_ptr,
    output_ptr,
    num_rows,
    spans,
    value_scale,
    q_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_spans: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Join the spans of one query row per program: [spans, rows, head_dim] to [rows, head_dim].

    It waits for memory twice, for any number of spans: for the log-sums, then for all results of
    nonzero weight. The others need not have been written.
    """
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, block_spans)
    dim = tl.arange(0, block_dim)
    place = span.to(tl.int64) * num_rows + row
    log_sum = tl.load(log_sum_ptr + place, mask=span < spans, other=float("-inf"))
    highest = tl.max(log_sum, 0)
    if has_sinks:
        sink = tl.load(sinks_ptr + row % q_heads).to(tl.float32) * 1.4426950408889634  # log2 e
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(log_sum - tl.where(highest > float("-inf"), highest, 0.0))
    part = tl.load(
        partial_ptr + place[:, None] * head_dim + dim[None, :],
        mask=(weight != 0)[:, None] & (dim < head_dim)[None, :],
        other=0.0,
    )
    total = tl.sum(weight, 0)  # 0 for a padding request without keys
    if has_sinks:
        total += tl.exp2(sink - highest)
    output = tl.sum(part * weight[:, None], 0) / tl.where(total != 0, total, 1.0)
    output *= value_scale
    tl.store(output_ptr + row * head_dim + dim, output, mask=dim < head_dim)
