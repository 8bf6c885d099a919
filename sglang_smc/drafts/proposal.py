"""The seam between a round and who drafts for it.

A round asks for the law of a first token behind each particle's text, draws, and asks for the law
behind what it has drawn, K times; the laws are q. What a proposal keeps for later, it keeps by KV
slot: a slot belongs to one token behind one text, and the ledger hands it down as particles
descend. So a round tells nobody about resampling, about cuts or about what is emitted.
"""

from typing import NamedTuple, Protocol

import torch

from sglang_smc.models.attention import KVLocations, ParticleAttention
from sglang_smc.recording.passes import Forward, PassRecording


class DraftSlots(NamedTuple):
    """Where a round reads and writes: for the last token but one, the last and the K drafts."""

    slots: torch.Tensor  # [K + 2, G, N]
    positions: torch.Tensor  # [K + 2, G, N]
    locations: KVLocations


class Proposal(Protocol):
    """Who drafts."""

    at_once: bool  # whether one pass tells the laws of all K tokens
    has_stock_passes: bool  # whether SGLang may record its own, over prompts

    @property
    def attn_backend(self) -> ParticleAttention: ...

    @property
    def state_bytes(self) -> int:
        """What it keeps from round to round beside KV."""
        ...

    def begin(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Logits ``[G, N, V]`` of the first drafted token.

        Args:
            last_two: ``[G, N, 2]`` the token that each particle continues from, which neither model
                has read, and the one before it.
            at: where the round reads and writes.
        """
        ...

    def go_on(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Logits ``[G, N, V]`` behind the tokens ``[G, N]`` that were drawn at ``step - 1``."""
        ...

    def recorded(self, recording: PassRecording) -> "Proposal":
        """The same with its passes replayed, for rounds that the host plays."""
        ...


class LanguageModel:
    """A model of its own: it reads what it drafts, and what the target adds to that.

    The last drafted token is not read: if it is kept, the next round reads it with the token
    behind it, in the same pass.

    Args:
        forward: the model, over particles.
    """

    at_once = False
    has_stock_passes = True
    state_bytes = 0

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    @property
    def attn_backend(self) -> ParticleAttention:
        """The model's, over particles."""
        return self.forward.attn_backend

    def begin(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """See `Proposal`; also without drafts, so that the model reads along."""
        two = at.slots[:2].permute(1, 2, 0)  # [G, N, 2]: the first it may have yet to read
        return self.forward.next_logits(last_two, at.positions[0], two, at.locations)

    def go_on(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """See `Proposal`."""
        here = at.slots[step + 1].unsqueeze(2)
        return self.forward.next_logits(
            tokens.unsqueeze(2), at.positions[step + 1], here, at.locations
        )

    def recorded(self, recording: PassRecording) -> "LanguageModel":
        """See `Proposal`."""
        return LanguageModel(recording.of(self.forward, "next_logits", (2, 1)))
