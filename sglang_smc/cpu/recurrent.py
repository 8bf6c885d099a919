"""Run linear-attention layers on the plain CPU, for prompts and for decoding without SMC.

SGLang's own backend for them needs Triton kernels. States are in SGLang's mamba pool, one for each
request. Particles have a backend of their own (`models.recurrent`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_smc.cpu.attention import columns, row_lengths
from sglang_smc.models.gated_delta import RecurrenceInputs, columns_of, scan

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuRecurrentBackend(AttentionBackend):
    """The gated delta rule over the rows of a batch; eager only (no graph capture)."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.pool: Any = model_runner.req_to_token_pool  # a HybridReqToTokenPool
        # Of the running forward:
        self._slots: torch.Tensor  # [rows] int64 of the mamba pool
        self._has_prefix: torch.Tensor  # [rows] bool
        self._index: torch.Tensor  # [rows, J] int64 tokens of each row; padding repeats the last
        self._real: torch.Tensor  # [rows, J] bool
        self._lengths: torch.Tensor  # [rows] int64

    def supports_prefill_graph_extend(self) -> bool:
        """Return False; SGLang's hybrid backend reads it."""
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Find the rows' states and tokens once, for all layers."""
        if forward_batch.forward_mode.is_idle():
            return
        prefix_lens, lengths = row_lengths(forward_batch)
        assert forward_batch.req_pool_indices is not None, "a batch has rows"
        slots = self.pool.get_mamba_indices(forward_batch.req_pool_indices)
        self._slots = slots.long()
        self._has_prefix = prefix_lens > 0
        self._lengths = lengths
        offset = columns(lengths)
        self._index = (lengths.cumsum(0) - lengths).unsqueeze(1) + offset
        self._real = torch.arange(offset.shape[1]) < lengths.unsqueeze(1)

    def forward_extend(
        self,
        q: None,
        k: None,
        v: None,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Run each row's tokens from its state, and store the state after them.

        Args:
            mixed_qkv: ``[tokens, D]`` before the convolution.
            a, b: ``[tokens, v_heads]`` of the gates.

        Returns:
            ``[1, tokens, v_heads, V]``.
        """
        cache = self.pool.mamba2_layer_cache(layer.layer_id)
        windows = cache.conv[0]  # [slots, D, W - 1]
        states = cache.temporal  # [slots, heads, V, K]
        slots = self._slots
        real = self._real.unsqueeze(2)
        index = self._index
        fresh = ~self._has_prefix.view(-1, 1, 1)
        before = windows[slots].masked_fill(fresh, 0).transpose(1, 2)  # [rows, W - 1, D]
        inputs = torch.cat([before.to(mixed_qkv.dtype), mixed_qkv[index]], dim=1)
        new = columns_of(inputs, layer, a[index], b[index])
        new = RecurrenceInputs(new.qkv, new.decay * real, new.beta * real)
        first = states[slots].float().masked_fill(fresh.unsqueeze(3), 0)
        last, outputs = scan(first, new)
        states[slots] = last.to(states.dtype)
        place = self._lengths.unsqueeze(1) + torch.arange(before.shape[1])  # [rows, W - 1]
        last_inputs = inputs.gather(1, place.unsqueeze(2).expand(-1, -1, inputs.shape[2]))
        windows[slots] = last_inputs.transpose(1, 2).to(windows.dtype)
        return outputs[self._real].unsqueeze(0)

    # Decode is an extend by one token.
    forward_decode = forward_extend  # pyright: ignore[reportAssignmentType] -- another kind of layer
