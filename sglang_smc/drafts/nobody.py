"""A server without a draft model: what drafts is n-gram matches alone.

A round asks for laws all the same, so that what requests forbid is applied to them. Those that are
given here know no token from another.
"""

from typing import TYPE_CHECKING

import torch

from sglang_smc.drafts.proposal import DraftSlots
from sglang_smc.models.attention import ParticleAttention
from sglang_smc.recording.passes import PassRecording

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class Nobody:
    """Logits of zero, whatever was said; `drafts.ngram` takes them for what rules leave.

    Args:
        of_target: the target's attention over particles.
        vocab_size: V, of the target's logits.
    """

    at_once = False
    has_stock_passes = False
    state_bytes = 0

    def __init__(self, of_target: ParticleAttention, vocab_size: int) -> None:
        self._of_target = of_target
        self._vocab_size = vocab_size

    @property
    def attn_backend(self) -> ParticleAttention:
        """The target's: there is no other."""
        return self._of_target

    def begin(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """See `Proposal`."""
        return self._flat(last_two[:, :, 0])

    def go_on(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """See `Proposal`."""
        return self._flat(tokens)

    def recorded(self, recording: PassRecording) -> "Nobody":
        """See `Proposal`; there is nothing to record."""
        return self

    def _flat(self, like: torch.Tensor) -> torch.Tensor:
        """Logits ``[G, N, V]``, new ones: rules write into them."""
        return torch.zeros(*like.shape, self._vocab_size, device=like.device)


class NoPrompts:
    """Nobody reads prompts beside the target; the corpus hears of them on the host."""

    wants_states = False

    def read(
        self, batch: "ScheduleBatch", target: "ForwardBatch", states: torch.Tensor | None
    ) -> None:
        """See `ReadsPrompts`."""
