"""Verification that keeps a block where its evidence is high: between exact and SMC.

N chains of K tokens are drafted from q behind one text. As many columns as their evidence covers
are kept, and one chain is drawn there by weight; or as many as exact verification accepts, where
those are more. That draws from what the chains have missed, just where their evidence is low. A
small evidence threshold keeps nearly all (SMC with one lineage), an infinite one is exact.
"""

from typing import NamedTuple

import torch

from sglang_smc.smc.evidence import covered_columns
from sglang_smc.smc.exact import Verified
from sglang_smc.smc.rounds import column_of, draw
from sglang_smc.smc.weights import accumulate, effective_sample_size, normalized


class Block(NamedTuple):
    """What may be kept of each group's block."""

    covered: torch.Tensor  # [G] int64 in 0..K: columns that the evidence covers
    num_columns: torch.Tensor  # [G] int64: those of them up to the winner's end
    winner: torch.Tensor  # [G] int64: the chain drawn there
    ess: torch.Tensor  # [G] effective sample size of the whole block's weights


def judge(
    increments: torch.Tensor,
    before_end: torch.Tensor,
    present: torch.Tensor,
    num_steps: torch.Tensor,
    evidence_threshold: torch.Tensor,
    keep_uniforms: torch.Tensor,
    uniforms: torch.Tensor,
) -> Block:
    """Draw a chain by weight where the evidence of the block still covers it.

    Args:
        increments: ``[G, N, K]`` of ``log p - log q``.
        before_end: ``[G, N, K]`` bool: up to each chain's end, and within the group's own K.
        present: ``[G, N]`` bool.
        num_steps: ``[G]`` K of each group.
        evidence_threshold: ``[G]`` float64 c >= 0; infinite to keep none.
        keep_uniforms, uniforms: ``[G]`` float64 in [0, 1), to decide and to draw the chain.
    """
    start = torch.where(present, 0.0, -torch.inf).double()
    gained = torch.where(before_end, increments, 0.0)
    running = accumulate(start, gained).transpose(1, 2)  # [G, K + 1, N]
    covered = covered_columns(running, evidence_threshold, num_steps, keep_uniforms)
    winner = draw(normalized(column_of(running, covered)), uniforms)
    group = torch.arange(len(winner), device=running.device)
    return Block(
        covered=covered,
        num_columns=torch.minimum(covered, before_end[group, winner].sum(1)),
        winner=winner,
        ess=effective_sample_size(running[:, -1]),
    )


def longer(
    block: Block,
    found: Verified,
    log_p: torch.Tensor,
    ends: torch.Tensor,
    num_steps: torch.Tensor,
) -> tuple[Verified, torch.Tensor]:
    """The one of the two that reaches further, and where that is the block ``[G]`` bool.

    A text that has ended reaches through all columns: counting its tokens instead would pass over
    texts that end early.

    Args:
        found: what exact verification accepts of the same chains.
        log_p: ``[G, N, K + 1, V]``; column k follows a chain's first k tokens.
        ends: ``[G, N, K]`` bool: the text ends with this token.
        num_steps: ``[G]`` K of each group.
    """
    group = torch.arange(len(num_steps), device=log_p.device)
    column = torch.arange(ends.shape[2], device=log_p.device)
    has_ended = (ends[group, found.winner] & (column < found.num_columns.unsqueeze(1))).any(1)
    by_block = block.covered > torch.where(has_ended, num_steps, found.num_columns)
    after_block = log_p[group, block.winner, block.num_columns].double().exp()
    kept = Verified(
        num_columns=torch.where(by_block, block.num_columns, found.num_columns),
        winner=torch.where(by_block, block.winner, found.winner),
        next_probs=torch.where(by_block.unsqueeze(1), after_block, found.next_probs),
    )
    return kept, by_block
