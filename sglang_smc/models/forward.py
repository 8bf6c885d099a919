"""Run models over particles, on SGLang's model runners."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc import upstream
from sglang_smc.models.attention import Implementation, KeysWritten, ParticleAttention
from sglang_smc.models.chains import Chains, MergedRows, merge_rows
from sglang_smc.models.rotary import leave_rotations
from sglang_smc.upstream import kv_layers


class ParticleForward:
    """A forward of one model over particles.

    The model is SGLang's own; the attention backend is replaced for the duration of a forward, and
    rotates queries and keys where it can (`leave_rotations`).
    Particles that write a token to the same KV slot have the same text up to there: where shapes
    may depend on values, as in plain torch, the model runs once for each slot.

    ``max_columns`` is the most tokens of a particle in one forward; the other arguments are as in
    `ParticleAttention`.
    """

    # For heads: see `ParticleAttention`, and the hidden states that the forward returns.
    _first_key = 0
    _blocks = False
    _captured = CaptureHiddenMode.NULL

    def __init__(
        self, runner: ModelRunner, tails: torch.Tensor, attention: Implementation, max_columns: int
    ) -> None:
        self._runner = runner
        self._lora = upstream.lora_manager(runner)
        self._last_position = runner.model_config.context_len - 1
        self._is_mrope = runner.model_config.model_is_mrope
        self._shifts: torch.Tensor | None = None
        if self._is_mrope and runner.model_config.is_multimodal:
            # Of rotary positions against positions, by row: an image's tokens share some.
            rows = len(runner.req_to_token_pool.req_to_token)  # pyright: ignore[reportOptionalMemberAccess] -- built before
            self._shifts = torch.zeros(rows, dtype=torch.int64, device=tails.device)
        self.attn_backend = ParticleAttention(
            runner, tails, attention, first_key=self._first_key, blocks=self._blocks
        )
        leave_rotations(runner.model, self.attn_backend)
        self._counts = torch.arange(max_columns + 1, device=tails.device)
        self.merges = attention == "torch"  # rows of one slot are run once

    def next_logits(self, chains: Chains) -> torch.Tensor:
        """Run chains, and return the logits ``[G, N, V]`` float32 after the last token of each."""
        mode = ForwardMode.DECODE if chains.tokens.shape[2] == 1 else ForwardMode.EXTEND
        return self._run(mode, chains).next_token_logits.unflatten(0, chains.starts.shape)

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        """Run chains, and return the logits ``[G, N, C, V]`` after each token."""
        output = self._run(ForwardMode.TARGET_VERIFY, chains)
        return output.next_token_logits.unflatten(0, chains.tokens.shape)

    def write_keys(self, chains: Chains) -> None:
        """Run chains up to the last layer's keys, without attention there, or logits."""
        merged = merge_rows(chains.slots, last=False) if self.merges else None
        batch = self._batch(ForwardMode.EXTEND, chains, merged)
        self.attn_backend.ends_at = kv_layers(self.attn_backend.token_to_kv_pool)[-1]
        try:
            with suppress(KeysWritten), self._attending(chains, merged):
                self._runner.model.forward(batch.input_ids, batch.positions, batch)
        finally:  # memory that runs out is tried again, by whole passes too
            self.attn_backend.ends_at = None

    def of_tokens(self, buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Copy what `chain_logits` has left in a buffer, by token.

        Args:
            buffer: its first rows are those of the model's batch.
            slots: ``[G, N, C]`` of the chains.

        Returns:
            ``[G, N, C, ...]``.
        """
        merged = merge_rows(slots, last=False) if self.merges else None
        found = buffer[: slots.numel()].clone() if merged is None else buffer[merged.results]
        return found.unflatten(0, slots.shape)

    def init_from_prompt(self, batch: ScheduleBatch) -> None:
        """Start the particles of prefilled prompts, where a model keeps more of them than KV."""
        self._shift(batch.req_pool_indices, batch.reqs)

    def _shift(
        self, rows: torch.Tensor, reqs: Sequence[Req], at: torch.Tensor | None = None
    ) -> None:
        """Set the shifts of requests at positions ``at``, ``[R]``; None: after their prompts."""
        if self._shifts is None:
            return
        places = [None] * len(reqs) if at is None else at.tolist()
        pairs = zip(reqs, places, strict=True)
        shifts = [_shift_at(req.multimodal_inputs, place) for req, place in pairs]
        self._shifts[rows] = torch.tensor(shifts, device=self._shifts.device)

    def _run(self, mode: ForwardMode, chains: Chains) -> Any:
        is_last = mode == ForwardMode.EXTEND
        merged = merge_rows(chains.slots, last=is_last) if self.merges else None
        batch = self._batch(mode, chains, merged)
        self._adapt(batch, chains, merged)
        with self._attending(chains, merged):
            output = self._runner.model.forward(batch.input_ids, batch.positions, batch)
        if merged is None:
            return output
        states = output.hidden_states
        return SimpleNamespace(
            next_token_logits=output.next_token_logits[
                merged.sequences if is_last else merged.results
            ],
            hidden_states=None if states is None else states[merged.results],
        )

    def _adapt(self, batch: ForwardBatch, chains: Chains, merged: MergedRows | None) -> None:
        """Load the requests' LoRA adapters, and choose that of each row.

        SGLang does it as it builds a batch of its own, and leaves it to the layers until the next.
        """
        if self._lora is None:
            return
        width = chains.tokens[0].numel()
        adapters = [req.lora_id for req in chains.reqs] or [None] * len(chains.tokens)
        self._lora.fetch_new_loras(set(adapters))
        if merged is not None:  # requests have different numbers of rows
            adapters = [adapters[row // width] for row in merged.kept.tolist()]
            width = 1
        of_rows: Any = replace(batch, batch_size=len(adapters), lora_ids=adapters)
        # The mode in which SGLang takes all requests to have as many rows, each with logits.
        of_rows.forward_mode = ForwardMode.TARGET_VERIFY
        of_rows.spec_info = SimpleNamespace(draft_token_num=width)
        self._lora.prepare_lora_batch(of_rows)

    @contextmanager
    def _attending(self, chains: Chains, merged: MergedRows | None = None) -> Iterator[None]:
        """Set this attention backend, planned for a forward, within the block."""
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            self.attn_backend.plan(chains, merged)
            yield

    def _batch(
        self, mode: ForwardMode, chains: Chains, merged: MergedRows | None = None
    ) -> ForwardBatch:
        """Return the batch for the model's layers; the attention backend uses its plan instead."""
        num_columns = chains.tokens.shape[2]
        first = chains.starts.flatten()
        positions = chains.starts.unsqueeze(2)
        lengths = None
        if num_columns > 1:
            positions = positions + self._counts[:num_columns]
        if mode == ForwardMode.EXTEND:  # SGLang computes logits for the last token of each row
            lengths = self._counts[num_columns].expand(len(first))
        # Columns past the context's end are never kept, but must not overrun the rotary table.
        positions = positions.flatten().clamp_max(self._last_position)
        rotary = positions if self._is_mrope else None
        if self._shifts is not None:
            num_rows = chains.tokens[0].numel()  # of a request
            of_each = self._shifts[chains.locations.rows].repeat_interleave(num_rows)
            rotary = positions + of_each
        tokens = chains.tokens.flatten()
        slots = chains.slots.flatten()
        rows = chains.locations.particle_rows.flatten()
        if merged is not None:
            tokens, slots, positions = (of[merged.kept] for of in (tokens, slots, positions))
            rotary = None if rotary is None else rotary[merged.kept]
            first = first[merged.particles]
            rows = rows[merged.particles]
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
            mrope_positions=None if rotary is None else rotary.expand(3, -1),  # pyright: ignore[reportArgumentType] -- the default
            extend_seq_lens=lengths,
            extend_prefix_lens=first,
            spec_algorithm=self._runner.spec_algorithm,  # pyright: ignore[reportArgumentType] -- any registered one
            capture_hidden_mode=self._captured,
        )


def _shift_at(seen: MultimodalInputs | None, position: int | None) -> int:
    """Return the rotary position less the position of a token; of an image's, in time."""
    if seen is None or seen.mrope_position_delta is None:
        return 0
    known = seen.mrope_positions
    if position is not None and known is not None and position < known.shape[1]:
        return int(known[0, position]) - position
    return int(seen.mrope_position_delta)
