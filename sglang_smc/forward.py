"""Model forwards over particles, on SGLang's model runners.

A particle is a row of `req_to_token` like any request, so the stock models and
attention backends serve it; there are only N times more rows than SGLang sized
its own buffers for. Hence an attention backend of our own beside the runner's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner


class ParticleForward:
    """Runs one model over rows of particles, eagerly.

    Args:
        runner: the target's or the draft's.
        max_rows: particles that can run at once.
    """

    def __init__(self, runner: "ModelRunner", max_rows: int) -> None:
        self._runner = runner
        self._last_position = runner.model_config.context_len - 1
        with _pool_of_size(runner.req_to_token_pool, max_rows):
            self.attn_backend = runner._get_attention_backend()

    def decode(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """One token a row; all arguments ``[R]``, logits ``[R, V]``."""
        return self._run(ForwardMode.DECODE, tokens, rows, positions + 1, positions, slots)

    def verify(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """A chain of C tokens a row in one pass.

        Args:
            tokens, slots: ``[R, C]``.
            rows, positions: ``[R]``; a chain's first token stands at its row's position.

        Returns:
            Logits ``[R, C, V]``.
        """
        width = tokens.shape[1]
        columns = positions.unsqueeze(1) + torch.arange(width, device=tokens.device)
        chain = DFlashVerifyInput(
            draft_token=tokens.flatten(),
            positions=columns.flatten(),
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        logits = self._run(
            ForwardMode.TARGET_VERIFY, tokens, rows, positions, columns, slots, spec_info=chain
        )
        return logits.view(*tokens.shape, -1)

    def _run(
        self,
        mode: ForwardMode,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        spec_info: DFlashVerifyInput | None = None,
    ) -> torch.Tensor:
        seq_lens_cpu = seq_lens.cpu()
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=tokens.flatten(),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots.flatten(),
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            # Columns past the context's end are never kept; they only must not overrun the
            # rotary table.
            positions=positions.flatten().clamp_max(self._last_position),
            spec_algorithm=self._runner.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            self.attn_backend.init_forward_metadata(batch)
            output = self._runner.model.forward(batch.input_ids, batch.positions, batch)
        return output.next_token_logits


@contextmanager
def _pool_of_size(pool: "ReqToTokenPool", size: int) -> Iterator[None]:
    """Attention backends size their row buffers by the pool's nominal size as they are built."""
    nominal, pool.size = pool.size, size
    try:
        yield
    finally:
        pool.size = nominal
