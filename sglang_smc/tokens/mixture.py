"""A law of the next token mixed with one that knows a few tokens alone.

The few are what n-gram matches propose; the other law, the draft's, may be of any kind. What comes
out has a probability for each token, so that weights and verification stay what they are.
"""

import torch


def mix(
    log_q: torch.Tensor, tokens: torch.Tensor, proposed: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """(1 - w) q plus w times the law that is uniform over what is proposed.

    A row that proposes nothing, or has no weight, stays as it is, to the bit; so does one that is
    no law, whose entries are NaN.

    Args:
        log_q: ``[D, V]`` normalised log-probabilities.
        tokens: ``[D, T]`` int64 token ids; of a row's proposed ones no two are the same.
        proposed: ``[D, T]`` bool: which of them are.
        weights: ``[D]`` float32 in [0, 1]: w.

    Returns:
        ``[D, V]`` float32 log-probabilities.
    """
    counts = proposed.sum(1)  # [D]
    w = torch.where(counts > 0, weights, 0.0).unsqueeze(1)  # [D, 1]
    rest = log_q + torch.log1p(-w)
    share = (w / counts.clamp_min(1).unsqueeze(1)).log()
    # A proposed token has more than the rest of its row gives it, and others are told nothing.
    more = torch.logaddexp(rest.gather(1, tokens), share).masked_fill(~proposed, -torch.inf)
    return torch.where(w > 0, rest.scatter_reduce(1, tokens, more, "amax"), log_q)


def likeliest(log_q: torch.Tensor) -> torch.Tensor:
    """All mass on each row's likeliest token, of equals the first: ``[D, V]``, logs.

    A row with NaN stays as it is.
    """
    point = torch.full_like(log_q, -torch.inf).scatter(1, log_q.argmax(1, keepdim=True), 0.0)
    return torch.where(log_q.isnan().any(1, keepdim=True), log_q, point)
