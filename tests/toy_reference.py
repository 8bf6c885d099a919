"""A toy language model in the form that the reference SMC of bench/fidelity reads."""

from collections.abc import Sequence

import torch
from fidelity.reference import Rows

Text = tuple[int, ...]


class Table:
    """A language model that is a table of log-probabilities ``[position, last, next]``."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table.double()

    def read(self, prompt_ids: Sequence[int], num_rows: int) -> Rows:
        return self  # nothing to remember

    def log_probs(self, texts: torch.Tensor, columns: int, temperature: float) -> torch.Tensor:
        chain = torch.cat([texts.new_zeros(len(texts), 1), texts], dim=1)
        positions = torch.arange(chain.shape[1])[-columns:].clamp_max(len(self.table) - 1)
        return (self.table[positions, chain[:, -columns:]] / temperature).log_softmax(-1)

    def reorder(self, ancestors: torch.Tensor) -> None:
        pass

    def next_probs(self, text: Text) -> torch.Tensor:
        return self.table[len(text), text[-1] if text else 0].softmax(-1)
