"""Tails as tensors, at their borders; `tests/property/test_ledger.py` runs random programs."""

from types import SimpleNamespace

import pytest
import torch
from populations import population_of, shared, texts_of
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ReqLogprob

from sglang_smc.smc.agreement import num_distinct
from sglang_smc.state.population import ParticleTable, Population
from sglang_smc.state.tail_logprobs import LogprobTable, LogprobWidths, TailLogprobs

MAX_TAIL = 5


def population(tails: list[list[list[int]]], last_emitted: int = 90) -> Population:
    """Populations with these tails; what lies behind a tail is 99."""
    found = population_of(tails, stale=99, width=MAX_TAIL + 1)
    last_emitted = torch.full_like(found.lengths, last_emitted)
    return found._replace(
        texts=texts_of(found.tokens, last_emitted, last_emitted - 1),
        num_emitted=torch.full((len(tails),), 10),
    )


def tails_of(found: Population) -> list[list[list[int]]]:
    return [
        [row[:length] for row, length in zip(rows, lengths, strict=True)]
        for rows, lengths in zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)
    ]


def num_roots(found: Population) -> torch.Tensor:
    return num_distinct(found.roots, found.present)


def test_last_tokens_are_the_tails_ends_or_the_anchor() -> None:
    found = population([[[1, 2], [], [3]]])
    assert found.last_tokens.tolist() == [[2, 90, 3]]
    assert found.last_two.tolist() == [[[1, 2], [89, 90], [90, 3]]]


@pytest.mark.parametrize(
    ("count", "expected"), [(0, [[89, 90], [89, 90]]), (1, [[90, 1], [90, 1]]), (2, [[1, 2]] * 2)]
)
def test_an_emission_keeps_the_last_two_emitted_tokens(
    count: int, expected: list[list[int]]
) -> None:
    found = population([[[1, 2, 3], [1, 2]]]).emit(torch.tensor([count]))
    assert torch.stack([found.second_last, found.last_emitted], dim=2)[0].tolist() == expected


def test_output_lengths_count_emitted_text_and_tail() -> None:
    assert population([[[1, 2], [], [3]]]).output_lengths.tolist() == [[12, 10, 11]]


def test_append_takes_as_many_as_each_particle_keeps() -> None:
    new = torch.tensor([[[7, 8], [7, 8], [7, 8]]])
    found = population([[[1, 2], [], [3]]]).append(new, torch.tensor([[0, 1, 2]]))
    assert tails_of(found) == [[[1, 2], [7], [3, 7, 8]]]


def test_append_fills_a_tail_to_its_last_place() -> None:
    """What is not kept goes to a place of its own, never over a token."""
    new = torch.tensor([[[6, 7], [6, 7]]])
    found = population([[[1, 2, 3], [1, 2, 3, 4]]]).append(new, torch.tensor([[2, 1]]))
    assert tails_of(found) == [[[1, 2, 3, 6, 7], [1, 2, 3, 4, 6]]]
    full = found.append(torch.tensor([[[8], [8]]]), torch.tensor([[0, 0]]))
    assert tails_of(full) == tails_of(found)


def test_descend_copies_tail_length_and_end_from_the_ancestor() -> None:
    before = population([[[1], [2, 2], [3, 3, 3]]])
    before = before._replace(ended=torch.tensor([[False, True, False]]))
    found = before.descend(torch.tensor([[1, 2, 1]]))
    assert tails_of(found) == [[[2, 2], [3, 3, 3], [2, 2]]]
    assert found.ended.tolist() == [[True, False, True]]


def test_emit_moves_the_common_tokens_out() -> None:
    before = population([[[1, 2, 3], [1, 2]], [[4], [5]], [[6], [6]]])
    found = before.emit(torch.tensor([2, 0, 1]))
    assert tails_of(found) == [[[3], []], [[4], [5]], [[], []]]
    assert found.last_emitted.tolist() == [[2, 2], [90, 90], [6, 6]]
    assert found.num_emitted.tolist() == [12, 10, 11]
    assert found.last_tokens.tolist() == [[3, 2], [4, 5], [6, 6]]
    assert torch.equal(found.output_lengths, before.output_lengths)


def test_methods_return_new_populations() -> None:
    before = population([[[1], [2]]])
    before.append(torch.tensor([[[5], [5]]]), torch.tensor([[1, 1]]))
    before.descend(torch.tensor([[1, 1]]))
    before.emit(torch.tensor([1]))
    assert tails_of(before) == [[[1], [2]]]


def test_a_table_gives_back_what_was_stored_in_any_order() -> None:
    table = ParticleTable(5, 2, MAX_TAIL, "cpu")
    table.scatter(torch.tensor([3, 1]), population([[[1], [2]], [[3], [4, 5]]]))
    found = table.gather(torch.tensor([1, 3]), 2, MAX_TAIL)
    assert tails_of(found) == [[[3], [4, 5]], [[1], [2]]]


def test_begin_forgets_the_rows_former_request() -> None:
    """Weights, ends and tails of the last owner would otherwise leak into the new text."""
    table = ParticleTable(5, 2, MAX_TAIL, "cpu")
    rows = torch.tensor([2])
    old = population([[[1, 2], [3]]])._replace(
        ended=torch.tensor([[True, False]]),
        log_weights=torch.tensor([[-3.0, 5.0]], dtype=torch.float64),
        log_evidence=torch.tensor([7.0], dtype=torch.float64),
    )
    table.scatter(rows, old)
    table.begin(
        rows,
        first_tokens=torch.tensor([42]),
        num_emitted=torch.tensor([3]),
        log_evidence=torch.tensor([-0.5], dtype=torch.float64),
        num_particles=torch.tensor([2]),
    )
    found = table.gather(rows, 2, MAX_TAIL)
    assert tails_of(found) == [[[], []]]
    assert not found.ended.any()
    assert found.log_weights.tolist() == [[0.0, 0.0]]
    assert found.last_tokens.tolist() == [[42, 42]]
    assert found.output_lengths.tolist() == [[3, 3]]
    assert found.log_evidence.tolist() == [-0.5]


def begin(table: ParticleTable, rows: list[int], num_particles: list[int]) -> None:
    table.begin(
        torch.tensor(rows),
        first_tokens=torch.tensor([40 + row for row in rows]),
        num_emitted=torch.ones(len(rows), dtype=torch.int64),
        log_evidence=torch.zeros(len(rows), dtype=torch.float64),
        num_particles=torch.tensor(num_particles),
    )


def test_a_group_begins_with_its_own_number_of_particles() -> None:
    table = ParticleTable(4, 3, MAX_TAIL, "cpu")
    begin(table, [1, 2], [3, 1])
    found = table.gather(torch.tensor([1, 2]), 3, MAX_TAIL)
    assert found.present.tolist() == [[True] * 3, [True, False, False]]
    assert found.ended.tolist() == [[False] * 3, [False, True, True]]
    assert found.log_weights.tolist() == [[0.0] * 3, [0.0, -torch.inf, -torch.inf]]
    assert num_roots(found).tolist() == [3, 1]


def test_roots_are_handed_down_and_counted_once() -> None:
    before = population([[[1], [2], [3], [4]]])
    once = before.descend(torch.tensor([[1, 1, 3, 0]]))
    assert once.roots.tolist() == [[1, 1, 3, 0]]
    assert num_roots(once).tolist() == [3]
    twice = once.descend(torch.tensor([[0, 1, 1, 2]]))
    assert twice.roots.tolist() == [[1, 1, 1, 3]], "of the start, not of the last step"
    assert num_roots(twice).tolist() == [2]
    some = twice._replace(present=torch.tensor([[True, True, True, False]]))
    assert num_roots(some).tolist() == [1], "an absent particle has no ancestor that counts"


def test_what_a_round_does_leaves_absent_particles_absent() -> None:
    table = ParticleTable(3, 3, MAX_TAIL, "cpu")
    begin(table, [1], [2])
    before = table.gather(torch.tensor([1]), 3, MAX_TAIL)
    grown = before.append(torch.tensor([[[5, 6]] * 3]), torch.tensor([[2, 2, 0]]))
    found = grown.descend(torch.tensor([[1, 1, 2]])).emit(torch.tensor([2]))
    assert found.lengths.tolist() == [[0, 0, 0]], "not what others have emitted below zero"
    assert found.present.tolist() == [[True, True, False]]
    assert found.ended.tolist() == [[False, False, True]]
    assert found.log_weights[0, 2] == -torch.inf
    assert shared(grown).tolist() == [2], "an empty place does not disagree"


def test_a_window_holds_what_its_groups_need_and_leaves_the_rest_alone() -> None:
    """A batch of small groups writes nothing over particles and tokens beyond its own."""
    table = ParticleTable(5, 4, MAX_TAIL, "cpu")
    tails = [[[1, 2, 3, 4], [5], [6], [7, 7]], [[1], [2], [3], [4]]]
    table.scatter(torch.tensor([1, 2]), population(tails))
    small = table.gather(torch.tensor([2]), 2, 2)
    assert small.tokens.shape == (1, 2, 3)
    assert tails_of(small) == [[[1], [2]]]
    longer = small.append(torch.tensor([[[8], [9]]]), torch.tensor([[1, 1]]))
    table.scatter(torch.tensor([2]), longer)
    found = table.gather(torch.tensor([1, 2]), 4, MAX_TAIL)
    assert tails_of(found) == [tails[0], [[1, 8], [2, 9], [3], [4]]]


def open_population() -> Population:
    """Particles that agree on all but the token before their tails; the third is absent."""
    tails, present = [[[1, 2], [1, 2], []]], torch.tensor([[True, True, False]])
    return population_of(tails, [[7, 8, 9]], width=MAX_TAIL + 1, present=present)


def test_nothing_is_common_behind_tokens_that_differ() -> None:
    before = open_population()
    assert before.is_settled().tolist() == [False]
    assert shared(before).tolist() == [0]
    assert before.last_tokens.tolist() == [[2, 2, 9]]
    assert before.emit(shared(before)).last_emitted.tolist() == [[7, 8, 9]], "each keeps its own"


def test_copies_of_one_particle_agree_on_its_first_token() -> None:
    """An absent particle's has no say."""
    found = open_population().descend(torch.tensor([[1, 1, 2]]))
    assert found.last_emitted.tolist() == [[8, 8, 9]]
    assert found.is_settled().tolist() == [True]
    assert shared(found).tolist() == [2]


def test_particles_may_begin_and_end_with_tokens_of_their_own() -> None:
    table = ParticleTable(4, 3, MAX_TAIL, "cpu")
    table.begin(
        torch.tensor([1, 2]),
        first_tokens=torch.tensor([[5, 6, 7], [4, 4, 4]]),
        num_emitted=torch.tensor([1, 1]),
        log_evidence=torch.zeros(2, dtype=torch.float64),
        num_particles=torch.tensor([2, 3]),
        ended=torch.tensor([[False, True, False], [False, False, False]]),
    )
    found = table.gather(torch.tensor([1, 2]), 3, MAX_TAIL)
    assert found.last_tokens[0, :2].tolist() == [5, 6]
    assert found.ended.tolist() == [[False, True, True], [False] * 3]
    assert found.is_settled().tolist() == [False, True]


def with_logprobs() -> Population:
    """Two groups of particles; each token's log-probability is minus its number."""
    found = population([[[10, 11, 12], [10, 21]], [[30, 31], [40]]])
    number = -found.tokens.float()
    wide = number.unsqueeze(3)
    ids = found.tokens.unsqueeze(3).expand(-1, -1, -1, 2)
    tails = TailLogprobs(number, wide.expand_as(ids), ids, wide)
    return found._replace(logprobs=tails)


def assert_with_their_tokens(found: Population) -> None:
    assert found.logprobs is not None
    own, top, top_ids, listed = found.logprobs
    assert torch.equal(own, -found.tokens.float())
    assert torch.equal(top, own.unsqueeze(3).expand_as(top))
    assert torch.equal(top_ids, found.tokens.unsqueeze(3).expand_as(top_ids))
    assert torch.equal(listed, own.unsqueeze(3))


def test_log_probabilities_go_where_their_tokens_go() -> None:
    before = with_logprobs()
    assert_with_their_tokens(before.descend(torch.tensor([[1, 0], [1, 1]])))
    assert_with_their_tokens(before.emit(torch.tensor([1, 0])))
    present = torch.tensor([[True, True], [True, False]])
    assert_with_their_tokens(before.resize(torch.tensor([[1, 1], [1, 1]]), present))
    both = before.descend(torch.tensor([[0, 0], [1, 0]])).emit(torch.tensor([3, 0]))
    assert_with_their_tokens(both)


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
    before = with_logprobs()
    assert before.logprobs is not None
    table.scatter(rows, before.logprobs)
    kept = table.gather(rows, 2, MAX_TAIL, LogprobWidths(1, 2, 1))
    assert_with_their_tokens(before._replace(logprobs=kept))
