"""Read the target's hidden states from its passes, and keep those that heads need in later rounds.

A hidden state here is the concatenated output of some of the target's layers at one token: F
numbers. SGLang's model classes return it for the layers that they are set to capture.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_smc.kv.sizes import tensor_bytes
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

    Resampling copies nothing here: the ledger passes the slots on. Rounds of single particles
    without drafts have a ring buffer of B states by position, until the head reads them: those of
    K + 1 rounds, of one that the host does not know yet, and the state before them.
    """

    states: torch.Tensor  # [P * C + R * B, F] of P particles, those of a request together, then R
    readers: torch.Tensor  # [KV slots] int64: row of `states` for each slot
    tails: torch.Tensor  # `Ledger.tails`
    num_columns: int  # C
    tokens: torch.Tensor  # [R * B] int64, in ring buffers
    unread: torch.Tensor  # [R] int64 how many of them the head has yet to read
    ends: torch.Tensor  # [R] int64 position after the last of them

    @classmethod
    def of(
        cls, ledger: Ledger, *, num_columns: int, width: int, dtype: torch.dtype
    ) -> "StateTable":
        """Return a table of zeros for the particles and KV slots of a ledger."""
        num_rows = len(ledger.table)
        ring = num_columns + 2
        num_states = len(ledger.tails) * num_columns + num_rows * ring
        states = torch.zeros(num_states, width, dtype=dtype, device=ledger.device)
        readers = torch.zeros_like(ledger.rank).long()
        tokens, unread, ends = (readers.new_zeros(num_rows * size) for size in (ring, 1, 1))
        return cls(states, readers, ledger.tails, num_columns, tokens, unread, ends)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of states, and of which slot has which."""
        return tensor_bytes((self.states, self.readers))

    def before(self, starts: torch.Tensor, particle_rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden states ``[G, N, F]`` of the tokens before ``starts`` ``[G, N]``."""
        return self.states[self.readers[slots_before(self.tails, particle_rows, starts)]]

    def keep(self, slots: torch.Tensor, particle_rows: torch.Tensor, states: torch.Tensor) -> None:
        """Store hidden states ``[G, N, C, F]`` of the tokens in ``slots`` ``[G, N, C]``."""
        column = torch.arange(slots.shape[2], device=slots.device)
        place = particle_rows.unsqueeze(2) * self.num_columns + column  # [G, N, C]
        self.readers[slots] = place
        self.states[place] = states

    def keep_single(self, chains: Chains, states: torch.Tensor) -> None:
        """Keep a token of each of G requests for `take_unread`, and the states ``[G, F]`` there."""
        rows = chains.locations.rows
        slots = chains.slots.flatten()
        starts = chains.starts.flatten()
        place = self._in_ring(rows, starts)
        self.tokens.index_copy_(0, place, chains.tokens.flatten())
        added = (slots > 0).long()  # none of a sequence that has ended
        self.unread.index_add_(0, rows, added)
        self.ends.index_copy_(0, rows, starts + added)
        place = place + (len(self.states) - len(self.tokens))
        self.readers.index_copy_(0, slots, place)
        self.states.index_copy_(0, place, states)

    def take_unread(self, rows: torch.Tensor, ledger: Ledger) -> tuple[Chains, torch.Tensor]:
        """Return what the head has yet to read of requests ``[R]``, and count it as read.

        Returns:
            Chains ``[R, 1, U]``, U up to B - 1, and the hidden states before their tokens.
        """
        counts = self.unread[rows].unsqueeze(1)
        particle_rows = ledger.particle_rows(rows, 1)
        starts = (self.ends[rows].unsqueeze(1) - counts).clamp_min(1)  # [R, 1]
        is_cpu = rows.device.type == "cpu"  # elsewhere this would be a wait
        longest = max(int(counts.max()), 1) if is_cpu else self.num_columns + 1
        column = torch.arange(longest, device=rows.device)
        positions = starts + column  # [R, U]
        slots = slots_before(self.tails, particle_rows, positions + 1).where(column < counts, 0)
        states = self.states[self.readers[slots_before(self.tails, particle_rows, positions)]]
        tokens = self.tokens[self._in_ring(rows.unsqueeze(1), positions)].unsqueeze(1)
        self.unread.index_fill_(0, rows, 0)
        locations = KVLocations(rows, starts.squeeze(1), particle_rows, len(column))
        return Chains(tokens, starts, slots.unsqueeze(1), locations), states.unsqueeze(1)

    def _in_ring(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the places of requests' positions among `tokens`."""
        ring = self.num_columns + 2
        return rows * ring + positions % ring

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
