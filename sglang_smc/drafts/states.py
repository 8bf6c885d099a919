"""The target's states, which heads read: taken from its passes, and kept where a round needs them.

A state is what some of the target's layers pass on at a token, one behind the other: F numbers. The
model classes of SGLang give them out where they are told which layers.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_smc.models.attention import Implementation, KVLocations, lead_in, slots_before
from sglang_smc.models.forward import ParticleForward

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class ReadsStates(Protocol):
    """A head, as the target's passes see it."""

    def read_chains(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
        states: torch.Tensor,
    ) -> None:
        """Read what the target has just read.

        Args:
            tokens, starts, slots, locations: of the pass, as for `ParticleForward.chain_logits`.
            states: ``[G, N, C, F]`` at these tokens.
        """
        ...


class ReadTarget(ParticleForward):
    """A target whose states go to a head.

    Args:
        runner, tails, attention, max_columns: as for `ParticleForward`.
        reader: the head.
    """

    def __init__(
        self,
        runner: "ModelRunner",
        tails: torch.Tensor,
        attention: Implementation,
        max_columns: int,
        reader: ReadsStates,
    ) -> None:
        super().__init__(runner, tails, attention, max_columns)
        self._captured = CaptureHiddenMode.FULL
        self._reader = reader

    def chain_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        """As `ParticleForward.chain_logits`; the head has read the chains, too, behind it."""
        output = self._run(ForwardMode.TARGET_VERIFY, tokens, starts, slots, locations)
        states = output.hidden_states.unflatten(0, tokens.shape)  # [G, N, C, F]
        self._reader.read_chains(tokens, starts, slots, locations, states)
        return output.next_token_logits.unflatten(0, tokens.shape)

    def states_at(
        self, tokens: torch.Tensor, positions: torch.Tensor, locations: KVLocations
    ) -> torch.Tensor:
        """States ``[R, F]`` at tokens that the target has read before.

        Args:
            tokens, positions: ``[R]`` int64, the last committed one of each of R requests.
            locations: of these requests, with one particle each, and ``committed`` behind the
                tokens: their own keys are there.
        """
        shown = tokens.view(-1, 1, 1)
        nowhere = torch.zeros_like(shown)  # the padding slot takes keys that stand elsewhere
        starts = positions.unsqueeze(1)
        output = self._run(ForwardMode.TARGET_VERIFY, shown, starts, nowhere, locations)
        return output.hidden_states


class StateTable(NamedTuple):
    """The states of each particle's last chain, found by the slot of one of its tokens.

    Nothing is copied as particles descend: the ledger hands slots down.
    """

    states: torch.Tensor  # [P * C, F] of P particles, those of a request together
    readers: torch.Tensor  # [KV slots] int64: the row above of who read the slot last
    tails: torch.Tensor  # `Ledger.tails`
    num_columns: int  # C

    @classmethod
    def of(
        cls,
        tails: torch.Tensor,
        *,
        num_columns: int,
        num_slots: int,
        width: int,
        dtype: torch.dtype,
    ) -> "StateTable":
        """A table of zeros.

        Args:
            tails: `Ledger.tails`, a row for each of the P particles.
            num_columns: C, the most of a chain.
            num_slots: of KV, the padding slot 0 included.
            width, dtype: of states.
        """
        return cls(
            torch.zeros(len(tails) * num_columns, width, dtype=dtype, device=tails.device),
            torch.zeros(num_slots, dtype=torch.int64, device=tails.device),
            tails,
            num_columns,
        )

    def before(self, starts: torch.Tensor, particle_rows: torch.Tensor) -> torch.Tensor:
        """States ``[G, N, F]`` at the token before positions ``[G, N]``, of rows ``[G, N]``."""
        return self.states[self.readers[slots_before(self.tails, particle_rows, starts)]]

    def keep(self, slots: torch.Tensor, particle_rows: torch.Tensor, states: torch.Tensor) -> None:
        """Keep states ``[G, N, C, F]`` of tokens in ``slots`` ``[G, N, C]``."""
        column = torch.arange(slots.shape[2], device=slots.device)
        place = particle_rows.unsqueeze(2) * self.num_columns + column  # [G, N, C]
        self.readers[slots] = place
        self.states[place] = states

    def keep_prompts(
        self,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        particle_rows: torch.Tensor,
        states: torch.Tensor,
    ) -> None:
        """Let all particles of G requests go on from the states ``[G, F]`` behind their prompts.

        Args:
            slots, lengths: ``[G]`` int64, of the last token of each prompt, and of the prompts.
            particle_rows: ``[G, N]`` of all particles.
        """
        lead_in(self.tails, particle_rows, lengths, slots)
        self.keep(slots.view(-1, 1, 1), particle_rows[:, :1], states.unsqueeze(1).unsqueeze(1))
