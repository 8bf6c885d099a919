"""Draft a tree of likely tokens in place of sampled chains, and verify it, for greedy requests.

At temperature 0 chains sampled from q would all be one. The N chains of a request are therefore
shared out among the draft's likeliest tokens, so that they branch where the draft is unsure, as in
SpecInfer (arXiv 2305.09781) and EAGLE-2 (arXiv 2406.16858). The verification draws each next token
from p, and goes on while some chain has it: the output follows p whatever was drafted, at
temperature 0 and above, since which tokens a tree has does not depend on what is drawn from p.
"""

import torch

from sglang_smc.smc.distribution import Draws, TokenDistribution
from sglang_smc.smc.verification import Verified


def branch(log_q: torch.Tensor, same_text: torch.Tensor) -> torch.Tensor:
    """Return the next token of each chain: chains with one text share its likeliest ones.

    Of m chains with one text, those tokens get one that have the m largest of the quotients
    q / 1, q / 2, q / 3, ... (D'Hondt's apportionment), a token as often as it is among them.

    Args:
        log_q: ``[G, N, V]``, up to a constant for each chain.
        same_text: ``[G, N, N]`` bool, an equivalence: which chains have one text.

    Returns:
        ``[G, N]`` int64.
    """
    num_chains = log_q.shape[1]
    best, tokens = log_q.topk(min(num_chains, log_q.shape[2]), dim=2)  # [G, N, N]
    divisors = torch.arange(1, num_chains + 1, device=log_q.device, dtype=log_q.dtype)
    quotients = best.unsqueeze(3) - divisors.log()  # [G, N, N, N]
    largest = quotients.flatten(2).sort(dim=2, descending=True, stable=True).indices
    rank = same_text.tril(-1).sum(2, keepdim=True)  # [G, N, 1] among chains with one text
    which = largest.gather(2, rank).div(num_chains, rounding_mode="floor")
    return tokens.gather(2, which).squeeze(2)


def follow(
    ops: Draws,
    tokens: torch.Tensor,
    ends: torch.Tensor,
    p: TokenDistribution,
    uniforms: torch.Tensor,
    num_steps: torch.Tensor,
    num_chains: torch.Tensor,
) -> Verified:
    """Draw tokens from p one after another while some chain continues with the one drawn.

    Args:
        tokens: ``[G, N, K]`` int64, any that do not depend on the uniforms.
        ends: ``[G, N, K]`` bool: the sequence ends with this token.
        p: of ``G * N * (K + 1)`` draws; that of column k follows a chain's first k tokens.
        uniforms: ``[G, K]`` float64.
        num_steps: ``[G]`` int64 in 1..K: a group's columns.
        num_chains: ``[G]`` int64 in 1..N: a group's chains.

    Returns:
        The accepted columns. Where no chain has the token that is drawn, it is the residual.
    """
    size, most, max_steps = tokens.shape
    group = torch.arange(size, device=tokens.device)
    follows = torch.arange(most, device=tokens.device) < num_chains.unsqueeze(1)  # [G, N]
    winner, num_columns, missing = (torch.zeros_like(num_steps) for _ in range(3))
    walking, rejects = num_steps > 0, torch.zeros_like(num_steps, dtype=torch.bool)
    for step in range(max_steps):
        row = (group * most + winner) * (max_steps + 1) + num_columns
        token, _ = p.at(row).sample(ops, uniforms[:, step])  # [G]
        walking = walking & (step < num_steps)
        still = follows & (tokens[:, :, step] == token.unsqueeze(1))
        found = still.any(1)
        missing = torch.where(walking & ~found, token, missing)
        rejects = rejects | (walking & ~found)
        walking = walking & found
        follows = torch.where(walking.unsqueeze(1), still, follows)
        winner = follows.long().argmax(1)
        num_columns = num_columns + walking
        walking = walking & ~ends[group, winner, step]
    residuals = torch.zeros_like(p.scores[:1], dtype=torch.float32).expand(size, -1)
    residuals = residuals.scatter(1, missing.unsqueeze(1), 1.0)  # [G, V]
    return Verified(num_columns, winner, rejects, group, residuals)
