"""Take particles through a round: out of the tables, on to new tokens and ancestors, and back.

Each function is one launch, of a program for each group. What particles carry in few rounds alone,
log-probabilities and potential values, is left to torch.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_smc.kernels.agreement import (
    _begins_alike,
    _first_heaviest,
    _log_sum,
    _splits,
    _Texts,
    _texts,
    _without_rounding,
)
from sglang_smc.kernels.randomness import _uniform
from sglang_smc.kernels.reweight import _ancestors, _members, _normalized, _num_distinct
from sglang_smc.kernels.tensors import as_float, contiguous, padded_particles
from sglang_smc.smc.population import Narrowed, Population, Scores, copied
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.weighing import Decision

_BLOCK = tl.constexpr(64)  # tokens of each text that a program copies at once
_SELECT = tl.constexpr(int(Purpose.SELECT))


class _Side(NamedTuple):
    """Populations of a batch or of a table: what a kernel reads, or what it writes."""

    columns: Population  # contiguous
    num_particles: float  # see `as_float`
    width: int  # of texts

    @classmethod
    def of(cls, population: Population) -> "_Side":
        _, num_particles, width = population.texts.shape
        return cls(_bare(population), as_float(num_particles), width)


class _New(NamedTuple):
    """Tokens that particles append, and what they become copies of; None: does not apply."""

    tokens: torch.Tensor  # [G, N, K]
    ends: torch.Tensor  # [G, N, K] bool
    counts: torch.Tensor | None = None  # [G, N]; None: a token of each that has not ended
    ancestors: torch.Tensor | None = None  # [G, N]
    log_evidence: torch.Tensor | None = None  # [G] gained with these
    failure: torch.Tensor | None = None  # [G]


class _Asked(NamedTuple):
    """Hold the arguments of `narrow`, and what it reads beside the populations."""

    seeds: torch.Tensor  # [G] int64
    lag: torch.Tensor  # [G] int64
    weighs: torch.Tensor  # [G] bool
    heaviest: torch.Tensor  # [G] bool
    texts: _Texts  # with the token before each tail
    complete: torch.Tensor | None  # [G, N] bool, of `Scores`


def _bare(population: Population) -> Population:
    """Return the columns that kernels read or write; of a subclass Triton knows no names."""
    columns = population._replace(logprobs=None, scores=None)
    return Population._make(None if of is None else of.contiguous() for of in columns)


def _like(population: Population, *names: str) -> dict[str, torch.Tensor]:
    kind = {"memory_format": torch.contiguous_format}
    return {name: torch.empty_like(getattr(population, name), **kind) for name in names}


def _launch(kernel: Any, num_groups: int, num_particles: int, *arguments: Any) -> None:
    kernel[(num_groups,)](*arguments, padded=padded_particles(num_particles))


def gather(
    table: Population, rows: torch.Tensor, num_particles: int, width: int
) -> tuple[Population, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the populations in rows of a table, with what a round begins with.

    Reference: `sglang_smc.smc.population.Population.gather`, same arguments.
    """
    size = len(rows)
    few = table.cut(num_particles, width)
    columns = few._replace(scores=None)
    found = table._make(None if of is None else of.new_empty(size, *of.shape[1:]) for of in columns)
    if few.scores is not None:
        found = found._replace(scores=Scores._make(values[rows] for values in few.scores))
    shape = size, num_particles
    begun = tuple(rows.new_empty(s) for s in (shape, (*shape, 2), (size, 1)))
    _launch(_gather, *shape, _Side.of(table), _Side.of(found), rows.contiguous(), begun)
    return found, *begun


def store(
    population: Population, table: Population, rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Store populations in rows of a table, without the tokens that are emitted.

    Reference: `sglang_smc.smc.population.Population.store`, same arguments.
    """
    last = torch.empty_like(counts)
    sides = _Side.of(population), _Side.of(table)
    _launch(_store, *population.lengths.shape, *sides, *contiguous((rows, counts)), last)
    if population.scores is not None and table.scores is not None:
        for held, values in zip(table.scores, population.scores, strict=True):
            held[rows, : values.shape[1]] = values
    return last


def extend(
    population: Population, tokens: torch.Tensor, ends: torch.Tensor, decision: Decision
) -> Population:
    """Append the kept draft tokens, and make each particle a copy of its ancestor.

    Reference: `sglang_smc.smc.population.Population.extend`, same arguments.
    """
    ancestors = decision.ancestors
    new = tokens, ends, decision.num_kept, ancestors, decision.log_evidence
    after = population._replace(
        **_like(population, "texts", "lengths", "ended", "roots", "fidelity", "log_evidence"),
        **copied({"logprobs": population.logprobs, "scores": population.scores}, ancestors),
        log_weights=decision.log_weights,
    )
    return _extended(population, after, _New(*contiguous(new)))


def append_bonus(
    population: Population, tokens: torch.Tensor, ends: torch.Tensor, failure: torch.Tensor
) -> Population:
    """Append a token to each text that has not ended, and stop groups that failed.

    Reference: `sglang_smc.smc.population.Population.append_bonus`, same arguments.
    """
    own = _like(population, "texts", "lengths", "ended", "log_weights")
    new = _New(*contiguous((tokens, ends)), failure=failure)
    return _extended(population, population._replace(**own), new)


def _extended(before: Population, after: Population, new: _New) -> Population:
    num_columns = new.tokens[0, 0].numel()
    _launch(_extend, *before.lengths.shape, _Side.of(before), _bare(after), new, num_columns)
    return after


def narrow(
    population: Population,
    seeds: torch.Tensor,
    lag: torch.Tensor,
    weighs: torch.Tensor,
    heaviest: torch.Tensor,
) -> Narrowed:
    """Draw the tokens beyond the lag, and the whole tails of finished groups.

    Reference: `sglang_smc.smc.population.Population.narrow`, same arguments.
    """
    own = "texts", "lengths", "ended", "roots", "fidelity", "log_weights"
    scores = population.scores
    whole = torch.empty_like(seeds)
    found = Narrowed(
        population._replace(**_like(population, *own)),
        ancestors=seeds.new_empty(population.lengths.shape),
        dropped=torch.empty_like(seeds, dtype=torch.bool),
        log_evidence=torch.empty_like(population.log_evidence),
        num_common=whole,
        num_roots=torch.empty_like(whole),
    )
    before = _Side.of(population)
    asked = _Asked(
        *contiguous((seeds, lag, weighs, heaviest)),
        texts=_texts(before.columns.texts[:, :, 1:]),
        complete=None if scores is None else scores.complete,
    )
    to = found._replace(population=_bare(found.population))
    _launch(_narrow, *population.lengths.shape, before, to, asked)
    carried = copied({"logprobs": population.logprobs, "scores": scores}, found.ancestors)
    return found._replace(population=found.population._replace(**carried))


@triton.jit
def _num_particles(side):
    return tl.cast(side.num_particles, tl.int32)


@triton.jit
def _copy_history(source, target, at, to, here):
    tl.store(target.roots + to, tl.load(source.roots + at, mask=here), mask=here)
    for place in tl.static_range(4):
        total = tl.load(source.fidelity + at * 4 + place, mask=here)
        tl.store(target.fidelity + to * 4 + place, total, mask=here)


@triton.jit
def _copy(source, target, rows, places, here, width, shift):
    """Copy a row of particles without the first ``shift`` tokens; return what these had before."""
    of_source = source.columns
    of_target = target.columns
    row, to_row = rows
    at, to = places
    _copy_history(of_source, of_target, at, to, here)
    tl.store(of_target.ended + to, tl.load(of_source.ended + at, mask=here), mask=here)
    tl.store(of_target.present + to, tl.load(of_source.present + at, mask=here), mask=here)
    weight = tl.load(of_source.log_weights + at, mask=here)
    tl.store(of_target.log_weights + to, weight, mask=here)
    tl.store(of_target.log_evidence + to_row, tl.load(of_source.log_evidence + row))
    tl.store(of_target.unread + to_row, tl.load(of_source.unread + row))
    for start in range(0, width, _BLOCK):
        column = start + tl.arange(0, _BLOCK)[None, :]
        inside = here[:, None] & (column < width)
        place = at[:, None] * source.width + tl.minimum(column + shift, width - 1)
        tokens = tl.load(of_source.texts + place, mask=inside)
        tl.store(of_target.texts + to[:, None] * target.width + column, tokens, mask=inside)
    length = tl.load(of_source.lengths + at, mask=here, other=0)
    emitted = tl.load(of_source.num_emitted + row)
    tl.store(of_target.lengths + to, tl.maximum(length - shift, 0), mask=here)
    tl.store(of_target.num_emitted + to_row, emitted + shift)
    return length, emitted


@triton.jit
def _gather(table, found, rows, begun, padded: tl.constexpr):
    group, particle, own, here = _members(_num_particles(found), padded)
    output_lengths, last_two, position = begun
    row = tl.load(rows + group)
    at = row * _num_particles(table) + particle
    length, emitted = _copy(table, found, (row, group), (at, own), here, found.width, 0)
    tl.store(output_lengths + own, emitted + length, mask=here)
    last = table.columns.texts + at * table.width + length
    tl.store(last_two + 2 * own, tl.load(last, mask=here), mask=here)
    tl.store(last_two + 2 * own + 1, tl.load(last + 1, mask=here), mask=here)
    runs = here & (tl.load(table.columns.ended + at, mask=here, other=1) == 0)
    shortest = tl.min(tl.where(runs, length, tl.max(length, 0)), 0)
    tl.store(position + group, emitted + shortest)


@triton.jit
def _store(population, table, rows, counts, last, padded: tl.constexpr):
    num_particles = _num_particles(population)
    group, particle, own, here = _members(num_particles, padded)
    row = tl.load(rows + group)
    count = tl.load(counts + group)
    to = row * _num_particles(table) + particle
    _copy(population, table, (group, row), (own, to), here, population.width, count)
    first = group * num_particles * population.width
    place = tl.minimum(count + 1, population.width - 1)
    tl.store(last + group, tl.load(population.columns.texts + first + place))


@triton.jit(do_not_specialize=["num_columns"])
def _extend(before, target, new, num_columns, padded: tl.constexpr):
    num_particles = _num_particles(before)
    group, _, own, here = _members(num_particles, padded)
    source = before.columns
    at = own
    if new.ancestors is not None:
        at = group * num_particles + tl.load(new.ancestors + own, mask=here, other=0)
        _copy_history(source, target, at, own, here)
        gained = tl.load(source.log_evidence + group) + tl.load(new.log_evidence + group)
        tl.store(target.log_evidence + group, gained)
    ended = tl.load(source.ended + at, mask=here, other=1) != 0
    if new.counts is not None:
        count = tl.load(new.counts + at, mask=here, other=0)
    else:
        count = 1 - ended.to(tl.int64)
    for step in range(num_columns):
        end = tl.load(new.ends + at * num_columns + step, mask=here & (step < count), other=0)
        ended = ended | (end != 0)
    length = tl.load(source.lengths + at, mask=here, other=0)
    grown = length + count
    if new.failure is not None:
        stops = tl.load(new.failure + group) > 0
        is_present = tl.load(source.present + own, mask=here, other=0) != 0
        weight = tl.load(source.log_weights + own, mask=here)
        tl.store(target.log_weights + own, tl.where(stops & is_present, 0.0, weight), mask=here)
        grown = tl.where(stops, 0, grown)
        ended = ended | stops
    tl.store(target.lengths + own, grown, mask=here)
    tl.store(target.ended + own, ended, mask=here)
    for start in range(0, before.width, _BLOCK):
        column = start + tl.arange(0, _BLOCK)[None, :]
        inside = here[:, None] & (column < before.width)
        old = tl.load(source.texts + at[:, None] * before.width + column, mask=inside)
        place = column - 2 - length[:, None]
        is_new = inside & (place >= 0) & (place < num_columns) & (column < before.width - 1)
        token = tl.load(new.tokens + at[:, None] * num_columns + place, mask=is_new)
        to = target.texts + own[:, None] * before.width + column
        tl.store(to, tl.where(is_new, token, old), mask=inside)


@triton.jit
def _narrow(before, found, asked, padded: tl.constexpr):
    """Narrow a group in the steps of `Population.narrow`, and of `prefixes.narrow` in it."""
    group, particle, own, here = _members(_num_particles(before), padded)
    population = before.columns
    after = found.population
    log_weights = tl.load(population.log_weights + own, mask=here, other=-float("inf"))
    present = tl.load(population.present + own, mask=here, other=0) != 0

    # late: the tokens beyond the lag, or all tokens of a finished group
    finished = _is_finished(population, asked.complete, present, own, here)
    lengths = tl.load(population.lengths + own, mask=here, other=0)
    longest = tl.max(lengths, 0)
    counts = _num_late(asked, group, longest, finished)

    # draw: the particle whose prefix all are to have
    relative, log_sum = _log_sum(log_weights)
    log_mean = log_sum - tl.log(tl.sum(present.to(tl.int32), 0).to(tl.float64))
    tl.store(found.log_evidence + group, tl.load(population.log_evidence + group) + log_mean)
    furthest = tl.load(population.num_emitted + group) + longest
    drawn = _drawn(asked, group, furthest, log_weights, relative, particle, padded)

    # split: the weights of those that stay, to fill the places of those that leave
    stays = _begins_alike(asked.texts, lengths, counts, particle, drawn, here) & present
    leaves = present & (stays == 0)
    num_free = tl.sum(leaves.to(tl.int32), 0)
    tl.store(found.dropped + group, (num_free > 0) & (finished == 0))
    ancestors, split = _splits(log_weights, stays, leaves, num_free, particle, padded)
    split = _raised(split, ancestors, log_weights, log_sum, stays, particle)
    tl.store(found.ancestors + own, ancestors.to(tl.int64), mask=here)
    tl.store(after.log_weights + own, tl.where(present, split, log_weights), mask=here)

    # copy: each particle becomes its ancestor
    at = own - particle + ancestors
    lengths = _descend(population, after, at, own, here)
    num_roots = _num_distinct(
        tl.load(population.roots + own, mask=here, other=0), present, particle
    )
    tl.store(found.num_roots + group, num_roots)

    # common: the tokens that all tails begin with
    num_common = _copy_texts(before, after, (at, own), particle, here, present, lengths)
    tl.store(found.num_common + group, num_common.to(tl.int64))


@triton.jit
def _is_finished(population, complete, present, own, here):
    """Return whether a group's answer may be drawn, see `Population.is_finished`."""
    ended = tl.load(population.ended + own, mask=here, other=1) != 0
    if complete is not None:
        is_complete = tl.load(complete + own, mask=here, other=1) != 0
        ended = ended & (is_complete | (present == 0))
    return tl.min(ended.to(tl.int32), 0) != 0


@triton.jit
def _num_late(asked, group, longest, finished):
    """Return the number of tokens to draw: those beyond the lag, or all of a finished group."""
    late = tl.maximum(longest + 1 - tl.load(asked.lag + group), 0)
    late = tl.where(tl.load(asked.weighs + group) != 0, late, 0)
    # A particle may have no token but its own first one: that is drawn, too.
    return tl.where(finished, tl.maximum(longest, 1), late)


@triton.jit
def _drawn(asked, group, furthest, log_weights, relative, particle, padded: tl.constexpr):
    """Return the particle that gives the tokens: drawn by weight, or the first heaviest."""
    point = _uniform(tl.load(asked.seeds + group), furthest, particle * 0, _SELECT)
    by_weight = tl.max(_ancestors(_normalized(relative), point, particle), 0)
    heaviest = _first_heaviest(_without_rounding(log_weights), particle, padded)
    return tl.where(tl.load(asked.heaviest + group) != 0, heaviest, by_weight)


@triton.jit
def _raised(split, ancestors, log_weights, log_sum, stays, particle):
    """Return each copy's log-weight, raised by what those that leave had: the sum is as before."""
    _, kept = _log_sum(tl.where(stays, log_weights, -float("inf")))
    raised = tl.where(log_sum == -float("inf"), 0.0, log_sum - kept)
    copies = ancestors[:, None] == particle[None, :]
    return tl.sum(tl.where(copies, (split + raised)[None, :], 0.0), 1)


@triton.jit
def _descend(source, target, at, own, here):
    """Copy all of the ancestors but weights and texts; return the lengths of their tails."""
    _copy_history(source, target, at, own, here)
    ended = tl.load(source.ended + at, mask=here)
    lengths = tl.load(source.lengths + at, mask=here, other=0)
    tl.store(target.ended + own, ended, mask=here)
    tl.store(target.lengths + own, lengths, mask=here)
    return lengths


@triton.jit
def _copy_texts(before, target, places, particle, here, present, lengths):
    """Copy the ancestors' texts; return the leading tail tokens that present particles share.

    As `prefixes.common_tail` counts them: 0 where the tokens before the tails differ.
    """
    at, to = places
    width = before.width
    common = tl.min(tl.where(present, lengths, width), 0) + 2
    for start in range(0, width, _BLOCK):
        column = start + tl.arange(0, _BLOCK)[None, :]
        inside = here[:, None] & (column < width)
        token = tl.load(before.columns.texts + at[:, None] * width + column, mask=inside)
        tl.store(target.texts + to[:, None] * width + column, token, mask=inside)
        first = tl.sum(tl.where(particle[:, None] == 0, token, 0), 0)
        differs = inside & present[:, None] & (column > 0) & (token != first[None, :])
        parted = tl.min(tl.where(differs, column, width), 1)
        common = tl.minimum(common, tl.min(parted, 0))
    return tl.maximum(common - 2, 0)
