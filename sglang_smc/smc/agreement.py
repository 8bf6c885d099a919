"""What the particles of a group have in common: texts up to a point, roots, ancestors."""

import torch


def common_tail(texts: torch.Tensor, lengths: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Number of leading tail tokens that all present particles of a group share.

    None where they do not agree on the token before.

    Args:
        texts: ``[G, N, J]`` int64 the token before each tail, and the tail; particle 0 is present.
        lengths: ``[G, N]`` int64 of the tails; what lies beyond is ignored.
        present: ``[G, N]`` bool.

    Returns:
        ``[G]`` int64.
    """
    agree = torch.where(present.unsqueeze(2), texts == texts[:, :1], True).all(1)  # [G, J]
    shortest = torch.where(present, lengths, texts.shape[2]).amin(1)
    return torch.minimum(agree.cumprod(1).sum(1) - 1, shortest).clamp_min(0)


def num_distinct(places: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """How many of a group's N places its present particles name.

    Args:
        places: ``[G, N]`` int64, the one that each particle names.
        present: ``[G, N]`` bool.

    Returns:
        ``[G]`` int64.
    """
    place = torch.arange(places.shape[1], device=places.device)
    named = (places.unsqueeze(2) == place) & present.unsqueeze(2)  # [G, N, N]
    return named.any(1).sum(1)
