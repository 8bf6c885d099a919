"""What a draft's law q can be asked to be like its target's p: one function each.

All take log-probabilities ``[..., V]`` in nats, without -inf, and return ``[...]``, 0 where q is p
and more elsewhere. Their gradients with respect to q's logits are 0 there, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats: what p has must not be missed."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(q || p) in nats: what p has not must not be drafted."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def rejection(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The chance 1 - sum min(p, q) that one drafted token is rejected: the total variation."""
    return 1 - torch.minimum(log_p, log_q).exp().sum(-1)


def chi2(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log(1 + chi-square(p || q)) = log E_q[(p / q)^2]: the log of a weight's second moment.

    The moment itself has no bound, nor have its gradients, where q misses what p has. The log's
    gradient is the difference of two laws, q and p^2 / q made to sum to 1.
    """
    return (2 * log_p - log_q).logsumexp(-1)


def rejection_of_all(log_p: torch.Tensor, log_q: torch.Tensor, drafts: int) -> torch.Tensor:
    """The chance that no lossless rule can accept any of ``drafts`` tokens drawn from q, 1 or more.

    It is the largest q(A)^N - p(A) over sets of tokens A, since all N may fall into A. A set of
    the tokens whose p / q is the smallest has it. With one draft this is `rejection`.
    """
    order = (log_p - log_q).argsort(-1)
    p, q = (log.gather(-1, order).exp().cumsum(-1) for log in (log_p, log_q))
    return (q.clamp_max(1.0) ** drafts - p).amax(-1).clamp_min(0.0)


#: What ``--loss`` may be. `rejection_of_all` is measured but no choice: it is all but zero early,
#: and the draft that it made yielded no more tokens than before (bench/pair/README.md).
LOSSES: dict[str, Loss] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "acceptance": rejection,
    "chi2": chi2,
}
