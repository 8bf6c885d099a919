"""Model forwards over particles, on SGLang's model runners.

A particle is a row of `req_to_token` like any request, so the stock models and
attention backends serve it; there are only N times more rows than SGLang sized
its own buffers for. Hence an attention backend of our own beside the runner's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

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


class Places(NamedTuple):
    """Where the particles of a forward stand in `req_to_token`."""

    rows: torch.Tensor  # [G] the requests' own: their text is the prefix that particles share
    committed: torch.Tensor  # [G] its length
    particle_rows: torch.Tensor  # [G, N] where the tails stand, from position `committed` on
    max_tail: int  # no particle has more keys behind the prefix, the new tokens included


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

    def next_logits(
        self, tokens: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, places: Places
    ) -> torch.Tensor:
        """What follows a chain of tokens: like `chain_logits`, of the last column ``[G, N, V]``."""
        if tokens.shape[2] > 1:
            return self.chain_logits(tokens, starts, slots, places)[:, :, -1]
        rows, starts = places.particle_rows.flatten(), starts.flatten()
        logits = self._run(ForwardMode.DECODE, tokens, rows, starts + 1, starts, slots)
        return logits.view(*tokens.shape[:2], -1)

    def chain_logits(
        self, tokens: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, places: Places
    ) -> torch.Tensor:
        """A chain of tokens for each particle, in one pass.

        Args:
            tokens: ``[G, N, C]``.
            starts: ``[G, N]`` position of each chain's first token, ``committed - 1`` or later.
            slots: ``[G, N, C]`` where their KV goes; 0 is nowhere.

        Returns:
            Logits ``[G, N, C, V]``.
        """
        width, starts = tokens.shape[2], starts.flatten()
        columns = starts.unsqueeze(1) + torch.arange(width, device=tokens.device)
        chain = DFlashVerifyInput(
            draft_token=tokens.flatten(),
            positions=columns.flatten(),
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        rows = places.particle_rows.flatten()
        logits = self._run(
            ForwardMode.TARGET_VERIFY, tokens, rows, starts, columns, slots, spec_info=chain
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
