"""Draft a tree of likely tokens instead of sampled chains, for greedy decoding.

At temperature 0 all chains of a request would be the draft's likeliest text. Its N chains are
divided among likely tokens instead, so that they branch where the draft is unsure, as in SpecInfer
(arXiv 2305.09781) and EAGLE-2 (arXiv 2406.16858). p is then a point mass: the chains that follow it
are those of positive weight, and the round keeps columns as long as there is one (`weighing`, with
an evidence threshold of 0). So the output is the target's own, whatever the tree.
"""

from typing import NamedTuple

import torch

from sglang_smc.smc.distribution import TokenDistribution

_STRIDE = 2.6  # 1.5 to 5 yield as many tokens on the shipped pair
_GROWTH = 2.0


def log_divisors(ahead: torch.Tensor, num_chains: int) -> torch.Tensor:
    """Return log 1, log s, log 2 s, log 3 s, ... for `branch`, ``[*ahead.shape, num_chains]``.

    A token's second chain counts as one of probability q / s. The stride s grows with fewer columns
    ``ahead``, int64, and in the last column all chains differ.
    """
    stride = _STRIDE * (1 + _GROWTH / ahead.clamp_min(1e-6)).unsqueeze(-1)
    return (torch.arange(num_chains, device=ahead.device) * stride).clamp_min(1.0).log()


def branch(scores: torch.Tensor, same_text: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    """Return the next tokens, ``[G, N]``; chains of one text divide its likeliest tokens.

    Of m chains of one text, a token gets as many as it has of the m largest q over a divisor.

    Args:
        scores: ``[G, N, V]`` log q, up to a constant for each chain.
        same_text: ``[G, N, N]`` bool, an equivalence: which chains have one text.
        divisors: ``[G, N]`` of `log_divisors`.
    """
    num_chains = scores.shape[1]
    best, tokens = scores.topk(min(num_chains, scores.shape[2]), dim=2)  # [G, N, B]
    quotients = best.float().unsqueeze(3) - divisors[:, None, None]  # [G, N, B, N]
    largest = quotients.flatten(2).argsort(dim=2, descending=True, stable=True)
    rank = same_text.tril(-1).sum(2, keepdim=True)  # [G, N, 1] among the chains of its text
    which = largest.gather(2, rank).div(num_chains, rounding_mode="floor")
    return tokens.gather(2, which).squeeze(2)


class Trees(NamedTuple):
    """The trees of a batch, which grow column by column."""

    is_tree: torch.Tensor  # [G, 1] bool: which groups draft one
    divisors: torch.Tensor  # [K, G, N] of `log_divisors`

    def grow(
        self, step: int, q: TokenDistribution, tokens: torch.Tensor, same_text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next tokens, with those of trees in place of ``tokens`` ``[G, N]``; and log q.

        Args:
            same_text: as for `branch`.
        """
        likely = branch(q.scores.view(*tokens.shape, -1), same_text, self.divisors[step])
        tokens = torch.where(self.is_tree, likely, tokens)
        return tokens, q.score(tokens)


def begin_trees(is_tree: torch.Tensor, ahead: torch.Tensor, num_chains: int) -> Trees:
    """Return the roots of groups ``is_tree`` ``[G]``; ``ahead`` ``[K, G]`` of `log_divisors`."""
    return Trees(is_tree.unsqueeze(1), log_divisors(ahead, num_chains))
