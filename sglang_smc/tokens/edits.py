"""What a request asks to be changed in logits, by the text that each row of them follows.

In this order, before temperature and filters: frequency, presence and repetition penalties of the
tokens that the text has, biases, and no end of text before `min_new_tokens`. The formulas and
their order are those of SGLang's sampler (`srt/sampling/penaltylib`, `sampling_batch_info`).

Penalties count the tokens of the output, not those of the prompt. Here that is a particle's own
output: what its request has emitted, its tail, and what it has drafted in this round.

Shapes: G requests, N particles (1 in a prefill), C rows of logits each, V tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class EditColumns(NamedTuple):
    """What requests change, one row each; the last three mean nothing where nobody asked."""

    penalizes: torch.Tensor  # [rows] bool: some rate is not neutral
    biases: torch.Tensor  # [rows] bool
    rates: torch.Tensor  # [rows, 3] float32: frequency, presence, repetition
    counts: torch.Tensor  # [rows, V] int32 of each token in the text that is settled
    bias: torch.Tensor  # [rows, V] float32


class Edits(NamedTuple):
    """What the G requests of a batch change, and the texts of their particles."""

    columns: EditColumns
    groups: Sequence[int]  # none but these change anything, as far as the host knows
    rows: torch.Tensor  # [G] int64 of the columns
    min_new_tokens: torch.Tensor  # [G] int64
    stop_mask: torch.Tensor  # [G, V] bool: tokens that end the text
    starts: torch.Tensor  # [G, N] int64 output tokens of each particle, before it drafts
    texts: torch.Tensor  # [G, N, T] int64: tokens of each that the counts leave out
    lengths: torch.Tensor  # [G, N] int64: how many of them


class Rates(NamedTuple):
    """Penalties of a request, each ``[1]`` float32."""

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    @classmethod
    def of(cls, columns: EditColumns, row: torch.Tensor) -> "Rates":
        """What a row ``[1]`` of the columns says; neutral where nobody penalizes."""
        penalizes = columns.penalizes[row]
        frequency, presence, repetition = columns.rates[row].unbind(1)
        neutral = torch.where(penalizes, repetition, 1.0)
        return cls(frequency * penalizes, presence * penalizes, neutral)

    def apply(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Penalize tokens ``[N, V]`` float32 by how often texts have them, ``[N, V]``."""
        occurs = counts > 0
        lowered = logits - (self.frequency * counts + self.presence * occurs)
        factor = torch.where(occurs, self.repetition, 1.0)
        return torch.where(lowered < 0, lowered * factor, lowered / factor)


def edit_logits(logits: torch.Tensor, edits: Edits, drafts: torch.Tensor, first: int) -> None:
    """Change logits of either model, in place; those of requests that ask for nothing stay.

    Args:
        logits: ``[G, N, C, V]``, any float type; worked out in float32. Row c of a particle
            follows its text and ``drafts[:, :, : first + c]``.
        edits: of the batch.
        drafts: ``[G, N, J]`` what the particles have drafted in this round, J >= first + C - 1.
        first: drafted tokens that row 0 follows.
    """
    for group in edits.groups:
        _edit_group(logits[group], edits, group, drafts[group], first)


def _edit_group(
    logits: torch.Tensor, edits: Edits, group: int, drafts: torch.Tensor, first: int
) -> None:
    """Change the logits ``[N, C, V]`` of a group that has drafted ``[N, J]``."""
    columns, row = edits.columns, edits.rows[group : group + 1]
    rates, stops = Rates.of(columns, row), edits.stop_mask[group]
    # What -0.0 is added to stays, to the last bit.
    bias = torch.where(columns.biases[row].unsqueeze(1), columns.bias[row], -0.0)  # [1, V]
    starts, least = edits.starts[group], edits.min_new_tokens[group]
    counts = _counts(edits, group, drafts[:, :first])  # [N, V]
    for column in range(logits.shape[1]):
        place = first + column
        if column:
            _count(counts, drafts[:, place - 1 : place])
        values = rates.apply(logits[:, column].float(), counts) + bias
        is_early = (starts + place < least).unsqueeze(1) & stops  # [N, V]
        logits[:, column] = values.masked_fill_(is_early, -torch.inf)


def _counts(edits: Edits, group: int, drafted: torch.Tensor) -> torch.Tensor:
    """How often each text of a group, with all of ``drafted`` behind it, has each token."""
    settled = edits.columns.counts[edits.rows[group : group + 1]]  # [1, V]
    counts = settled.repeat(len(drafted), 1)
    texts, lengths = edits.texts[group], edits.lengths[group]  # [N, T], [N]
    place = torch.arange(texts.shape[1], device=counts.device)
    counts.scatter_add_(1, texts, (place < lengths.unsqueeze(1)).to(counts.dtype))
    return _count(counts, drafted)


def _count(counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Add tokens ``[N, J]`` to counts ``[N, V]``, in place."""
    return counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))


def count_tokens(
    columns: EditColumns, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Count tokens that are settled from now on, for the requests that penalize.

    Args:
        columns: their counts are changed.
        rows: ``[G]`` of the columns.
        tokens: ``[G, T]``.
        lengths: ``[G]`` how many of them; none where it is not positive.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    counted = (place < lengths.unsqueeze(1)) & columns.penalizes[rows].unsqueeze(1)  # [G, T]
    at = rows.unsqueeze(1) * columns.counts.shape[1] + tokens
    columns.counts.view(-1).scatter_add_(0, at.flatten(), counted.int().flatten())
