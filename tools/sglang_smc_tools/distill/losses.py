"""Define the losses between a target distribution p and a draft distribution q.

All take log-probabilities ``[..., V]`` in nats, without -inf, and return ``[...]``, 0 if q = p and
more otherwise. Their gradients with respect to q's logits are 0 there, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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


#: Choices of ``--loss``. `rejection_of_all` is only measured: it is nearly zero after a few
#: steps, and a draft trained on it yielded no more tokens than before (bench/pair/README.md).
LOSSES: dict[str, Loss] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "acceptance": rejection,
    "chi2": chi2,
}
