"""How chains behind a context are drafted, verified and bounded: for the study `chains`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from fidelity.simulate import Pair, Uniforms

from sglang_smc.smc import exact
from sglang_smc.smc.stratify import still_same, stratified
from sglang_smc.tokens.distribution import sample, token_log_probs

ROWS = 72
CHUNK = 32  # groups that are drafted at once

#: The column and who has the same text so far ``[G, N, N]`` to uniforms ``[G, N]``.
Points = Callable[[int, torch.Tensor], torch.Tensor]


class Drafts(NamedTuple):
    """G groups of N chains of K tokens behind one context."""

    tokens: torch.Tensor  # [G, N, K] int64
    ends: torch.Tensor  # [G, N, K] bool: the text ends with this token
    log_p: torch.Tensor  # [G, N, K + 1, V] float32
    log_q: torch.Tensor  # [G, N, K, V] float32

    def grouped(self, count: int, steps: int) -> Drafts:
        """The same independent chains in groups of ``count``, of their first ``steps`` tokens."""
        size = self.tokens.shape[0] * self.tokens.shape[1] // count

        def part(of: torch.Tensor, columns: int) -> torch.Tensor:
            return of.flatten(0, 1)[: size * count, :columns].unflatten(0, (size, count))

        log_p = part(self.log_p, steps + 1)
        return Drafts(
            part(self.tokens, steps), part(self.ends, steps), log_p, part(self.log_q, steps)
        )

    @property
    def has_ended(self) -> torch.Tensor:
        """Whether the text has ended with this column or before, ``[G, N, K]`` bool."""
        return self.ends.cumsum(2) > 0

    @property
    def log_weights(self) -> torch.Tensor:
        """Log p/q of each unended prefix, ``[G, N, K]``; -inf of one that has ended."""
        scored = token_log_probs(self.log_p[:, :, :-1], self.tokens).double()
        gained = scored - token_log_probs(self.log_q, self.tokens)
        return gained.cumsum(2).masked_fill(self.has_ended, -torch.inf)


class Round(NamedTuple):
    """What a round of each group comes to, ``[G]``."""

    tokens: torch.Tensor  # added to the text
    rows: torch.Tensor  # that the target scores
    draft_passes: torch.Tensor


def independent(uniforms: Uniforms) -> Points:
    """A number for each chain."""
    return lambda step, same: uniforms(*same.shape[:2])


def trunk(length: int, uniforms: Uniforms) -> Points:
    """One number for all chains in the first columns."""

    def points(step: int, same: torch.Tensor) -> torch.Tensor:
        found = uniforms(*same.shape[:2])
        return found[:, :1].expand_as(found) if step < length else found

    return points


def spread(num_columns: int, uniforms: Uniforms) -> Points:
    """Numbers of chains with one text are spread evenly in the first columns."""

    def points(step: int, same: torch.Tensor) -> torch.Tensor:
        found = uniforms(*same.shape[:2])
        return stratified(found, same) if step < num_columns else found

    return points


def draft(
    pair: Pair, context: Sequence[int], size: int, count: int, steps: int, points: Points
) -> Drafts:
    """Draft ``size`` groups of ``count`` chains behind a context, and score them."""
    first, length = torch.tensor([context]), len(context) + steps + 1
    models = [model.rows(1, length) for model in (pair.target, pair.draft)]
    for model in models:
        if len(context) > 1:
            model.log_probs(first[:, :-1], torch.zeros(1, dtype=torch.int64))
        model.reorder(torch.zeros(size * count, dtype=torch.int64))
    target, drafter = models
    start = torch.full((size * count,), len(context) - 1)
    same = torch.ones(size, count, count, dtype=torch.bool)
    tokens, log_qs = [first[0, -1].expand(size * count)], []
    for step in range(steps):
        log_q = drafter.log_probs(tokens[-1].unsqueeze(1), start + step)[:, 0]
        log_qs.append(log_q.unflatten(0, (size, count)))
        drawn = sample(log_qs[-1], points(step, same))
        same = still_same(same, drawn)
        tokens.append(drawn.flatten())
    log_p = target.log_probs(torch.stack(tokens, 1), start).unflatten(0, (size, count))
    drafted = torch.stack(tokens[1:], 1).unflatten(0, (size, count))
    return Drafts(drafted, drafted == pair.eos, log_p, torch.stack(log_qs, 2))


def pool(
    pair: Pair, context: Sequence[int], size: int, count: int, steps: int, points: Points
) -> Drafts:
    """The same in parts that fit into memory; ``size`` is a multiple of `CHUNK`."""
    parts = [draft(pair, context, CHUNK, count, steps, points) for _ in range(size // CHUNK)]
    return Drafts(*(torch.cat(part) for part in zip(*parts, strict=True)))


def verify(
    drafts: Drafts, uniforms: Uniforms, stops: torch.Tensor | None = None, trunk_length: int = 0
) -> exact.Verified:
    """Exact verification of each group.

    Args:
        stops: ``[G, N, K]`` bool: no chain goes on behind this token; the same for equal texts.
        trunk_length: so many first columns are one chain, with copies.
    """
    size, count, steps = drafts.tokens.shape
    ends = drafts.ends if stops is None else drafts.ends | stops
    num_steps = torch.full((size,), steps)
    chains = exact.Chains(drafts.tokens, ends, uniforms(size, count, steps), num_steps)
    at_root = torch.full((size,), 1 if trunk_length else count)
    log_p, log_q = drafts.log_p.flatten(0, 2), drafts.log_q
    walk = exact.begin_walk(chains, at_root, log_p.shape[1])
    for step in range(steps):
        if 0 < step == trunk_length:  # the branches are fresh draws behind it
            walk = walk._replace(follows=walk.walking.unsqueeze(1).expand(-1, count))
        column = log_q[:, :, step].flatten(0, 1)
        walk = exact.walk_on(walk, chains, log_p[walk.p_row], column[walk.q_row], step)
    return walk.found


def tokens_added(drafts: Drafts, found: exact.Verified) -> torch.Tensor:
    """Tokens that the round adds to each group's text, ``[G]``: none behind its end."""
    group = torch.arange(len(found.winner))
    before = torch.arange(drafts.ends.shape[2]) < found.num_columns.unsqueeze(1)
    ended = (drafts.ends[group, found.winner] & before).any(1)
    return found.num_columns + (~ended).long()


def play(drafts: Drafts, uniforms: Uniforms) -> Round:
    """N independent chains of K tokens."""
    size, count, steps = drafts.tokens.shape
    tokens = tokens_added(drafts, verify(drafts, uniforms))
    of = torch.ones(size, dtype=torch.int64)
    return Round(tokens, of * count * (steps + 1), of * steps)


def play_merged(drafts: Drafts, uniforms: Uniforms) -> Round:
    """The same, with the rows of the tree of their prefixes."""
    return play(drafts, uniforms)._replace(rows=tree_rows(drafts.tokens))


def tree_rows(tokens: torch.Tensor) -> torch.Tensor:
    """Different prefixes of the chains ``[G, N, K]``, the empty one included: ``[G]``."""
    size, count, _ = tokens.shape
    same = torch.ones(size, count, count, dtype=torch.bool)
    rows = torch.ones(size, dtype=torch.int64)
    for column in tokens.unbind(2):
        same = still_same(same, column)
        rows += (same.tril(-1).sum(2) == 0).sum(1)  # the eldest with each text
    return rows


def play_trunk(drafts: Drafts, length: int, uniforms: Uniforms) -> Round:
    """Chains that share their first ``length`` tokens."""
    size, count, steps = drafts.tokens.shape
    tokens = tokens_added(drafts, verify(drafts, uniforms, trunk_length=length))
    of = torch.ones(size, dtype=torch.int64)
    return Round(tokens, of * (1 + length + count * (steps - length)), of * steps)


def play_stopped(drafts: Drafts, doubt: torch.Tensor, most: float, uniforms: Uniforms) -> Round:
    """Chains that stop behind the first token whose ``doubt`` ``[G, N, K]`` is above ``most``."""
    stops = doubt > most
    tokens = tokens_added(drafts, verify(drafts, uniforms, stops))
    lengths = stopped_lengths(drafts, stops)
    return Round(tokens, (lengths + 1).sum(1), lengths.amax(1))


def stopped_lengths(drafts: Drafts, stops: torch.Tensor) -> torch.Tensor:
    """How many tokens each chain drafts that stops there, or at its end: ``[G, N]``."""
    open_before = (drafts.ends | stops).cumsum(2) - (drafts.ends | stops).long() == 0
    return open_before.sum(2)


def doubts(drafts: Drafts) -> dict[str, torch.Tensor]:
    """How unsure the draft is behind each token, ``[G, N, K]``, in nats.

    Behind the last one, where no chain goes on, it is 0.
    """
    entropy = -(drafts.log_q.exp() * drafts.log_q).sum(3)
    drafted = -token_log_probs(drafts.log_q, drafts.tokens)
    following = torch.nn.functional.pad(entropy[:, :, 1:], (0, 1))
    return {"entropy": following, "path": drafted.cumsum(2)}


def threshold(drafts: Sequence[Drafts], name: str) -> float:
    """The doubt at which `play_stopped` takes `ROWS` rows on average over contexts."""
    low, high = 0.0, 40.0
    of = [doubts(one)[name] for one in drafts]
    for _ in range(30):
        most = (low + high) / 2
        rows = [
            float((stopped_lengths(one, doubt > most) + 1).sum(1).double().mean())
            for one, doubt in zip(drafts, of, strict=True)
        ]
        low, high = (most, high) if sum(rows) < ROWS * len(rows) else (low, most)
    return (low + high) / 2


def at_most(log_weights: torch.Tensor, count: int, others: torch.Tensor | None = None) -> float:
    """Tokens a round that no lossless verification of ``count`` chains exceeds, on average.

    Args:
        log_weights: ``[M, K]`` of independent chains.
        others: ``[G, N, K]`` of groups of ``count`` chains that are drafted otherwise, with the
            same law each; None for independent ones.
    """
    half = len(log_weights) // 2
    halves = log_weights[:half], log_weights[half : 2 * half]
    total = 1.0
    for step in range(log_weights.shape[1]):
        group_most = None if others is None else others[:, :, step].amax(1)
        for fitted, held in (halves, halves[::-1]):
            loss = _loss(fitted[:, step], held[:, step], count, group_most)
            total += (1 - loss) / 2
    return total


def _loss(
    fitted: torch.Tensor, held: torch.Tensor, count: int, group_most: torch.Tensor | None
) -> float:
    """An estimate of q(B)^N - p(A), at the threshold that is best for the ``fitted`` chains."""
    ordered = fitted.sort().values
    share = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    mass = ordered.exp().cumsum(0) / len(ordered)
    gain, best = (share**count - mass).max(0)
    if gain <= 0:
        return 0.0
    inside = held <= ordered[best]
    if group_most is None:
        missed = _all_inside(int(inside.sum()), len(held), count)
    else:
        missed = float((group_most <= ordered[best]).double().mean())
    return missed - float(held[inside].exp().sum()) / len(held)


def _all_inside(inside: int, size: int, count: int) -> float:
    """The chance that ``count`` different ones of ``size`` chains are inside: unbiased for q^N."""
    share = 1.0
    for i in range(count):
        share *= max(0, inside - i) / (size - i)
    return share
