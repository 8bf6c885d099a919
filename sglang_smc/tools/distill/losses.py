"""Define the losses between a target distribution p and a draft distribution q.

Those of a token take log-probabilities ``[..., V]`` in nats, without -inf, and return ``[...]``, 0
if q = p and more otherwise. Their gradients with respect to q's logits are 0 there, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

CHAINS = "chains"  # the loss of a block, beside `LOSSES` of a token
EPSILON, TINY = 1e-6, 1e-30


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) in nats, which penalizes tokens that q misses."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return KL(q || p) in nats, which penalizes drafting tokens that are improbable under p."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def rejection(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return the probability 1 - sum min(p, q) that a draft token is rejected: total variation."""
    return 1 - torch.minimum(log_p, log_q).exp().sum(-1)


def chi2(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return log(1 + chi-square(p || q)) = log E_q[(p / q)^2], the log of a weight's second moment.

    The moment itself and its gradients are unbounded where q misses mass of p. The log's gradient
    is the difference of two distributions, q and p^2 / q renormalized.
    """
    return (2 * log_p - log_q).logsumexp(-1)


def rejection_of_all(log_p: torch.Tensor, log_q: torch.Tensor, drafts: int) -> torch.Tensor:
    """Return the probability that no lossless rule accepts any of ``drafts`` tokens drawn from q.

    ``drafts`` is 1 or more. It is the largest q(A)^N - p(A) over sets of tokens A, since all N may
    fall into A; the maximum is attained by a set of the tokens with the smallest p / q. With one
    draft this is `rejection`.
    """
    order = (log_p - log_q).argsort(-1)
    p, q = (log.gather(-1, order).exp().cumsum(-1) for log in (log_p, log_q))
    return (q.clamp_max(1.0) ** drafts - p).amax(-1).clamp_min(0.0)


def chains(
    log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor, count: int
) -> torch.Tensor:
    """Return a lower bound on the probability that the target's text is left, for each column.

    A prefix y is drafted by one of ``count`` chains with probability d(y) = 1 - (1 - q(y))^count,
    so that at most a share a(y) = min d / p, over y and all that it begins with, is kept. The
    tokens before a column are the target's own draw, and its own are summed over: sum over x of
    min(a(y) p(x | y), d(yx) / p(y)). For one chain it is the loss of block verification (arXiv
    2609.34832).

    Args:
        log_p, log_q: ``[..., depth, V]``, conditional on the tokens before.
        tokens: ``[..., depth]`` int64, drawn from p.
        count: of chains, N.

    Returns ``[..., depth]``, 0 if q = p.
    """
    chosen = tokens.unsqueeze(-1)
    log_p_before, log_q_before = (  # [..., depth, 1]
        pad(log.gather(-1, chosen).squeeze(-1).cumsum(-1)[..., :-1], (1, 0)).unsqueeze(-1)
        for log in (log_p, log_q)
    )
    none = count * torch.log1p(-(log_q_before + log_q).exp().clamp_max(1 - EPSILON))
    drafted = (-none.expm1()).clamp_min(TINY).log() - log_p_before  # [..., depth, V]
    shares = (drafted - log_p).gather(-1, chosen).squeeze(-1).clamp_max(0).cummin(-1).values
    before = pad(shares[..., :-1], (1, 0)).unsqueeze(-1)
    return 1 - torch.minimum(before + log_p, drafted).exp().sum(-1)


#: Choices of ``--loss``. `rejection_of_all` is only measured: it is nearly zero after a few
#: steps, and a draft trained on it yielded no more tokens than before (bench/pair/README.md).
LOSSES: dict[str, Loss] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "acceptance": rejection,
    "chi2": chi2,
}
