"""What SGLang carries from one round to the next: nothing but whose round it is.

The state of a round stays on the device, in tables keyed by `req_pool_idx`.
"""

from typing import TYPE_CHECKING, cast

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.eagle_info import EagleDraftInput


class LengthRelay(FutureMap):
    """Relays sequence lengths from round to round, and no tokens: those are in our tables."""

    def _resolve_spec_extras(self, batch: "ScheduleBatch") -> None:
        """Nothing; the stock method also takes every device for one with streams."""


class SMCDraftInput(SpecInput):
    """The `spec_info` of a running batch.

    Args:
        bonus_tokens: ``[bs]`` last emitted tokens, for SGLang's relay between rounds.
    """

    # Read by the relay; STANDALONE has none either.
    topk_p = topk_index = hidden_states = dsa_topk_indices = None

    def __init__(self, bonus_tokens: torch.Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens
        self.future_indices: torch.Tensor | None = None  # set by the scheduler when it overlaps

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        """Keep the requests in ``new_indices``."""
        self.bonus_tokens = self.bonus_tokens[new_indices]
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]

    def merge_batch(self, other: "SMCDraftInput") -> None:
        """Append another batch's requests."""
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])


def as_eagle(draft_input: SMCDraftInput) -> "EagleDraftInput":
    """The same: SGLang's annotations know EAGLE's alone, but its relay asks for no more."""
    return cast("EagleDraftInput", draft_input)
