"""What a request asks to be changed in logits, by the text that each row of them follows.

In this order, before temperature and filters: frequency, presence and repetition penalties of the
tokens that the text has, biases, and no end of text before `min_new_tokens`. The formulas and
their order are those of SGLang's sampler (`srt/sampling/penaltylib`, `sampling_batch_info`).

Penalties count the tokens of the output, not those of the prompt. Here that is a particle's own
output: what its request has emitted, its tail, and what it has drafted in this round.

Shapes: G requests, N particles (1 in a prefill), C rows of logits each, V tokens.
"""

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
    rows: torch.Tensor  # [G] int64 of the columns
    min_new_tokens: torch.Tensor  # [G] int64
    stop_mask: torch.Tensor  # [G, V] bool: tokens that end the text
    starts: torch.Tensor  # [G, N] int64 output tokens of each particle, before it drafts
    texts: torch.Tensor  # [G, N, T] int64: tokens of each that the counts leave out
    lengths: torch.Tensor  # [G, N] int64: how many of them


class Rates(NamedTuple):
    """Penalties of G requests, each ``[G, 1, 1]`` float32."""

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor

    def apply(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Penalize tokens ``[G, N, V]`` float32 by how often texts have them, ``[G, N, V]``."""
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
    columns, rows = edits.columns, edits.rows
    penalizes, biases = columns.penalizes[rows].view(-1, 1, 1), columns.biases[rows].view(-1, 1, 1)
    rates = Rates(*columns.rates[rows].view(-1, 3, 1, 1).unbind(1))
    bias, stops = columns.bias[rows].unsqueeze(1), edits.stop_mask.unsqueeze(1)  # [G, 1, V]
    counts = _counts(edits, drafts[:, :, :first])  # [G, N, V]
    for column in range(logits.shape[2]):
        place = first + column
        if column:
            drafted = drafts[:, :, place - 1 : place]
            counts.scatter_add_(2, drafted, torch.ones_like(drafted, dtype=counts.dtype))
        values = logits[:, :, column].float()
        values = torch.where(penalizes, rates.apply(values, counts), values)
        values = torch.where(biases, values + bias, values)
        too_early = edits.starts + place < edits.min_new_tokens.unsqueeze(1)  # [G, N]
        values = values.masked_fill(too_early.unsqueeze(2) & stops, -torch.inf)
        logits[:, :, column] = values


def _counts(edits: Edits, drafted: torch.Tensor) -> torch.Tensor:
    """How often each particle's text, with all of ``drafted`` behind it, has each token."""
    settled = edits.columns.counts[edits.rows].unsqueeze(1)  # [G, 1, V]
    counts = settled.repeat(1, edits.starts.shape[1], 1)
    place = torch.arange(edits.texts.shape[2], device=counts.device)
    counted = (place < edits.lengths.unsqueeze(2)).to(counts.dtype)
    counts.scatter_add_(2, edits.texts, counted)
    return counts.scatter_add_(2, drafted, torch.ones_like(drafted, dtype=counts.dtype))


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
