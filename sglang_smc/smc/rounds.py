"""The decisions of one round, for all groups at once.

A round drafts K tokens for each particle, scores them, and then decides how many of the K columns
the group keeps, and whether it is resampled there. Glossary:

    group        the G requests of a batch, with up to N particles each
    column       the j-th drafted token of all particles of a group, j = 1 ... K
    weight       p / q, multiplied up since the last resampling, of each particle: here its log
    ESS          effective sample size: how many equal weights would say as much
    evidence     what a block of drafts multiplies the mean weight by
    cut          the choice of the columns that a round keeps
    resampling   heavy particles hand down their texts, light ones go: `ancestors`
    present      the particles that a group has, as groups may differ in N, as in K

A particle that is not present has weight zero and is left as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from sglang_smc.smc.evidence import covered_columns
from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.weights import Weights, accumulate, effective_sample_size

T = TypeVar("T")


class WeightRules(NamedTuple):
    """What steers the weights of each group."""

    num_steps: torch.Tensor  # [G] int64 K
    ess_threshold: torch.Tensor  # [G] float64 tau; resample where ESS < tau * N
    at_token: torch.Tensor  # [G] bool: look after every column, not only after the last
    evidence_threshold: torch.Tensor  # [G] float64 c; keep columns that the drafts cover


class BlockCut(NamedTuple):
    """Where a round stops, per group."""

    num_columns: torch.Tensor  # [G] int64 in 0..K: drafted tokens kept
    log_weights: torch.Tensor  # [G, N] after the kept columns
    ess: torch.Tensor  # [G] effective sample size of those weights
    resample: torch.Tensor  # [G] bool: the effective sample size is below the threshold
    all_zero: torch.Tensor  # [G] bool: every particle died in the column after the cut


class Resampled(NamedTuple):
    """A population after its resampling step."""

    ancestors: torch.Tensor  # [G, N] int64
    log_weights: torch.Tensor  # [G, N]
    log_evidence: torch.Tensor  # [G] what this step adds to log Z-hat


class Reweighted(NamedTuple):
    """What becomes of a block of drafts that is weighed."""

    cut: BlockCut
    num_kept: torch.Tensor  # [G, N] drafted tokens that each particle keeps
    resampled: Resampled


def reweight_and_resample(
    log_weights: torch.Tensor,
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    before_end: torch.Tensor,
    power: torch.Tensor,
    rules: WeightRules,
    present: torch.Tensor,
    keep_uniforms: torch.Tensor,
    uniforms: torch.Tensor,
    scheme: torch.Tensor,
    methods: Sequence[str],
) -> Reweighted:
    """Weigh a block of drafts, `cut` it, and `resample` where the effective sample size is low.

    Args:
        log_weights: ``[G, N]`` float64 before the block.
        log_p, log_q: ``[G, N, K]`` of the drafted tokens.
        before_end: ``[G, N, K]`` bool: columns up to a particle's end, within its request's K.
        power: ``[G]`` float64 alpha: the drafts weigh ``alpha log p - log q``.
        rules: of each group.
        present: ``[G, N]`` bool.
        keep_uniforms: ``[G]`` float64 uniforms, for the evidence.
        uniforms: ``[G, N]`` float64 uniforms, for the ancestors.
        scheme: ``[G]`` int64, how each group's ancestors are drawn: the place in `SCHEMES`.
        methods: the keys of `SCHEMES` that occur among these.
    """
    scored = log_p.double() * power.view(-1, 1, 1)
    increments = torch.where(before_end, scored - log_q, 0.0)
    found = cut(log_weights, increments, rules, present, keep_uniforms)
    column = torch.arange(before_end.shape[2], device=before_end.device)
    kept = before_end & (column < found.num_columns.view(-1, 1, 1))
    step = partial(resample, found.log_weights, found.resample, present, uniforms)
    resampled = by_method(scheme, methods, step)
    return Reweighted(found, kept.sum(2), resampled)


def cut(
    log_weights: torch.Tensor,
    increments: torch.Tensor,
    rules: WeightRules,
    present: torch.Tensor,
    keep_uniforms: torch.Tensor,
) -> BlockCut:
    """Choose the columns that a round keeps (arXiv 2604.15672, section 3).

    ``block`` keeps all K and tests the effective sample size once, after them.
    ``token`` tests it after every column and stops at the first that fails.
    Either keeps no more columns than the evidence covers (`evidence.covered_columns`), and so
    stops before one in which all particles die: the target's own draw takes that column's
    place, so a round always advances by at least one token. At temperature 0 this is greedy
    verification: keep the drafts that agree.

    Args:
        log_weights: ``[G, N]`` before the round.
        increments: ``[G, N, K]`` of ``log p - log q``, 0 where a particle has ended.
        rules: of each group; columns beyond its own K count for nothing.
        present: ``[G, N]`` bool.
        keep_uniforms: ``[G]`` float64 uniforms, for the evidence.
    """
    running = accumulate(log_weights, increments).transpose(1, 2)  # [G, K + 1, N]
    ess = effective_sample_size(running)  # [G, K + 1]
    covered = covered_columns(running, rules.evidence_threshold, rules.num_steps, keep_uniforms)
    low = ess < (rules.ess_threshold * present.sum(1)).unsqueeze(1)  # [G, K + 1]
    first_low = torch.minimum(_first_true(low[:, 1:]) + 1, covered)
    num_columns = torch.where(rules.at_token, first_low, covered)
    dead = (running == -torch.inf).all(2)  # [G, K + 1]; a group never begins dead
    next_column = (num_columns + 1).clamp_max(dead.shape[1] - 1).unsqueeze(1)
    at = num_columns.unsqueeze(1)
    return BlockCut(
        num_columns=num_columns,
        log_weights=column_of(running, num_columns),
        ess=ess.gather(1, at).squeeze(1),
        resample=low.gather(1, at).squeeze(1),
        all_zero=dead.gather(1, next_column).squeeze(1) & (num_columns < rules.num_steps),
    )


def resample(
    log_weights: torch.Tensor,
    where: torch.Tensor,
    present: torch.Tensor,
    uniforms: torch.Tensor,
    method: str,
) -> Resampled:
    """Resample the groups in ``where``; the others keep their particles and weights.

    Args:
        log_weights: ``[G, N]``, at least one finite a group.
        where: ``[G]`` bool.
        present: ``[G, N]`` bool.
        uniforms: ``[G, N]`` float64.
        method: a key of `SCHEMES`.
    """
    num_particles = present.sum(1)
    weights = Weights.of(log_weights, num_particles)
    chosen = SCHEMES[method](weights.shares, uniforms, num_particles)
    return _replace(weights, where, present, chosen)


def draw(shares: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One particle of each group by its share of the weight: ``[G, N]``, ``[G]`` to ``[G]``."""
    return SCHEMES["multinomial"](shares, uniforms.unsqueeze(1), None).squeeze(1)


def by_method(scheme: torch.Tensor, methods: Iterable[str], step: Callable[[str], T]) -> T:
    """A resampling step of each group by its own method: ``scheme`` ``[G]``, in ``methods``."""
    first, *others = methods
    found = step(first)
    for method in others:
        mine = scheme == list(SCHEMES).index(method)
        found = choose(mine, step(method), found)
    return found


def choose(where: torch.Tensor, yes: T, no: T) -> T:
    """``yes`` for the groups ``where`` ``[G]`` bool, ``no`` for the others.

    Both are a tensor ``[G, ...]``, or a named tuple of such.
    """
    if isinstance(yes, torch.Tensor) and isinstance(no, torch.Tensor):
        return torch.where(where.view(-1, *(1,) * (yes.dim() - 1)), yes, no)
    assert isinstance(yes, tuple) and isinstance(no, tuple)
    fields = [choose(where, a, b) for a, b in zip(yes, no, strict=True)]
    return yes._make(fields)  # pyright: ignore -- of a named tuple


def column_of(running: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Row ``columns[g]`` of each group: ``[G, C, N]``, ``[G]`` to ``[G, N]``."""
    at = columns.view(-1, 1, 1).expand(-1, -1, running.shape[2])
    return running.gather(1, at).squeeze(1)


def _replace(
    weights: Weights, where: torch.Tensor, present: torch.Tensor, chosen: torch.Tensor
) -> Resampled:
    """Make ``chosen`` the ancestors in ``where``, with equal weights and their mean banked."""
    stay = torch.arange(chosen.shape[-1], device=chosen.device)
    selected = where.unsqueeze(-1) & present
    return Resampled(
        ancestors=torch.where(selected, chosen, stay),
        log_weights=torch.where(selected, 0.0, weights.log),
        log_evidence=torch.where(where, weights.log_mean, 0.0),
    )


def _first_true(flags: torch.Tensor) -> torch.Tensor:
    """Index of the first True along the last dimension, its size where there is none."""
    return (~flags).cumprod(-1).sum(-1)
