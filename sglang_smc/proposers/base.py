"""Define `Proposal`, the interface of a draft to a round, and implement it for draft models.

A round takes from the proposal the distribution q of the first draft token after each particle's
sequence, samples a token, and takes the distribution after that token, K times. A proposal stores
its own state by KV slot: a slot belongs to one token of one sequence, and the ledger passes slots
on as particles are resampled. So resampling, cuts and emission need no calls to the proposal.
"""

from typing import NamedTuple, Protocol

import torch

from sglang_smc.models.attention import KVLocations, ParticleAttention
from sglang_smc.models.recorder import Forward, PassRecording


class DraftSlots(NamedTuple):
    """KV slots of a round's columns: the last two tokens and the K draft tokens."""

    slots: torch.Tensor  # [K + 2, G, N]
    positions: torch.Tensor  # [K + 2, G, N]
    locations: KVLocations


class Proposal(Protocol):
    """A draft: a language model, a head over the target's hidden states, or uniform logits."""

    at_once: bool  # whether one pass returns the distributions of all K tokens
    has_stock_passes: bool  # whether SGLang may capture its own passes, over prompts

    @property
    def attn_backend(self) -> ParticleAttention: ...

    @property
    def state_bytes(self) -> int:
        """Return the bytes that the proposal keeps from round to round beside KV."""
        ...

    def begin(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Return the logits ``[G, N, V]`` of the first draft token.

        Args:
            last_two: ``[G, N, 2]`` the token that each particle continues from, which neither model
                has processed, and the token before it.
            at: slots and positions of the round's columns.
        """
        ...

    def go_on(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Return the logits ``[G, N, V]`` after the tokens ``[G, N]`` sampled at ``step - 1``."""
        ...

    def recorded(self, recording: PassRecording) -> "Proposal":
        """Return this proposal with captured passes, for rounds that are launched from the host."""
        ...


class LanguageModel:
    """A draft model: it runs over its own draft tokens, and over those that the target appends.

    The last draft token is not run in its own round: if it is kept, the next round runs it together
    with the token after it, in one pass.

    Args:
        forward: the draft model over particles.
    """

    at_once = False
    has_stock_passes = True
    state_bytes = 0

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    @property
    def attn_backend(self) -> ParticleAttention:
        """Return the draft model's attention over particles."""
        return self.forward.attn_backend

    def begin(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Run the first pass, without drafts too, which keeps the draft's KV complete."""
        two = at.slots[:2].permute(1, 2, 0)  # [G, N, 2]: the first may not have been run yet
        return self.forward.next_logits(last_two, at.positions[0], two, at.locations)

    def go_on(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Run the tokens sampled at the last step; see `Proposal.go_on`."""
        here = at.slots[step + 1].unsqueeze(2)
        return self.forward.next_logits(
            tokens.unsqueeze(2), at.positions[step + 1], here, at.locations
        )

    def recorded(self, recording: PassRecording) -> "LanguageModel":
        """Return the proposer with captured passes; see `Proposal.recorded`."""
        return LanguageModel(recording.of(self.forward, "next_logits", (2, 1)))
