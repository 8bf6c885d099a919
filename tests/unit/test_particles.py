"""Populations of particles against the same as lists, and the table that holds them."""

import copy
import itertools
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from populations import population_of, shared

from sglang_smc.smc.prefixes import num_distinct
from sglang_smc.state.population import ParticleTable, Population, TailLogprobs

N, MAX_TAIL = 4, 9


@dataclass(frozen=True)
class Particle:
    text: tuple[int, ...]  # two tokens before the tail, and the tail
    root: int
    ended: bool = False
    present: bool = True


Groups = list[list[Particle]]


def logprobs_of(texts: torch.Tensor) -> TailLogprobs:
    """Each token's log-probability is minus its number."""
    tokens = texts[:, :, 2:]
    number = -tokens.float()
    wide = number.unsqueeze(3)
    ids = tokens.unsqueeze(3).expand(-1, -1, -1, 2)
    return TailLogprobs(number, wide.expand_as(ids), ids, wide)


def check(found: Population, groups: Groups, emitted: list[int]) -> None:
    assert found.num_emitted.tolist() == emitted
    assert found.present.tolist() == [[one.present for one in group] for group in groups]
    roots = [{one.root for one in group if one.present} for group in groups]
    assert num_distinct(found.roots, found.present).tolist() == list(map(len, roots))
    settled = [len({one.text[1] for one in group if one.present}) == 1 for group in groups]
    assert found.shares_last_token().tolist() == settled
    watched = found.roots.unsqueeze(2).expand_as(found.fidelity)
    assert torch.equal(found.fidelity, watched.double()), "it goes with the text"
    assert found.logprobs is not None
    for tensor, expected in zip(found.logprobs, logprobs_of(found.texts), strict=True):
        assert torch.equal(tensor, expected)
    for g, group in enumerate(groups):
        first = group[0].text[1] if settled[g] else -1
        assert found.first_token()[g] == first
        for n, one in enumerate(group):
            length = int(found.lengths[g, n])
            assert found.roots[g, n] == one.root and found.ended[g, n] == one.ended
            if not one.present:
                assert length == 0 and one.ended
                continue
            assert tuple(found.texts[g, n, : 2 + length].tolist()) == one.text
            assert found.last_two[g, n].tolist() == list(one.text[-2:])
            assert found.last_tokens[g, n] == one.text[-1]
            assert found.output_lengths[g, n] == emitted[g] + length


def common(group: list[Particle]) -> int:
    """Return how many tail tokens all of a group share, behind a token that they share."""
    columns = zip(*(one.text[1:] for one in group if one.present), strict=False)
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
    return max(0, len(list(alike)) - 1)


@pytest.mark.parametrize("seed", range(12))
def test_populations_do_what_lists_do(seed: int) -> None:
    """Random programs of all that a round does, on three groups that differ in all they can.

    Red where a tail takes another's tokens, log-probabilities or place, an absent particle counts
    or comes alive, or a method changes the population that it is called on.
    """
    rng = random.Random(seed)
    sizes = [rng.randint(1, N) for _ in range(3)]
    firsts = [[rng.randint(0, 1) for _ in range(N)] for _ in range(3)]
    if seed % 2:  # one token of all, as where p is normalised
        firsts = [[group[0]] * N for group in firsts]
    table, rows = ParticleTable(5, N, MAX_TAIL, "cpu"), torch.tensor([3, 1, 4])
    table.begin(
        rows,
        first_tokens=torch.tensor(firsts),
        num_emitted=torch.tensor([1, 2, 3]),
        log_evidence=torch.zeros(3, dtype=torch.float64),
        num_particles=torch.tensor(sizes),
        ended=torch.tensor(firsts) == 1,
    )
    emitted = [1, 2, 3]
    groups = [
        [Particle((0, token), n, token == 1 or n >= size, n < size) for n, token in enumerate(own)]
        for own, size in zip(firsts, sizes, strict=True)
    ]
    found = table.gather(rows, N, MAX_TAIL)
    watched = found.roots.unsqueeze(2).expand_as(found.fidelity).double()
    found = found._replace(logprobs=logprobs_of(found.texts), fidelity=watched)
    check(found, groups, emitted)
    for _ in range(30):
        before, was = found, (copy.deepcopy(groups), list(emitted))
        found = ACTIONS[rng.choice(list(ACTIONS))](rng, found, groups, emitted)
        check(found, groups, emitted)
        check(before, *was)
        table.scatter(rows, found)
        check(table.gather(rows, N, MAX_TAIL)._replace(logprobs=found.logprobs), groups, emitted)


def append(rng: random.Random, found: Population, groups: Groups, _: list[int]) -> Population:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tokens = torch.randint(2, (len(groups), N, 3), generator=generator)
    counts = torch.zeros(len(groups), N, dtype=torch.int64)
    for g, group in enumerate(groups):
        for n, one in enumerate(group):
            count = rng.randint(0, min(3, MAX_TAIL + 2 - len(one.text))) * one.present
            counts[g, n] = count
            group[n] = replace(one, text=(*one.text, *tokens[g, n, :count].tolist()))
    grown = found.append(tokens, counts)
    return grown._replace(logprobs=logprobs_of(grown.texts))


def emit(rng: random.Random, found: Population, groups: Groups, emitted: list[int]) -> Population:
    assert shared(found).tolist() == list(map(common, groups))
    counts = [rng.randint(0, common(group)) for group in groups]
    for g, count in enumerate(counts):
        emitted[g] += count
        groups[g] = [replace(one, text=one.text[count * one.present :]) for one in groups[g]]
    return found.emit(torch.tensor(counts))


def resize(
    rng: random.Random, found: Population, groups: Groups, _: list[int], *, same: bool = False
) -> Population:
    ancestors, sizes = [], []
    for g, group in enumerate(groups):
        size = sum(one.present for one in group)
        now = size if same else rng.randint(1, N)
        drawn = [rng.randrange(size) if n < now else n for n in range(N)]
        groups[g] = [
            replace(group[a], present=n < now, ended=group[a].ended or n >= now)
            for n, a in enumerate(drawn)
        ]
        ancestors.append(drawn)
        sizes.append(now)
    descended = found.descend(torch.tensor(ancestors))
    return descended if same else descended.resize(torch.tensor(sizes))


ACTIONS: dict[str, Any] = {
    "append": append,
    "descend": partial(resize, same=True),
    "emit": emit,
    "resize": resize,
}


def test_begin_forgets_the_rows_former_request() -> None:
    """Weights, ends and tails of the last owner would otherwise leak into the new text."""
    table, rows = ParticleTable(5, 3, MAX_TAIL, "cpu"), torch.tensor([2, 1])
    odd: Any = {name: torch.full((2, 3), 5.0).double() for name in ("log_weights",)}
    old = population_of([[[1, 2], [3], []]] * 2, width=MAX_TAIL + 1, **odd)
    old = old._replace(ended=~old.ended, unread=~old.unread, fidelity=old.fidelity + 1)
    for ended in (None, torch.tensor([[False, True, False], [False] * 3])):
        table.scatter(rows, old)
        table.begin(
            rows,
            first_tokens=torch.tensor([[42, 43, 0], [7, 7, 7]]),
            num_emitted=torch.tensor([3, 1]),
            log_evidence=torch.tensor([-0.5, 0.0], dtype=torch.float64),
            num_particles=torch.tensor([2, 3]),
            ended=ended,
        )
        found = table.gather(rows, 3, MAX_TAIL)
        assert not found.lengths.any() and not found.unread.any() and not found.fidelity.any()
        assert found.ended.tolist() == [[False, ended is not None, True], [False] * 3]
        assert found.present.tolist() == [[True, True, False], [True] * 3]
        assert found.log_weights.tolist() == [[0.0, 0.0, -torch.inf], [0.0] * 3]
        assert found.last_tokens[0, :2].tolist() == [42, 43]
        assert found.shares_last_token().tolist() == [False, True]
        assert found.output_lengths[:, 0].tolist() == [3, 1]
        assert found.log_evidence.tolist() == [-0.5, 0.0]
