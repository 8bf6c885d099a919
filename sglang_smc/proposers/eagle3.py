"""Draft with EAGLE-3 heads (arXiv 2503.01840), run over particles on SGLang's model class.

A head reads pairs: a token x_i, and the target's hidden state at the token before it. From a pair
it returns the distribution of x_{i+1}. Within a round it takes its own output in place of the
hidden state, until the target has scored the draft tokens. So each draft token is run twice: on the
head's own state while the round drafts, and on the target's hidden state right after the target's
pass. The second run overwrites the keys of the first, and later rounds attend to it.

SGLang stores the key of a pair at the position of its hidden state, one before its token. Here it
is stored in the slot of its token: two particles with the same prefix and different last tokens
have different slots there, and a cached prefix is valid for any continuation. The first token of a
sequence has no hidden state before it and therefore no key, and attention skips its position.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sglang_smc.kv.sizes import tensor_bytes
from sglang_smc.models.attention import Implementation, KVLocations
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.merged_rows import MergedRows, merge_rows
from sglang_smc.proposers.base import DraftSlots
from sglang_smc.proposers.hidden_states import StateTable

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_smc.models.recorder import PassRecording


class Given(NamedTuple):
    """The fields that SGLang's heads read from a batch's ``spec_info``."""

    hidden_states: torch.Tensor  # [rows, F] of the target, or [rows, H] of the head itself


class EagleForward(ParticleForward):
    """An EAGLE-3 head over particles.

    Args:
        runner, tails, attention, max_columns: see `ParticleForward`.
    """

    def __init__(
        self,
        runner: "ModelRunner",
        tails: torch.Tensor,
        attention: Implementation,
        max_columns: int,
    ) -> None:
        super().__init__(runner, tails, attention, max_columns, first_key=1)
        self._captured = CaptureHiddenMode.FULL
        self._model: Any = runner.model
        self._given: Given

    def laws(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pair for each particle.

        Args:
            tokens, slots: ``[G, N]`` tokens, and the KV slots to which their keys are written.
            states: ``[G, N, F]`` or ``[G, N, H]`` hidden states before them.
            starts: ``[G, N]`` their positions.
            locations: as in `ParticleForward.next_logits`.

        Returns:
            Logits ``[G, N, draft vocabulary]``, and the head's own states ``[G, N, H]``.
        """
        self._given = Given(states.flatten(0, 1))
        one = tokens.unsqueeze(2), starts, slots.unsqueeze(2), locations
        output = self._run(ForwardMode.DECODE, *one)
        shape = starts.shape
        own = output.hidden_states.unflatten(0, shape)
        return output.next_token_logits.unflatten(0, shape), own

    def read(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> None:
        """Run C pairs for each particle, to write their keys alone.

        Args:
            tokens, slots: ``[G, N, C]``.
            states: ``[G, N, C, F]`` hidden states before them.
            starts, locations: as in `laws`.
        """
        self._given = Given(states.flatten(0, 2))
        merged = merge_rows(slots, last=False) if self._merges else None
        batch = self._batch(ForwardMode.EXTEND, tokens, starts, slots, locations, merged)
        with self._attending(locations, starts, tokens.shape[2], merged):
            self._model.model(batch.input_ids, batch.positions, batch)

    def _batch(
        self,
        mode: ForwardMode,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
        merged: MergedRows | None = None,
    ) -> ForwardBatch:
        batch = super()._batch(mode, tokens, starts, slots, locations, merged)
        batch.positions = places_of_pairs(batch.positions)
        if self._is_mrope:
            batch.mrope_positions = batch.positions.expand(3, -1)
        if merged is not None:
            self._given = Given(self._given.hidden_states[merged.kept])
        batch.spec_info = self._given  # pyright: ignore[reportAttributeAccessIssue] -- heads read `Given`
        return batch


def places_of_pairs(positions: torch.Tensor) -> torch.Tensor:
    """Return the positions at which heads are trained on pairs, one before the token; int64."""
    return (positions - 1).clamp_min(0)


class EagleHead:
    """A draft by an EAGLE-3 head, with chains that are sampled token by token.

    Args:
        forward: the head over particles.
        table: the target's hidden states.
        hot: ``[draft vocabulary]`` int64 target token ids of the draft vocabulary; None for all.
        vocab_size: V, of the target's logits.
    """

    at_once = False
    has_stock_passes = False  # SGLang's own passes have no hidden states to read

    def __init__(
        self,
        forward: EagleForward,
        table: StateTable,
        hot: torch.Tensor | None,
        vocab_size: int,
    ) -> None:
        self._forward = forward
        self._table = table
        self._hot = hot
        self._vocab_size = vocab_size
        self._own: torch.Tensor  # [G, N, H] states of the running round

    @property
    def attn_backend(self) -> Any:
        """Return the head's attention over particles."""
        return self._forward.attn_backend

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the table of hidden states."""
        return tensor_bytes((self._table.states, self._table.readers))

    def begin(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Run the last token with the target's hidden state before it; see `Proposal.begin`."""
        states = self._table.before(at.positions[1], at.locations.particle_rows)
        return self._laws(last_two[:, :, 1], states, 1, at)

    def go_on(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Run the draft tokens with the head's own states; see `Proposal.go_on`."""
        return self._laws(tokens, self._own, step + 1, at)

    def _laws(
        self, tokens: torch.Tensor, states: torch.Tensor, column: int, at: DraftSlots
    ) -> torch.Tensor:
        where = at.positions[column], at.slots[column], at.locations
        logits, self._own = self._forward.laws(tokens, states, *where)
        return spread(logits, self._hot, self._vocab_size)

    def recorded(self, recording: "PassRecording") -> "EagleHead":
        """Return this object: its states go from pass to pass, outside of any capture."""
        return self

    def read_chains(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
        states: torch.Tensor,
    ) -> None:
        """Run the head over chains but their first pair; see `ReadsStates.read_chains`."""
        if tokens.shape[2] > 1:
            self._forward.read(
                tokens[:, :, 1:], states[:, :, :-1], starts + 1, slots[:, :, 1:], locations
            )
        self._table.keep(slots, locations.particle_rows, states)


def spread(logits: torch.Tensor, hot: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Scatter logits ``[..., H]`` of the draft vocabulary to ``[..., V]``; all others get -inf.

    Args:
        hot: ``[H]`` int64 token ids; None for the first H.
    """
    if hot is None and logits.shape[-1] == vocab_size:
        return logits
    every = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    if hot is None:
        every[..., : logits.shape[-1]] = logits
        return every
    return every.index_copy_(-1, hot, logits)
