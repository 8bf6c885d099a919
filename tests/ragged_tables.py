"""A toy language model in the form that the simulations of bench/fidelity read."""

import torch
from fidelity.simulate import Rows


class RaggedTable:
    """A table of log-probabilities ``[position, last, next]``; a text begins behind one token."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def rows(self, count: int, length: int) -> Rows:
        return self  # nothing to remember

    def log_probs(self, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        positions = starts.unsqueeze(1) + torch.arange(tokens.shape[1])
        return self.table[positions.clamp_max(len(self.table) - 1), tokens]

    def reorder(self, rows: torch.Tensor) -> None:
        pass
