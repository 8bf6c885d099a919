"""How much of a drafted block its own evidence lets a group keep.

The evidence of a block up to column j is what it multiplies the group's total weight by. For a
normalised p its expectation is 1 whatever q is. It is near 1 where the drafts cover what p would
say and near 0 where they all miss it, which the effective sample size does not show: N drafts
that are equally wrong have equal weights. So a group keeps as many columns as it can with

    u < evidence_j / c,   u one uniform for the round, c the evidence threshold,

and the target draws the next token itself. A column in which every particle dies has evidence
zero and is never kept, whatever c. With c = 0 that is all.

Drafts that cover little are drawn again, so with c > 0 the estimate Z-hat errs upwards, while the
law of the output comes nearer to p: with c = 1, given the population, no text comes out of a whole
uncut block more often than p has it. That is no bound on what comes out of a cut. For N = 1 it is
``q(x) min(1, p(x) / q(x)) <= p(x)``, for N chains behind one text, of which one is drawn by weight,
``p(x) E[1 / max(c, evidence)] <= p(x)``.
"""

import torch


def covered_columns(
    running: torch.Tensor,
    evidence_threshold: torch.Tensor,
    num_steps: torch.Tensor,
    keep_uniforms: torch.Tensor,
) -> torch.Tensor:
    """The most columns that a group may keep, ``[G]`` int64.

    Args:
        running: ``[G, K + 1, N]`` log-weights after each column, the first before the block.
        evidence_threshold: ``[G]`` float64 c >= 0; infinite to keep none.
        num_steps: ``[G]`` int64: a group's own K.
        keep_uniforms: ``[G]`` float64 in [0, 1).
    """
    total = torch.logsumexp(running, dim=2)  # [G, K + 1]
    log_evidence = total - total[:, :1]
    # In logs, where nothing underflows: -inf is not below -inf, so what has died is not kept.
    enough = (keep_uniforms.log() + evidence_threshold.log()).unsqueeze(1) < log_evidence
    column = torch.arange(running.shape[1], device=running.device)
    return torch.minimum((enough * column).amax(1), num_steps)
