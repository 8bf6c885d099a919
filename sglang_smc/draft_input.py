"""What SGLang carries from one round to the next: nothing but whose round it is.

The state of a round stays on the device, in tables keyed by `req_pool_idx`.
"""

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


class SMCDraftInput(SpecInput):
    """The `spec_info` of a running batch.

    Args:
        bonus_tokens: ``[bs]`` last emitted tokens, for SGLang's relay between rounds.
    """

    topk_p = topk_index = hidden_states = None  # read by the relay; STANDALONE has none either

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
