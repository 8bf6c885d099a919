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


class Kept(NamedTuple):
    """What is kept of each group's chains, and what the token behind it is drawn from."""

    num_columns: torch.Tensor  # [G] int64 in 0..K
    winner: torch.Tensor  # [G] int64: the chain that carries them
    by_block: torch.Tensor  # [G] bool: by the block's evidence, not by exact verification
    rejects: torch.Tensor  # [G] bool: the token that follows comes from what is left of p
    row: torch.Tensor  # [G] int64: the row of p behind them, of G * N * (K + 1)
    ess: torch.Tensor  # [G] float64 effective sample size of the block; N where none may be kept


def keep(
    found: Verified,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    before_end: torch.Tensor,
    ends: torch.Tensor,
    present: torch.Tensor,
    num_steps: torch.Tensor,
    evidence_threshold: torch.Tensor,
    keep_uniforms: torch.Tensor,
    uniforms: torch.Tensor,
) -> Kept:
    """Keep what the block's evidence covers, or what is ``found``: the longer of the two.

    Args:
        found: what exact verification accepts.
        log_p: ``[G, N, K + 1]`` of the drafted tokens, and one column more that may hold anything.
        log_q: ``[G, N, K]`` of the drafted tokens.
        ends: ``[G, N, K]`` bool: the text ends with this token.
        before_end, present, num_steps, evidence_threshold, keep_uniforms, uniforms: as in `judge`.
    """
    increments = log_p[:, :, :-1].double() - log_q
    thresholds = evidence_threshold, keep_uniforms, uniforms
    block = judge(increments, before_end, present, num_steps, *thresholds)
    by_block = longer(block, found, ends, num_steps)
    num_columns = torch.where(by_block, block.num_columns, found.num_columns)
    winner = torch.where(by_block, block.winner, found.winner)
    chain = torch.arange(len(winner), device=winner.device) * log_p.shape[1] + winner
    return Kept(
        num_columns=num_columns,
        winner=winner,
        by_block=by_block,
        rejects=found.rejects & ~by_block,
        row=chain * log_p.shape[2] + num_columns,
        # Where nothing is kept by evidence, the chains' weights say nothing of the output.
        ess=torch.where(evidence_threshold < torch.inf, block.ess, present.sum(1).double()),
    )


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
    block: Block, found: Verified, ends: torch.Tensor, num_steps: torch.Tensor
) -> torch.Tensor:
    """Where the block reaches further than exact verification, ``[G]`` bool.

    A text that has ended reaches through all columns: counting its tokens instead would pass over
    texts that end early.

    Args:
        found: what exact verification accepts of the same chains.
        ends: ``[G, N, K]`` bool: the text ends with this token.
        num_steps: ``[G]`` K of each group.
    """
    group = torch.arange(len(num_steps), device=ends.device)
    column = torch.arange(ends.shape[2], device=ends.device)
    has_ended = (ends[group, found.winner] & (column < found.num_columns.unsqueeze(1))).any(1)
    return block.covered > torch.where(has_ended, num_steps, found.num_columns)
