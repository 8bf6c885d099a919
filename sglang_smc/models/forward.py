"""Run models over particles, on SGLang's model runners."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_smc.models.attention import Implementation, KVLocations, ParticleAttention
from sglang_smc.models.merged_rows import MergedRows, merge_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.model_executor.model_runner import ModelRunner


class ParticleForward:
    """A forward of one model over particles.

    The model is SGLang's own; the attention backend is replaced for the duration of a forward.
    Particles that write a token to the same KV slot have the same text up to there: where shapes
    may depend on values, as in plain torch, the model runs once for each slot.

    Args:
        runner: the target's or the draft's.
        tails, attention: the particles' rows and the implementation, see `ParticleAttention`.
        max_columns: the most tokens of a particle in one forward.
        first_key, blocks: for heads, see `ParticleAttention`.
    """

    def __init__(
        self,
        runner: "ModelRunner",
        tails: torch.Tensor,
        attention: Implementation,
        max_columns: int,
        *,
        first_key: int = 0,
        blocks: bool = False,
    ) -> None:
        self._runner = runner
        self._last_position = runner.model_config.context_len - 1
        self._is_mrope = runner.model_config.model_is_mrope
        self.attn_backend = particle_backend(
            runner, tails, attention, first_key=first_key, blocks=blocks
        )
        self._counts = torch.arange(max_columns + 1, device=tails.device)
        self._merges = attention == "torch"
        self._captured = CaptureHiddenMode.NULL  # hidden states that the forward returns

    def next_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        """Run a chain of C tokens for each particle and return the logits after its last token.

        Args:
            tokens: ``[G, N, C]``.
            starts: ``[G, N]`` position of each chain's first token, at least ``committed - 1``.
            slots: ``[G, N, C]`` int64 KV slots to which the tokens are written; 0 for those that
                are never read, or are written already.
            locations: of the rest of the KV.

        Returns:
            Logits ``[G, N, V]`` float32.
        """
        mode = ForwardMode.DECODE if tokens.shape[2] == 1 else ForwardMode.EXTEND
        output = self._run(mode, tokens, starts, slots, locations)
        return output.next_token_logits.unflatten(0, starts.shape)

    def chain_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        """Return logits ``[G, N, C, V]`` after each token; arguments as in `next_logits`."""
        output = self._run(ForwardMode.TARGET_VERIFY, tokens, starts, slots, locations)
        return output.next_token_logits.unflatten(0, tokens.shape)

    def _run(
        self,
        mode: ForwardMode,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> Any:
        merged = merge_rows(slots, last=mode == ForwardMode.EXTEND) if self._merges else None
        batch = self._batch(mode, tokens, starts, slots, locations, merged)
        with self._attending(locations, starts, tokens.shape[2], merged):
            output = self._runner.model.forward(batch.input_ids, batch.positions, batch)
        if merged is None:
            return output
        of_logits = merged.sequences if mode == ForwardMode.EXTEND else merged.results
        states = output.hidden_states
        return SimpleNamespace(
            next_token_logits=output.next_token_logits[of_logits],
            hidden_states=None if states is None else states[merged.results],
        )

    @contextmanager
    def _attending(
        self,
        locations: KVLocations,
        starts: torch.Tensor,
        num_columns: int,
        merged: MergedRows | None = None,
    ) -> "Iterator[None]":
        """Set this attention backend, planned for a forward, within the block."""
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            self.attn_backend.plan(locations, starts, num_columns, merged)
            yield

    def _batch(
        self,
        mode: ForwardMode,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
        merged: MergedRows | None = None,
    ) -> ForwardBatch:
        """Return the batch for the model's layers; the attention backend uses its plan instead."""
        num_columns = tokens.shape[2]
        first = starts.flatten()
        positions, lengths = starts.unsqueeze(2), None
        if num_columns > 1:
            positions = positions + self._counts[:num_columns]
        if mode == ForwardMode.EXTEND:  # SGLang computes logits for the last token of each row
            lengths = self._counts[num_columns].expand(len(first))
        # Columns past the context's end are never kept, but must not overrun the rotary table.
        positions = positions.flatten().clamp_max(self._last_position)
        tokens, slots, rows = tokens.flatten(), slots.flatten(), locations.particle_rows.flatten()
        if merged is not None:
            tokens, slots, positions = (of[merged.kept] for of in (tokens, slots, positions))
            first, rows = first[merged.particles], rows[merged.particles]
            lengths = None if lengths is None else merged.lengths
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(first),
            input_ids=tokens,
            req_pool_indices=rows,
            out_cache_loc=slots,
            # Read by attention backends alone, and costly to compute.
            seq_lens=first,
            seq_lens_sum=0,
            positions=positions,
            # Time, height and width, which are equal for text.
            mrope_positions=positions.expand(3, -1) if self._is_mrope else None,  # pyright: ignore[reportArgumentType] -- the default
            extend_seq_lens=lengths,
            extend_prefix_lens=first,
            spec_algorithm=self._runner.spec_algorithm,  # pyright: ignore[reportArgumentType] -- any registered one
            capture_hidden_mode=self._captured,
        )


def particle_backend(
    runner: "ModelRunner",
    tails: torch.Tensor,
    implementation: Implementation,
    *,
    first_key: int = 0,
    blocks: bool = False,
) -> ParticleAttention:
    """Return the attention over particles for a model; arguments as in `ParticleAttention`."""
    kind = ParticleAttention
    if runner.use_mla_backend:
        from sglang_smc.models.latent_attention import LatentParticleAttention

        kind = LatentParticleAttention
    return kind(runner, tails, implementation, first_key=first_key, blocks=blocks)
