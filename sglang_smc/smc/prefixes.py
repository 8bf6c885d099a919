"""Find the common prefix of a group's particles, and resample prefixes to bound the tails.

Once the oldest tokens of the tails lag too far behind, one prefix a is drawn for them, by its share
W(a) / W of the total weight, and its particles' weights are multiplied by W / W(a): the total never
changes (docs/algorithm.md, "The lag").
"""

import torch

from sglang_smc.smc.weighing import draw, log_mean_exp, normalized

TIE = 2.0**-10
"""Log-weights on one multiple of this, in nats, count as equal where particles are ordered."""


def common_tail(texts: torch.Tensor, lengths: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Return the number of leading tail tokens that all present particles of a group share.

    0 where they differ in the token before the tails.

    Args:
        texts: ``[G, N, J]`` int64 the token before each tail, and the tail; particle 0 is present.
        lengths: ``[G, N]`` int64 of the tails; later entries are ignored.
        present: ``[G, N]`` bool.

    Returns:
        ``[G]`` int64.
    """
    agree = torch.where(present.unsqueeze(2), texts == texts[:, :1], True).all(1)  # [G, J]
    shortest = torch.where(present, lengths, texts.shape[2]).amin(1)
    return torch.minimum(agree.cumprod(1).sum(1) - 1, shortest).clamp_min(0)


def count_nodes(tokens: torch.Tensor, live: torch.Tensor, same_text: torch.Tensor) -> torch.Tensor:
    """Return the number of distinct texts that rows of chains end with, int64 ``[G]``.

    Args:
        tokens: ``[G, N, K]`` int64 draft tokens.
        live: ``[G, N, K + 1]`` bool: which of the last token and these are read by the target.
        same_text: ``[G, N, N]`` bool, an equivalence: whose texts before them are equal.
    """
    equal = tokens.unsqueeze(2) == tokens.unsqueeze(1)  # [G, N, N, K]
    alike = torch.cat([same_text.unsqueeze(3), equal], dim=3).cumprod(3)
    num_chains = tokens.shape[1]
    earlier = alike.new_ones(num_chains, num_chains).tril(-1).unsqueeze(2)
    is_copy = (alike * earlier).amax(2)  # [G, N, K + 1]
    return (live & (is_copy == 0)).sum((1, 2))


def narrow(
    log_weights: torch.Tensor,
    texts: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    present: torch.Tensor,
    uniforms: torch.Tensor,
    heaviest: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the first ``counts[g]`` tokens of each group's tails, and keep the particles with them.

    Free places are filled by splitting: each of a particle's c copies, itself included, has a c-th
    of its weight; the heaviest copy is split next, of equal ones the first. That is
    deterministic, and changes no mean. Where the draft is right, weights are equal but for errors
    of rounding, which another batch has otherwise: `TIE` keeps them from choosing a particle.

    Args:
        log_weights: ``[G, N]`` float64.
        texts: ``[G, N, J]`` int64 the token before each tail, and the tail.
        lengths: ``[G, N]`` int64 of the tails; later entries are ignored. A shorter tail than
            ``counts`` has ended: only tails of the same length share it.
        counts: ``[G]`` int64; 0 leaves a group as it is.
        present: ``[G, N]`` bool.
        uniforms: ``[G]`` float64, to draw the particle that gives the tokens.
        heaviest: ``[G]`` bool: the heaviest particle gives them instead, which is not proper.

    Returns:
        Ancestors ``[G, N]``; log-weights ``[G, N]``, of the same sum as before; the log of the mean
        weight ``[G]``, before and after; and whether some particle had other tokens ``[G]`` bool.
    """
    if log_weights.shape[1] == 1:
        none = torch.zeros_like(lengths)
        return none, log_weights, log_weights[:, 0], none[:, 0].bool()
    log_mean = log_mean_exp(log_weights, present.sum(1))
    by_weight = draw(normalized(log_weights), uniforms)
    ordered = _without_rounding(log_weights)
    drawn = torch.where(heaviest, ordered.argmax(1), by_weight)
    stays = _begins_alike(texts, lengths, counts, drawn.unsqueeze(1)) & present
    leaves = present & ~stays
    ancestors = torch.where(leaves, _splits(ordered, stays, leaves), _places(present))
    copies = (ancestors.unsqueeze(1) == _places(present).unsqueeze(2)) & present.unsqueeze(1)
    parts = copies.sum(2).gather(1, ancestors)  # [G, N]: into how many each weight is split
    lost = log_mean - log_mean_exp(_only(log_weights, stays), present.sum(1))
    raised = torch.where(log_mean > -torch.inf, lost, 0.0).unsqueeze(1)
    split = log_weights.gather(1, ancestors) - parts.clamp_min(1).to(log_weights).log() + raised
    return ancestors, torch.where(present, split, log_weights), log_mean, leaves.any(1)


def _begins_alike(
    texts: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor, drawn: torch.Tensor
) -> torch.Tensor:
    """Return which particles have the first tokens of ``drawn`` ``[G, 1]``: ``[G, N]`` bool."""
    reach = torch.minimum(lengths, counts.unsqueeze(1))  # [G, N]
    drawn_reach = reach.gather(1, drawn)  # [G, 1]
    its = texts.gather(1, drawn.unsqueeze(2).expand(-1, -1, texts.shape[2]))  # [G, 1, J]
    column = torch.arange(texts.shape[2], device=texts.device)
    alike = ((texts == its) | (column > drawn_reach.unsqueeze(2))).all(2)
    return (alike & (reach == drawn_reach)) | (counts == 0).unsqueeze(1)


def _splits(log_weights: torch.Tensor, stays: torch.Tensor, leaves: torch.Tensor) -> torch.Tensor:
    """Return the ancestor of the particle in each free place, ``[G, N]``.

    The next copy is of the particle with the heaviest copies, until no place is free: the largest
    of the quotients w / 1, w / 2, ... (the D'Hondt method).
    """
    num_particles = log_weights.shape[1]
    parts = torch.arange(1, num_particles + 1, device=log_weights.device)
    quotients = _only(log_weights, stays).unsqueeze(2) - parts.to(log_weights).log()  # [G, N, N]
    order = quotients.flatten(1).sort(dim=1, descending=True, stable=True).indices
    which = (leaves.cumsum(1) - 1).clamp_min(0)
    return order.gather(1, which) // num_particles


def _without_rounding(log_weights: torch.Tensor) -> torch.Tensor:
    """Return the log-weights on multiples of `TIE`: errors of rounding are far smaller."""
    return (log_weights / TIE + 0.5).floor() * TIE


def _only(log_weights: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return log_weights.masked_fill(~of, -torch.inf)


def _places(present: torch.Tensor) -> torch.Tensor:
    return torch.arange(present.shape[1], device=present.device).expand(present.shape)
