"""Edit logits: penalties, logit biases, minimum lengths and token masks.

Applied in this order, before temperature and filters: frequency, presence and repetition penalties
of the tokens in the output, biases, and a ban of stop tokens before `min_new_tokens`. The formulas
and their order are those of SGLang's sampler (`srt/sampling/penaltylib`, `sampling_batch_info`).

Penalties count the tokens of the output, not those of the prompt. The output of a particle
consists of its request's emitted tokens, its tail, and its draft tokens of this round.

Shapes: G requests, N particles (1 in a prefill), C rows of logits each, V tokens.

*Masks* (`restrict`). A mask m(x | prefix), 0 or 1, is a potential: the target of whole sequences is
proportional to the product of p m over positions. Draft tokens are drawn from q m normalised and
have the log-weight log p minus their log-probability there, with p unmasked; the bonus token is
drawn from p m normalised, and has the log-weight log M, whichever token it is. M is the mass that
the mask leaves of p.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class EditColumns(NamedTuple):
    """Columns of the edit tables, one row per request; the last three are unset without edits."""

    penalizes: torch.Tensor  # [rows] bool: some rate is not neutral
    biases: torch.Tensor  # [rows] bool
    rates: torch.Tensor  # [rows, 3] float32: frequency, presence, repetition
    counts: torch.Tensor  # [rows, V] int32 of each token in the output that all particles share
    bias: torch.Tensor  # [rows, V] float32


class Edits(NamedTuple):
    """Logit edits of the G requests of a batch, and the sequences of their particles."""

    columns: EditColumns
    groups: Sequence[int]  # the groups with edits, from the host; no other group has any
    rows: torch.Tensor  # [G] int64 of the columns
    min_new_tokens: torch.Tensor  # [G] int64
    stop_mask: torch.Tensor  # [G, V] bool: stop tokens
    starts: torch.Tensor  # [G, N] int64 output tokens of each particle, before it drafts
    texts: torch.Tensor  # [G, N, T] int64: tokens of each that the counts leave out
    lengths: torch.Tensor  # [G, N] int64: how many of them


def edit_logits(logits: torch.Tensor, edits: Edits, drafts: torch.Tensor, first: int) -> None:
    """Edit logits of either model in place; those of requests without edits stay.

    Args:
        logits: ``[G, N, C, V]``, any float type; computed in float32. Row c of a particle
            follows its sequence and ``drafts[:, :, : first + c]``.
        drafts: ``[G, N, J]`` draft tokens of this round, J >= first + C - 1.
        first: number of draft tokens that row 0 follows.
    """
    for group in edits.groups:
        _edit_group(logits[group], edits, group, drafts[group], first)


def _edit_group(
    logits: torch.Tensor, edits: Edits, group: int, drafts: torch.Tensor, first: int
) -> None:
    """Edit the logits ``[N, C, V]`` of a group with draft tokens ``[N, J]``."""
    columns = edits.columns
    row = edits.rows[group : group + 1]
    stops = edits.stop_mask[group]
    # Adding -0.0 leaves every value bitwise unchanged.
    bias = torch.where(columns.biases[row].unsqueeze(1), columns.bias[row], -0.0)  # [1, V]
    starts = edits.starts[group]
    least = edits.min_new_tokens[group]
    counts = _counts(edits, group, drafts[:, :first])  # [N, V]
    for column in range(logits.shape[1]):
        place = first + column
        if column:
            _count(counts, drafts[:, place - 1 : place])
        values = _penalized(logits[:, column].float(), counts, columns, row) + bias
        is_early = (starts + place < least).unsqueeze(1) & stops  # [N, V]
        logits[:, column] = values.masked_fill_(is_early, -torch.inf)


def _penalized(
    logits: torch.Tensor, counts: torch.Tensor, columns: EditColumns, row: torch.Tensor
) -> torch.Tensor:
    """Penalize logits ``[N, V]`` float32 by the tokens' counts in the output, ``[N, V]``.

    The rates are those of a row ``[1]`` of the columns; neutral without penalties.
    """
    penalizes = columns.penalizes[row]
    occurs = counts > 0
    frequency, presence, repetition = columns.rates[row].unbind(1)
    lowered = logits - (frequency * penalizes * counts + presence * penalizes * occurs)
    factor = torch.where(occurs & penalizes, repetition, 1.0)
    return torch.where(lowered < 0, lowered * factor, lowered / factor)


def _counts(edits: Edits, group: int, drafted: torch.Tensor) -> torch.Tensor:
    """Count each token in a group's sequences followed by ``drafted``: ``[N, V]``."""
    emitted = edits.columns.counts[edits.rows[group : group + 1]]  # [1, V]
    counts = emitted.repeat(len(drafted), 1)
    texts = edits.texts[group]  # [N, T]
    lengths = edits.lengths[group]  # [N]
    place = torch.arange(texts.shape[1], device=counts.device)
    counts.scatter_add_(1, texts, (place < lengths.unsqueeze(1)).to(counts.dtype))
    return _count(counts, drafted)


def _count(counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Add tokens ``[N, J]`` to counts ``[N, V]``, in place."""
    return counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))


def count_tokens(
    columns: EditColumns, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Add tokens that all particles now share to the counts of requests with penalties.

    Args:
        columns: the tables; their counts are changed in place.
        rows: ``[G]`` of the columns.
        tokens: ``[G, T]``.
        lengths: ``[G]`` number of tokens to count; none where it is not positive.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    counted = (place < lengths.unsqueeze(1)) & columns.penalizes[rows].unsqueeze(1)  # [G, T]
    at = rows.unsqueeze(1) * columns.counts.shape[1] + tokens
    columns.counts.view(-1).scatter_add_(0, at.flatten(), counted.int().flatten())


def unpack(packed: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Unpack the bits of 32-bit words, lowest first: ``[..., W]`` int32 to ``[..., V]`` bool.

    V is at most 32 W. The layout is that of SGLang's token bitmasks.
    """
    octets = packed.contiguous().view(torch.uint8).unsqueeze(-1)  # [..., 4 W, 1]
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def restrict(
    logits: torch.Tensor, allowed: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask the logits of tokens that are not allowed, and return the mass that is left.

    Where no token is left, the logits stay as they are, so that a token can be drawn, and the
    mass is zero, so that its particle has weight zero.

    Args:
        logits: ``[..., V]``, any float type; ``-inf`` marks a token that is forbidden already.
        allowed: ``[..., V]`` bool.
        temperature: > 0, any shape that broadcasts to ``[...]``.

    Returns:
        ``[..., V]`` logits, and the log of the allowed tokens' probability at this temperature
        ``[...]`` float32.
    """
    scaled = logits.float() / temperature.float().unsqueeze(-1)
    forbidden = ~allowed
    log_mass = scaled.masked_fill(forbidden, -torch.inf).logsumexp(-1) - scaled.logsumexp(-1)
    is_empty = (log_mass == -torch.inf).unsqueeze(-1)
    return logits.masked_fill(forbidden & ~is_empty, -torch.inf), log_mass
