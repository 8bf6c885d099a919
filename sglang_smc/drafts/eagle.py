"""EAGLE-3 heads (arXiv 2503.01840), run over particles as SGLang's class has them.

A head reads pairs: a token x_i, and the target's state at the token before it. Behind one it tells
the law of x_{i+1}; further on it reads its own output in place of the state, until the target has
read what was drafted. So there are two readings of a drafted token: its own, as the round drafts,
and that of the target's states, right behind the target's pass. The second is written over the
first, and is what later rounds see.

SGLang keeps the key of a pair at the place of its state, one before its token. Here it has the slot
of its token: two particles that share a text and part at its last token have that token's slots
apart, and a prefix in the radix cache means the same to whoever goes on from it. The first token of
a text has no state before it, hence no key, and attention leaves its place out.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sglang_smc.drafts.proposal import DraftSlots
from sglang_smc.drafts.states import StateTable
from sglang_smc.memory.measured import tensor_bytes
from sglang_smc.models.attention import Implementation, KVLocations
from sglang_smc.models.forward import ParticleForward

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_smc.recording.passes import PassRecording


class Given(NamedTuple):
    """What SGLang's heads ask of a batch's ``spec_info``."""

    hidden_states: torch.Tensor  # [rows, F] of the target, or [rows, H] of the head itself


class EagleForward(ParticleForward):
    """A head over particles.

    Args:
        runner, tails, attention, max_columns: as for `ParticleForward`.
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
        """Read one pair for each particle.

        Args:
            tokens, slots: ``[G, N]`` and where their keys go.
            states: ``[G, N, F]`` or ``[G, N, H]`` before them.
            starts: ``[G, N]`` their positions.
            locations: as for `ParticleForward.next_logits`.

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
        """Read C pairs for each particle, for their keys alone; ``[G, N, C]``, states likewise."""
        self._given = Given(states.flatten(0, 2))
        batch = self._batch(ForwardMode.EXTEND, tokens, starts, slots, locations)
        with self._attending(locations, starts, tokens.shape[2]):
            self._model.model(batch.input_ids, batch.positions, batch)

    def _batch(
        self,
        mode: ForwardMode,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> ForwardBatch:
        batch = super()._batch(mode, tokens, starts, slots, locations)
        batch.positions = places_of_pairs(batch.positions)
        if self._is_mrope:
            batch.mrope_positions = batch.positions.expand(3, -1)
        batch.spec_info = self._given  # pyright: ignore[reportAttributeAccessIssue] -- as said
        return batch


def places_of_pairs(positions: torch.Tensor) -> torch.Tensor:
    """Where heads were trained to see pairs: at the state, one before the token; int64."""
    return (positions - 1).clamp_min(0)


class EagleHead:
    """Drafts by an EAGLE-3 head, chains that are drawn one by one.

    Args:
        forward: the head over particles.
        table: of the target's states.
        hot: ``[draft vocabulary]`` int64 tokens that the head knows; None for all.
        vocab_size: V, of the target's logits.
    """

    at_once = False
    has_stock_passes = False  # they have no states to read

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
        """The head's, over particles."""
        return self._forward.attn_backend

    @property
    def state_bytes(self) -> int:
        """The target's states, and who has read which slot."""
        return tensor_bytes((self._table.states, self._table.readers))

    def begin(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """See `Proposal`: the last token, and the target's state before it."""
        states = self._table.before(at.positions[1], at.locations.particle_rows)
        return self._laws(last_two[:, :, 1], states, 1, at)

    def go_on(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """See `Proposal`: what was drafted, and the head's own state."""
        return self._laws(tokens, self._own, step + 1, at)

    def _laws(
        self, tokens: torch.Tensor, states: torch.Tensor, column: int, at: DraftSlots
    ) -> torch.Tensor:
        where = at.positions[column], at.slots[column], at.locations
        logits, self._own = self._forward.laws(tokens, states, *where)
        return spread(logits, self._hot, self._vocab_size)

    def recorded(self, recording: "PassRecording") -> "EagleHead":
        """The same: its own states go from pass to pass, which recordings of one would not."""
        return self

    def read_chains(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
        states: torch.Tensor,
    ) -> None:
        """See `ReadsStates`. The first token's pair has been read, with the state before it."""
        if tokens.shape[2] > 1:
            self._forward.read(
                tokens[:, :, 1:], states[:, :, :-1], starts + 1, slots[:, :, 1:], locations
            )
        self._table.keep(slots, locations.particle_rows, states)


def spread(logits: torch.Tensor, hot: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits of hot tokens ``[..., H]`` as those of all ``[..., V]``; others get -inf.

    Args:
        hot: ``[H]`` int64 tokens; None: the first H.
    """
    if hot is None and logits.shape[-1] == vocab_size:
        return logits
    every = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    if hot is None:
        every[..., : logits.shape[-1]] = logits
        return every
    return every.index_copy_(-1, hot, logits)
