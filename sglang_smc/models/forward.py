"""Model forwards over particles, on SGLang's model runners."""

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_smc.models.attention import Implementation, KVLocations, ParticleAttention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.model_executor.model_runner import ModelRunner


class ParticleForward:
    """Runs one model over particles.

    The models are stock; the attention backend is ours, for the duration of a forward.

    Args:
        runner: the target's or the draft's.
        tails, attention: the particles' rows and how to attend, see `ParticleAttention`.
        max_columns: no forward has more tokens a particle.
        first_key, blocks: what heads ask of attention, see there.
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
        self._captured = CaptureHiddenMode.NULL  # of the states of all tokens

    def next_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        """Run a chain of C tokens for each particle and tell what comes after its last.

        Args:
            tokens: ``[G, N, C]``.
            starts: ``[G, N]`` position of each chain's first token, at least ``committed - 1``.
            slots: ``[G, N, C]`` int64, where the tokens' KV goes; 0 for what nobody will read, or
                what stands there already.
            locations: where the rest of the KV stands.

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
        """Logits ``[G, N, C, V]`` after each token of a chain; arguments as for `next_logits`."""
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
        batch = self._batch(mode, tokens, starts, slots, locations)
        with self._attending(locations, starts, tokens.shape[2]):
            return self._runner.model.forward(batch.input_ids, batch.positions, batch)

    @contextmanager
    def _attending(
        self, locations: KVLocations, starts: torch.Tensor, num_columns: int
    ) -> "Iterator[None]":
        """Over particles, within the block."""
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            self.attn_backend.plan(locations, starts, num_columns)
            yield

    def _batch(
        self,
        mode: ForwardMode,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> ForwardBatch:
        """What the model's layers look at; our attention has its plan instead."""
        num_columns = tokens.shape[2]
        first = starts.flatten()
        positions, lengths = starts.unsqueeze(2), None
        if num_columns > 1:
            positions = positions + self._counts[:num_columns]
        if mode == ForwardMode.EXTEND:  # SGLang computes logits for the last token of each row
            lengths = self._counts[num_columns].expand(len(first))
        # Columns past the context's end are never kept; they only must not overrun the rotary
        # table.
        positions = positions.flatten().clamp_max(self._last_position)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(first),
            input_ids=tokens.flatten(),
            req_pool_indices=locations.particle_rows.flatten(),
            out_cache_loc=slots.flatten(),
            # For attention backends alone, and not to be had for nothing.
            seq_lens=first,
            seq_lens_sum=0,
            positions=positions,
            # Time, height and width, which are one thing for text.
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
    """The attention over particles that a model asks for; arguments as for `ParticleAttention`."""
    kind = ParticleAttention
    if runner.use_mla_backend:
        from sglang_smc.models.latents import LatentParticleAttention

        kind = LatentParticleAttention
    return kind(runner, tails, implementation, first_key=first_key, blocks=blocks)
