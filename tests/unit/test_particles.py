"""Populations of particles against the same as lists, and the table that holds them."""

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from populations import population_of, shared
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ReqLogprob

from sglang_smc.smc.agreement import num_distinct
from sglang_smc.state.population import ParticleTable, Population
from sglang_smc.state.tail_logprobs import LogprobTable, LogprobWidths, TailLogprobs

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
    assert found.is_settled().tolist() == settled
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
    """Tail tokens that all of a group share, behind a token that they share."""
    texts = [one.text[1:] for one in group if one.present]
    alike = 0
    for column in zip(*texts, strict=False):
        if len(set(column)) > 1:
            break
        alike += 1
    return max(0, alike - 1)


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
    table = ParticleTable(5, N, MAX_TAIL, "cpu")
    rows = torch.tensor([3, 1, 4])
    table.begin(
        rows,
        first_tokens=torch.tensor(firsts),
        num_emitted=torch.tensor([1, 2, 3]),
        log_evidence=torch.zeros(3, dtype=torch.float64),
        num_particles=torch.tensor(sizes),
    )
    emitted, groups = [1, 2, 3], []
    for group, size in zip(firsts, sizes, strict=True):
        groups.append(
            [Particle((0, token), n, n >= size, n < size) for n, token in enumerate(group)]
        )
    found = table.gather(rows, N, MAX_TAIL)
    found = found._replace(logprobs=logprobs_of(found.texts))
    check(found, groups, emitted)
    for _ in range(30):
        before, was = found, (groups, emitted)
        found, groups, emitted = step(rng, found, groups, emitted)
        found = found._replace(logprobs=found.logprobs or logprobs_of(found.texts))
        check(found, groups, emitted)
        check(before, *was)
        table.scatter(rows, found)
        check(table.gather(rows, N, MAX_TAIL)._replace(logprobs=found.logprobs), groups, emitted)


def step(
    rng: random.Random, found: Population, groups: Groups, emitted: list[int]
) -> tuple[Population, Groups, list[int]]:
    """One thing that may happen to a population, and to the lists."""
    action = rng.choice(["append", "append", "descend", "emit", "resize"])
    if action == "append":
        new = [[[rng.randint(0, 1) for _ in range(3)] for _ in range(N)] for _ in groups]
        room = [[MAX_TAIL - len(one.text) + 2 if one.present else 0 for one in g] for g in groups]
        counts = [[rng.randint(0, min(3, most)) for most in of_group] for of_group in room]
        after = [
            [
                replace(one, text=(*one.text, *tokens[:count]))
                for one, tokens, count in zip(*of_group, strict=True)
            ]
            for of_group in zip(groups, new, counts, strict=True)
        ]
        grown = found.append(torch.tensor(new), torch.tensor(counts))
        return grown._replace(logprobs=None), after, emitted
    if action == "emit":
        counts = shared(found)
        assert counts.tolist() == list(map(common, groups))
        fewer = [rng.randint(0, count) for count in counts.tolist()]
        after = [
            [replace(one, text=one.text[count:]) if one.present else one for one in group]
            for group, count in zip(groups, fewer, strict=True)
        ]
        total = [number + count for number, count in zip(emitted, fewer, strict=True)]
        return found.emit(torch.tensor(fewer)), after, total
    sizes = [sum(one.present for one in group) for group in groups]
    ancestors = [[rng.randrange(size) if n < size else n for n in range(N)] for size in sizes]
    if action == "descend":
        after = [
            [group[ancestor] for ancestor in of_group]
            for group, of_group in zip(groups, ancestors, strict=True)
        ]
        return found.descend(torch.tensor(ancestors)), after, emitted
    now = [rng.randint(1, N) for _ in groups]
    drawn = [
        [rng.randrange(size) if n < new else n for n in range(N)]
        for size, new in zip(sizes, now, strict=True)
    ]
    after = [
        [
            replace(group[ancestor], present=n < new, ended=group[ancestor].ended or n >= new)
            for n, ancestor in enumerate(of_group)
        ]
        for group, of_group, new in zip(groups, drawn, now, strict=True)
    ]
    present = torch.arange(N) < torch.tensor(now).unsqueeze(1)
    return found.resize(torch.tensor(drawn), present), after, emitted


def test_ends_go_with_their_texts() -> None:
    before = population_of([[[1], [2, 2], [3]]], ended=torch.tensor([[False, True, False]]))
    assert before.descend(torch.tensor([[1, 2, 1]])).ended.tolist() == [[True, False, True]]


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
        assert found.is_settled().tolist() == [False, True]
        assert found.output_lengths[:, 0].tolist() == [3, 1]
        assert found.log_evidence.tolist() == [-0.5, 0.0]


def test_a_window_holds_what_its_groups_need_and_leaves_the_rest_alone() -> None:
    """A batch of small groups writes nothing over particles and tokens beyond its own."""
    table, row = ParticleTable(5, 4, MAX_TAIL, "cpu"), torch.tensor([2])
    tails = [[[1, 2, 3, 4], [5], [6], [7, 7]], [[1], [2], [3], [4]]]
    whole = population_of(tails, width=MAX_TAIL + 1)
    table.scatter(torch.tensor([1, 2]), whole)
    small = table.gather(row, 2, 2)
    assert small.tokens.shape == (1, 2, 3)
    table.scatter(row, small.append(torch.tensor([[[8], [9]]]), torch.tensor([[1, 1]])))
    found = table.gather(torch.tensor([1, 2]), 4, MAX_TAIL)
    assert found.lengths.tolist() == [[4, 1, 1, 2], [2, 2, 1, 1]]
    assert torch.equal(found.tokens[0], whole.tokens[0])
    assert found.tokens[1, :, :2].tolist() == [[1, 8], [2, 9], [3, 0], [4, 0]]


def test_a_table_keeps_log_probabilities_beside_the_tails() -> None:
    table, rows = LogprobTable(5, 2, MAX_TAIL, "cpu"), torch.tensor([3, 1])
    asking = SimpleNamespace(
        sampling_params=SimpleNamespace(max_new_tokens=4),
        return_logprob=True,
        logprob=ReqLogprob(top_logprobs_num=2, token_ids_logprob=[7]),
    )
    batch = SimpleNamespace(
        reqs=[asking] * 2,
        req_pool_indices=rows,
        top_logprobs_nums=[2, 2],
        token_ids_logprobs=[[7], [7]],
    )
    log_p, tokens = torch.zeros(2, 9), torch.tensor([[1], [2]])
    table.begin(batch, log_p, tokens, LogitsProcessorOutput(None))  # type: ignore[arg-type]
    whole = population_of([[[10, 11, 12], [10, 21]], [[30, 31], [40]]], width=MAX_TAIL + 1)
    before = logprobs_of(whole.texts)
    table.scatter(rows, before)
    for kept, given in zip(
        table.gather(rows, 2, MAX_TAIL, LogprobWidths(1, 2, 1)), before, strict=True
    ):
        assert torch.equal(kept, given)
