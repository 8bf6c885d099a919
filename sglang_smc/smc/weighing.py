"""Weigh, cut and resample the particles of one round, for all groups at once.

A round drafts K tokens for each particle, scores them, and then decides how many of the K columns
a group keeps, and whether it is resampled there; `smc.steps` has the glossary. Groups may differ
in N and in K: *present* are the particles that a group has.

*Log-weights* are unnormalised. They start at zero, gain ``alpha log p - log q`` with each draft
token (alpha is the request's power, mostly 1), and have mean weight 1 when the group is resampled;
the mean weight before is a factor of Z-hat. A NaN makes a particle dead: its weight is zero
(`accumulate`). A particle that is not present has weight zero, too, and is left as it is.

*Evidence* is the factor by which the block up to column j multiplies the group's total weight, of
expectation 1 for a normalised p. It bounds the columns that a group keeps (docs/algorithm.md,
"Evidence, and where a block is cut"): the most columns with

    u < evidence_j / c,   u one uniform for the round, c the evidence threshold,

but none in which every particle dies; with c = 0 no other column is cut. With c = 1, given the
population, no sequence has a higher probability as the output of a whole uncut block than under p:
for N chains of one prefix, of which one is drawn by weight, ``p(x) E[1 / max(c, evidence)]``.

*Resampling schemes* invert cumulative shares at N points (`ancestors_of`). All are unbiased,
E[weight of the offspring of n] = N w_n, and none ever selects a particle of weight zero. They
differ in the variance that they add (Chopin and Papaspiliopoulos, An Introduction to Sequential
Monte Carlo, 2020, chapter 9). Three have shares w_n, offspring of equal weights, and the points

    systematic    (u + i) / N with one u; offspring floor or ceil of N w_n; the default
    stratified    (u_i + i) / N; lower variance than multinomial, and proven
    multinomial   u_i: independent draws; the textbook's, with the highest variance

    chopthin      systematic, of shares `chopped`: most particles stay, with their weights

*Chopthin* (Gandy and Lau 2016, arXiv 1502.07532) draws only where weights differ by more than a
factor eta: below a bound particles are thinned, and those left get the bound as their weight; above
eta / 2 times the bound they are chopped into copies, which divide the weight. Then none weighs more
than eta times another.

*Resizing* is a resampling step to another number of particles: M equally weighted particles, each
drawn from the weights, represent the same distribution as N do. The mean weight is multiplied into
the evidence, so Z-hat stays unbiased, and particles stay properly weighted.
"""

from typing import NamedTuple, TypeVar

import torch

SCHEMES = ("systematic", "stratified", "multinomial", "chopthin")
HALF_RATIO_INVERSE = 11 / 32
"""2 / eta of chopthin, exact in float32. So eta is 5.82, where Gandy and Lau take 3 + sqrt 8: with
both the effective sample size is never below N / 2."""


def ancestors_of(
    weights: torch.Tensor, uniforms: torch.Tensor, scheme: torch.Tensor, num_particles: torch.Tensor
) -> torch.Tensor:
    """Return the particle that each of N becomes a copy of, ``[G, S]`` int64.

    Args:
        weights: ``[G, S]`` float64 shares of any sum, at least one positive.
        uniforms: ``[G, S]`` float64 in [0, 1); systematic resampling and chopthin use the first.
        scheme: ``[G]`` int64, an index in `SCHEMES`.
        num_particles: ``[G]`` int64, N <= S: entries beyond N are undefined.
    """
    scheme = scheme.unsqueeze(1)
    place = torch.arange(weights.shape[1], device=weights.device)
    has_one = (scheme == SCHEMES.index("systematic")) | (scheme == SCHEMES.index("chopthin"))
    in_place = uniforms[:, :1].where(has_one, uniforms) + place
    is_free = scheme == SCHEMES.index("multinomial")
    return _inverse_cdf(weights, uniforms.where(is_free, in_place / num_particles.unsqueeze(1)))


def _inverse_cdf(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return the particle at each point of the cumulative shares on [0, 1), ``[..., N]``."""
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1:]
    found = torch.searchsorted(cumulative, points * total, right=True)
    # Rounding may move a point to the total: the last particle of positive weight has it.
    return torch.minimum(found, (cumulative < total).sum(-1, keepdim=True))


def chopped(
    weights: torch.Tensor, num_particles: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean number of each particle's offspring by chopthin, and the bound.

    A particle of weight w has w / a if it is below the bound a, one up to eta a / 2, and 2 w /
    (eta a) above. The numbers are to sum to N, and their sum falls with a; so a solves what is
    linear in 1 / a between the places where some number begins or ceases to be one.

    Args:
        weights: ``[G, S]`` float64, normalised; all zero if all are dead.
        num_particles: ``[G]`` int64 N.

    Returns:
        ``[G, S]`` and ``[G, 1]`` float64.
    """
    size = num_particles.unsqueeze(1).to(weights)
    below = torch.zeros_like(size)  # [G, 1]: the last such place where the sum is N or more
    for places in (weights, weights * HALF_RATIO_INVERSE):
        sums = _num_offspring(weights.unsqueeze(1), places.unsqueeze(2)).sum(2)  # [G, S]
        below = below.maximum(torch.where(sums >= size, places, 0.0).amax(1, True))
    is_light = weights <= below
    is_heavy = weights * HALF_RATIO_INVERSE > below
    light = torch.where(is_light, weights, 0.0).sum(1, True)
    heavy = torch.where(is_heavy, weights, 0.0).sum(1, True)
    num_whole = (~is_light & ~is_heavy).sum(1, True)
    bound = (light + heavy * HALF_RATIO_INVERSE) / (size - num_whole)
    bound = torch.where(bound > 0, bound, 1.0)  # 0 or NaN if all are dead
    return _num_offspring(weights, bound), bound


def _num_offspring(weights: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    ratio = weights / bound
    return torch.minimum(ratio, (ratio * HALF_RATIO_INVERSE).clamp_min(1.0))


def covered_columns(
    running: torch.Tensor,
    evidence_threshold: torch.Tensor,
    num_steps: torch.Tensor,
    keep_uniforms: torch.Tensor,
) -> torch.Tensor:
    """Return the most columns that each group may keep, ``[G]`` int64.

    Args:
        running: ``[G, K + 1, N]`` log-weights after each column, the first before the block.
        evidence_threshold: ``[G]`` float64 c >= 0; infinite to keep none.
        num_steps: ``[G]`` int64: each group's own K.
        keep_uniforms: ``[G]`` float64 in [0, 1).
    """
    total = torch.logsumexp(running, dim=2)  # [G, K + 1]
    log_evidence = total - total[:, :1]
    # In logs nothing underflows. -inf < -inf is False, so a column of dead particles is not kept.
    enough = (keep_uniforms.log() + evidence_threshold.log()).unsqueeze(1) < log_evidence
    column = torch.arange(running.shape[1], device=running.device)
    return torch.minimum((enough * column).amax(1), num_steps)


def accumulate(log_weights: torch.Tensor, increments: torch.Tensor) -> torch.Tensor:
    """Return the cumulative log-weights after each drafted column.

    Args:
        log_weights: ``[..., N]`` before the block.
        increments: ``[..., N, K]`` of ``log p(x) - log q(x)``. NaN counts as ``-inf``, and so
            does ``+inf``: a drawn token has q > 0, so only a broken draft can give one.

    Returns:
        ``[..., N, K + 1]`` float64; column ``k`` holds the weights after ``k`` tokens.
    """
    dead = -torch.inf
    steps = torch.nan_to_num(increments.double(), nan=dead, posinf=dead, neginf=dead)
    start = log_weights.double().unsqueeze(-1)
    return torch.cat([start, steps], dim=-1).cumsum(-1)


def log_mean_exp(log_weights: torch.Tensor, num_particles: torch.Tensor) -> torch.Tensor:
    """Return ``log((1/N) sum_n w_n)`` over the last dimension; ``-inf`` if all are dead.

    N is ``num_particles`` ``[...]``: an empty place has weight zero, as dead particles have.
    """
    return torch.logsumexp(log_weights, dim=-1) - torch.log(num_particles.to(log_weights))


def normalized(log_weights: torch.Tensor) -> torch.Tensor:
    """Return weights that sum to one over the last dimension; all zero if all are dead."""
    unnormalized = _relative(log_weights)
    total = unnormalized.sum(-1, keepdim=True)
    return unnormalized / total.clamp_min(torch.finfo(total.dtype).tiny)


def effective_sample_size(log_weights: torch.Tensor) -> torch.Tensor:
    """Return ``(sum w)^2 / sum w^2`` (Kong 1992), from 1 to N; 0 if all are dead.

    It is exactly N for equal weights, so that no threshold up to 1 resamples those.
    """
    unnormalized = _relative(log_weights)
    squares = unnormalized.square().sum(-1)
    return unnormalized.sum(-1).square() / squares.clamp_min(torch.finfo(squares.dtype).tiny)


def _relative(log_weights: torch.Tensor) -> torch.Tensor:
    """Return weights over the largest one, so that equal log-weights give exactly 1."""
    highest = log_weights.amax(-1, keepdim=True)
    # In a dead group the largest is -inf: shift by 0, and keep exp(-inf) = 0.
    return torch.exp(log_weights - highest.masked_fill(highest == -torch.inf, 0.0))


T = TypeVar("T")


class Decision(NamedTuple):
    """Draft tokens that a round keeps, and its particles after resampling there."""

    num_columns: torch.Tensor  # [G] int64 in 0..K: columns kept; a mean if particles differ in it
    num_kept: torch.Tensor  # [G, N] draft tokens that each particle keeps
    weighed: torch.Tensor  # [G, N] log-weights after the kept columns
    ess: torch.Tensor  # [G] effective sample size of those weights
    resampled: torch.Tensor  # [G] bool: the effective sample size is below the threshold
    all_zero: torch.Tensor  # [G] bool: every particle dies in the column after the kept ones
    ancestors: torch.Tensor  # [G, N] int64
    log_weights: torch.Tensor  # [G, N] of the resampled particles
    log_evidence: torch.Tensor  # [G] what resampling adds to log Z-hat
    num_killed: torch.Tensor  # [G] int64 particles of which resampling leaves no copy
    verified: torch.Tensor  # [G] bool: exact verification set the kept tokens; K = 0: all but smc


class Block(NamedTuple):
    """A round's scored draft tokens, with what each group decides by."""

    log_weights: torch.Tensor  # [G, N] float64 before the block
    log_p: torch.Tensor  # [G, N, K] of the draft tokens, as the next
    log_q: torch.Tensor  # [G, N, K]
    up_to_end: torch.Tensor  # [G, N, K] bool: up to a particle's end, within its request's K
    present: torch.Tensor  # [G, N] bool
    power: torch.Tensor  # [G] float64 alpha: a token adds alpha log p - log q to the log-weight
    num_steps: torch.Tensor  # [G] int64 K of each group
    ess_threshold: torch.Tensor  # [G] float64 tau; resample where ESS < tau * N
    resample_each_token: torch.Tensor  # [G] bool: test the ESS after every column, not the last
    evidence_threshold: torch.Tensor  # [G] float64 c; keep columns that the evidence covers
    scheme: torch.Tensor  # [G] int64 resampling method, an index in `SCHEMES`
    keep_uniforms: torch.Tensor  # [G] float64 uniforms, for the evidence
    uniforms: torch.Tensor  # [G, N] float64 uniforms, for the ancestors


def reweight_and_resample(block: Block) -> Decision:
    """Weigh a block of draft tokens, cut it, and `resample` where the ESS is low.

    The effective sample size is tested once, after the kept columns, or after every column, to
    stop at the first that fails (arXiv 2604.15672, section 3). No more columns are kept than the
    evidence covers (`covered_columns`), so a block stops before a column in which all particles
    die: the target's own draw takes that column's place, and a round always advances by at least
    one token. A single chain at temperature 0 keeps the draft tokens that are the target's
    likeliest ones.
    """
    up_to_end = block.up_to_end
    present = block.present
    num_steps = block.num_steps
    scored = block.log_p.double() * block.power.view(-1, 1, 1)
    increments = torch.where(up_to_end, scored - block.log_q, 0.0)
    running = accumulate(block.log_weights, increments).transpose(1, 2)  # [G, K + 1, N]
    ess = effective_sample_size(running)  # [G, K + 1]
    threshold = block.evidence_threshold
    covered = covered_columns(running, threshold, num_steps, block.keep_uniforms)
    low = ess < (block.ess_threshold * present.sum(1)).unsqueeze(1)  # [G, K + 1]
    first_low = torch.minimum(_first_true(low[:, 1:]) + 1, covered)
    num_columns = torch.where(block.resample_each_token, first_low, covered)
    dead = (running == -torch.inf).all(2)  # [G, K + 1]; a group never starts dead
    at = num_columns.unsqueeze(1)
    next_column = (at + 1).clamp_max(dead.shape[1] - 1)
    column = torch.arange(up_to_end.shape[2], device=up_to_end.device)
    weighed = column_of(running, num_columns)
    resampled = low.gather(1, at).squeeze(1)
    ancestors, log_weights, log_evidence = resample(
        weighed, resampled, present, block.uniforms, block.scheme
    )
    return Decision(
        num_columns=num_columns,
        num_kept=(up_to_end & (column < at.unsqueeze(2))).sum(2),
        weighed=weighed,
        ess=ess.gather(1, at).squeeze(1),
        resampled=resampled,
        all_zero=dead.gather(1, next_column).squeeze(1) & (num_columns < num_steps),
        ancestors=ancestors,
        log_weights=log_weights,
        log_evidence=log_evidence,
        num_killed=present.sum(1) - num_distinct(ancestors, present),
        verified=torch.zeros_like(resampled),
    )


class Resampled(NamedTuple):
    """Particles after weights changed, and after resampling where these had become uneven."""

    weighed: torch.Tensor  # [G, N] log-weights before resampling
    ess: torch.Tensor  # [G] effective sample size of those weights
    resampled: torch.Tensor  # [G] bool: it is below the threshold
    all_zero: torch.Tensor  # [G] bool: every particle would die, so that the weights stay
    ancestors: torch.Tensor  # [G, N] int64
    log_weights: torch.Tensor  # [G, N] of the resampled particles
    log_evidence: torch.Tensor  # [G] what resampling adds to log Z-hat
    num_killed: torch.Tensor  # [G] int64 particles of which resampling leaves no copy


def resample_by_weights(
    log_weights: torch.Tensor,
    gains: torch.Tensor,
    present: torch.Tensor,
    ess_threshold: torch.Tensor,
    uniforms: torch.Tensor,
    scheme: torch.Tensor,
) -> Resampled:
    """Multiply the weights by exp(gains), and `resample` where the ESS is low.

    A group in which every particle would die keeps its weights.

    Args:
        log_weights: ``[G, N]`` float64.
        gains: ``[G, N]`` float64; NaN and +inf count as -inf, as in `accumulate`.
        present: ``[G, N]`` bool.
        ess_threshold: ``[G]`` float64 tau: resample where ESS < tau N.
        uniforms: ``[G, N]`` float64 in [0, 1), for the ancestors.
        scheme: ``[G]`` int64, an index in `SCHEMES`.
    """
    gained = accumulate(log_weights, gains.unsqueeze(2))[:, :, 1]
    all_zero = (gained == -torch.inf).all(1)
    weighed = torch.where(all_zero.unsqueeze(1), log_weights, gained)
    ess = effective_sample_size(weighed)
    resampled = ess < ess_threshold * present.sum(1)
    ancestors, after, log_evidence = resample(weighed, resampled, present, uniforms, scheme)
    return Resampled(
        weighed=weighed,
        ess=ess,
        resampled=resampled,
        all_zero=all_zero,
        ancestors=ancestors,
        log_weights=after,
        log_evidence=log_evidence,
        num_killed=present.sum(1) - num_distinct(ancestors, present),
    )


def resample(
    log_weights: torch.Tensor,
    where: torch.Tensor,
    present: torch.Tensor,
    uniforms: torch.Tensor,
    scheme: torch.Tensor,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Resample the groups in ``where``; the others keep their particles and weights.

    Args:
        log_weights: ``[G, N]``, at least one finite per group.
        where, present: ``[G]`` and ``[G, N]`` bool.
        uniforms: ``[G, N]`` float64.
        scheme: ``[G]`` int64, an index in `SCHEMES`.
        after: ``[G, N]`` bool: the particles from now on, in the first places; None: ``present``.

    Returns:
        Ancestors ``[G, N]``, log-weights ``[G, N]``, and what is added to log Z-hat ``[G]``.
    """
    after = present if after is None else after
    size = after.sum(1)
    weights = normalized(log_weights)
    shares, bound = chopped(weights, size)
    is_chopped = (scheme == SCHEMES.index("chopthin")).unsqueeze(1)
    chosen = ancestors_of(torch.where(is_chopped, shares, weights), uniforms, scheme, size)
    heavy = weights.gather(1, chosen).maximum(bound) * size.unsqueeze(1)  # of mean 1
    of_copies = heavy.log() - num_alike(chosen, after).double().log()
    drawn = torch.where(is_chopped, of_copies, 0.0).masked_fill(~after, -torch.inf)
    stay = torch.arange(chosen.shape[1], device=chosen.device)
    redrawn = where.unsqueeze(1)
    return (
        torch.where(redrawn & after, chosen, stay),
        torch.where(redrawn, drawn, log_weights),
        torch.where(where, log_mean_exp(log_weights, present.sum(1)), 0.0),
    )


def num_alike(places: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Count the present particles of each one's place: ``[G, N]``, ``[G, N]`` to ``[G, N]``."""
    same = (places.unsqueeze(2) == places.unsqueeze(1)) & present.unsqueeze(1)  # [G, N, N]
    return same.sum(2)


def num_distinct(places: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Count the distinct places among a group's present particles.

    Args:
        places: ``[G, N]`` int64, one per particle.
        present: ``[G, N]`` bool.

    Returns:
        ``[G]`` int64.
    """
    same = (places.unsqueeze(2) == places.unsqueeze(1)) & present.unsqueeze(1)  # [G, N, N]
    return (present & ~same.tril(-1).any(2)).sum(1)


def draw(shares: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one particle of each group by its share: ``[G, N]``, ``[G]`` to ``[G]``."""
    return _inverse_cdf(shares, uniforms.unsqueeze(1)).squeeze(1)


def choose(where: torch.Tensor, yes: T, no: T) -> T:
    """Return ``yes`` for the groups ``where`` ``[G]`` bool, ``no`` for the others.

    Both are a tensor ``[G, ...]``, or a tuple of such tensors.
    """
    if isinstance(yes, torch.Tensor) and isinstance(no, torch.Tensor):
        return torch.where(where.view(-1, *(1,) * (yes.dim() - 1)), yes, no)
    assert isinstance(yes, tuple) and isinstance(no, tuple)
    fields = [choose(where, a, b) for a, b in zip(yes, no, strict=True)]
    return type(yes)._make(fields) if hasattr(yes, "_make") else tuple(fields)  # pyright: ignore


def column_of(running: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return row ``columns[g]`` of each group: ``[G, C, N]``, ``[G]`` to ``[G, N]``."""
    at = columns.view(-1, 1, 1).expand(-1, -1, running.shape[2])
    return running.gather(1, at).squeeze(1)


def _first_true(flags: torch.Tensor) -> torch.Tensor:
    """Return the index of the first True along the last dimension, its size where there is none."""
    return (~flags).cumprod(-1).sum(-1)


def revalue(
    log_weights: torch.Tensor, log_before: torch.Tensor, log_values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace phi_{t-1} in the weights by phi_t: they gain log phi_t - log phi_{t-1}.

    The target of the particles is then p phi_t, whatever the earlier values were, since they
    cancel (Chopin and Papaspiliopoulos, An Introduction to Sequential Monte Carlo, 2020,
    section 5.2). Dead particles stay dead.

    Args:
        log_weights: ``[G, N]`` float64.
        log_before: ``[G, N]`` float64 log phi_{t-1}, finite where a particle is alive.
        log_values: ``[G, N]`` float64 log phi_t; NaN keeps the one before.

    Returns:
        The log-weights, and the log phi that they include now, both ``[G, N]``.
    """
    is_new = (log_weights > -torch.inf) & ~log_values.isnan()
    gains = torch.where(is_new, log_values - log_before, 0.0)
    return log_weights + gains, torch.where(is_new, log_values, log_before)
