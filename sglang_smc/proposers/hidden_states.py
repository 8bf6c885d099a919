"""Read the target's hidden states from its passes, and keep those that heads need in later rounds.

A hidden state here is the concatenated output of some of the target's layers at one token: F
numbers. SGLang's model classes return it for the layers that they are set to capture.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_smc.models.attention import seed_tail, slots_before
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.recurrent import RecurrentForward
from sglang_smc.smc.ledger import KVLocations, Ledger


class StatesReader(Protocol):
    """A head, as the target's passes call it."""

    def read_chains(self, chains: Chains, states: torch.Tensor) -> None:
        """Run the head over chains that the target has just scored, with its states there.

        The states are ``[G, N, C, F]``.
        """
        ...


class ReadTarget(ParticleForward):
    """A target over particles that passes its hidden states to a head, its `reader`."""

    _captured = CaptureHiddenMode.FULL
    reader: StatesReader

    runs_again = True
    """Whether `states_at` can run a token that has been processed."""

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        """Score chains as `ParticleForward.chain_logits` does, then run the head over them."""
        output = self._run(ForwardMode.TARGET_VERIFY, chains)
        states = output.hidden_states.unflatten(0, chains.tokens.shape)  # [G, N, C, F]
        self.reader.read_chains(chains, states)
        return output.next_token_logits.unflatten(0, chains.tokens.shape)

    def states_at(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        locations: KVLocations,
        reqs: Sequence[Req],
    ) -> torch.Tensor:
        """Return the hidden states ``[R, F]`` at tokens that the target has processed before.

        Args:
            tokens, positions: ``[R]`` int64, the last committed token of each of R requests.
            locations: of these requests, with one particle each, and ``committed`` after the
                tokens: their own keys are there.
            reqs: see `Chains`.
        """
        self._shift(locations.rows, reqs, positions)
        shown = tokens.view(-1, 1, 1)
        nowhere = torch.zeros_like(shown)  # the padding slot takes keys that are stored elsewhere
        chains = Chains(shown, positions.unsqueeze(1), nowhere, locations, reqs)
        return self._run(ForwardMode.TARGET_VERIFY, chains).hidden_states


class ReadRecurrent(RecurrentForward, ReadTarget):
    """A `ReadTarget` with linear attention, whose state cannot go back to a processed token."""

    runs_again = False


class StateTable(NamedTuple):
    """The hidden states of each particle's last chain, found by the KV slot of one of its tokens.

    Resampling copies nothing here: the ledger passes the slots on.
    """

    states: torch.Tensor  # [P * C, F] of P particles, those of a request together
    readers: torch.Tensor  # [KV slots] int64: row of `states` for each slot
    tails: torch.Tensor  # `Ledger.tails`
    num_columns: int  # C

    @classmethod
    def of(
        cls, ledger: Ledger, *, num_columns: int, width: int, dtype: torch.dtype
    ) -> "StateTable":
        """Return a table of zeros for the particles and KV slots of a ledger."""
        num_states = len(ledger.tails) * num_columns
        states = torch.zeros(num_states, width, dtype=dtype, device=ledger.device)
        return cls(states, torch.zeros_like(ledger.rank).long(), ledger.tails, num_columns)

    def before(self, starts: torch.Tensor, particle_rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden states ``[G, N, F]`` of the tokens before ``starts`` ``[G, N]``."""
        return self.states[self.readers[slots_before(self.tails, particle_rows, starts)]]

    def keep(self, slots: torch.Tensor, particle_rows: torch.Tensor, states: torch.Tensor) -> None:
        """Store hidden states ``[G, N, C, F]`` of the tokens in ``slots`` ``[G, N, C]``."""
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
        """Start all particles of G requests from hidden states ``[G, F]`` at prompt ends.

        Args:
            slots, lengths: ``[G]`` int64, of the last token of each prompt, and of the prompts.
            particle_rows: ``[G, N]`` rows of all particles.
        """
        seed_tail(self.tails, particle_rows, lengths, slots)
        self.keep(slots.view(-1, 1, 1), particle_rows[:, :1], states.unsqueeze(1).unsqueeze(1))


class DeferredPairs(NamedTuple):
    """Pairs of each request that a head has yet to read, of rounds without drafts.

    A pair is a token and the hidden state before it. ``B`` is the most of a request.
    """

    tokens: torch.Tensor  # [rows, B] int64
    slots: torch.Tensor  # [rows, B] int64, in which their keys belong
    states: torch.Tensor  # [rows, B, F]
    counts: torch.Tensor  # [rows] int64
    ends: torch.Tensor  # [rows] int64 position after the last of them

    @classmethod
    def of(cls, ledger: Ledger, most: int, states: torch.Tensor) -> "DeferredPairs":
        """Return a table without pairs, of at most ``most`` a request, for ``[..., F]`` states."""
        num_rows = len(ledger.table)
        none = torch.zeros(num_rows, most, dtype=torch.int64, device=ledger.device)
        empty = states.new_zeros(num_rows, most, states.shape[-1])
        return cls(none, none.clone(), empty, none[:, 0].clone(), none[:, 0].clone())

    def add(self, chains: Chains, states: torch.Tensor) -> None:
        """Add a token of each of G requests, where it has a slot, and the states ``[G, F]``."""
        rows, slots = chains.locations.rows, chains.slots.flatten()
        place = self.counts[rows]
        self.tokens[rows, place], self.slots[rows, place] = chains.tokens.flatten(), slots
        self.states[rows, place] = states
        self.counts[rows] = place + (slots > 0)
        self.ends[rows] = chains.starts.flatten() + 1

    def take(self, rows: torch.Tensor, ledger: Ledger) -> tuple[Chains, torch.Tensor]:
        """Remove the pairs of requests ``[R]``, and return chains with states ``[R, 1, B, F]``."""
        counts = self.counts[rows]
        starts = (self.ends[rows] - counts).clamp_min(1)
        column = torch.arange(self.slots.shape[1], device=rows.device)
        slots = self.slots[rows].where(column < counts.unsqueeze(1), 0)
        self.counts.index_fill_(0, rows, 0)
        locations = KVLocations(rows, starts, ledger.particle_rows(rows, 1), len(column))
        tokens, starts = self.tokens[rows].unsqueeze(1), starts.unsqueeze(1)
        chains = Chains(tokens, starts, slots.unsqueeze(1), locations)
        return chains, self.states[rows].unsqueeze(1)
