"""Draft a tree of likely tokens instead of sampled chains, for greedy decoding.

At temperature 0 all chains of a request would be the draft's likeliest text. Its N chains are
divided among likely tokens instead, so that they branch where the draft is unsure, as in SpecInfer
(arXiv 2305.09781) and EAGLE-2 (arXiv 2406.16858). p is then a point mass: the chains that follow it
are those of positive weight, and the round keeps columns as long as there is one (`weighing`, with
an evidence threshold of 0). So the output is the target's own, whatever the tree.
"""

import torch


def branch(scores: torch.Tensor, same_text: torch.Tensor) -> torch.Tensor:
    """Return the next token of each chain; chains of one text divide its likeliest tokens.

    Of m chains of one text, a token gets as many as it has of the m largest quotients q / 1, q / 2,
    q / 3, ..., which is d'Hondt's method of apportionment.

    Args:
        scores: ``[G, N, V]`` log q, up to a constant for each chain.
        same_text: ``[G, N, N]`` bool, an equivalence: which chains have one text.

    Returns:
        ``[G, N]`` int64.
    """
    num_chains = scores.shape[1]
    best, tokens = scores.topk(min(num_chains, scores.shape[2]), dim=2)  # [G, N, B]
    divisors = torch.arange(1, num_chains + 1, device=scores.device)
    quotients = best.float().unsqueeze(3) - divisors.log()  # [G, N, B, N]
    largest = quotients.flatten(2).argsort(dim=2, descending=True, stable=True)
    rank = same_text.tril(-1).sum(2, keepdim=True)  # [G, N, 1] among the chains of its text
    which = largest.gather(2, rank).div(num_chains, rounding_mode="floor")
    return tokens.gather(2, which).squeeze(2)
