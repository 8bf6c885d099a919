"""Layouts of chains: their verification is lossless, their rows are counted, bounds hold.

Seeds are fixed, so a test passes always or never. Had they been drawn, correct code would fail a
chi-square test with probability 0.001.
"""

import math
from functools import partial

import pytest
import torch
from fidelity.chain_layouts import (
    ROWS,
    Drafts,
    Points,
    at_most,
    doubts,
    draft,
    independent,
    play,
    play_stopped,
    play_trunk,
    spread,
    stopped_lengths,
    threshold,
    tokens_added,
    tree_rows,
    trunk,
    verify,
)
from fidelity.chains import BASE, Point, paired, summary, table
from fidelity.simulate import Pair, Uniforms
from laws import enumerate_law, p_value
from ragged_tables import RaggedTable
from toy_reference import Table
from toy_tables import mild_pair

from sglang_smc.smc.exact import Verified
from sglang_smc.tokens.distribution import sample

EOS, LENGTH, VOCAB = 1, 4, 3
MILD = mild_pair(LENGTH, VOCAB)
TOY = Pair(RaggedTable(MILD.target), RaggedTable(MILD.draft), EOS)
P_LAW = enumerate_law(LENGTH, EOS, lambda position: Table(MILD.target).next_probs)
SIZE = 3000


def numbers(seed: int = 1) -> Uniforms:
    generator = torch.Generator().manual_seed(seed)
    return partial(torch.rand, dtype=torch.float64, generator=generator)


def drafted(points: Points, count: int = 3, steps: int = 3, size: int = SIZE) -> Drafts:
    return draft(TOY, [0], size, count, steps, points)


def texts(drafts: Drafts, found: Verified, uniforms: Uniforms) -> list[tuple[int, ...]]:
    """What is accepted, the token behind it, and the target's own tokens to the end."""
    group = torch.arange(len(found.winner))
    behind = drafts.log_p[group, found.winner, found.num_columns]
    left = found.residuals[found.left].log()
    law = torch.where(found.rejects.unsqueeze(1), left, behind)
    kept = torch.nn.functional.pad(drafts.tokens[group, found.winner], (0, LENGTH))
    kept[group, found.num_columns] = sample(law, uniforms(len(group)))
    rows = TOY.target.rows(len(group), LENGTH)
    for column in range(1, LENGTH):
        log_p = rows.log_probs(kept[:, column - 1 : column], torch.full((len(group),), column))
        drawn = sample(log_p[:, 0], uniforms(len(group)))
        kept[:, column] = torch.where(column > found.num_columns, drawn, kept[:, column])
    return [whole(row) for row in kept[:, :LENGTH].tolist()]


def whole(tokens: list[int]) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)


def test_independent_chains_are_verified_losslessly() -> None:
    uniforms = numbers()
    drafts = drafted(independent(uniforms))
    assert p_value(texts(drafts, verify(drafts, uniforms), uniforms), P_LAW) > 0.001


def test_chains_that_stop_where_their_text_says_so_are_verified_losslessly() -> None:
    uniforms = numbers()
    drafts = drafted(independent(uniforms))
    stops = drafts.tokens == 2
    found = verify(drafts, uniforms, stops)
    stopped = stops[torch.arange(SIZE), found.winner].long().argmax(1) + 1
    behind_stop = stops[torch.arange(SIZE), found.winner].any(1) & (found.num_columns > stopped)
    assert not behind_stop.any()
    assert p_value(texts(drafts, found, uniforms), P_LAW) > 0.001


@pytest.mark.parametrize("length", [1, 2])
def test_a_trunk_is_verified_losslessly_as_one_chain(length: int) -> None:
    uniforms = numbers()
    drafts = drafted(trunk(length, uniforms))
    assert (drafts.tokens[:, :, :length] == drafts.tokens[:, :1, :length]).all()
    found = verify(drafts, uniforms, trunk_length=length)
    assert p_value(texts(drafts, found, uniforms), P_LAW) > 0.001


def test_a_trunk_is_not_as_many_chains() -> None:
    """So the test above can fail: copies are no fresh draws."""
    uniforms = numbers()
    drafts = drafted(trunk(2, uniforms))
    assert p_value(texts(drafts, verify(drafts, uniforms), uniforms), P_LAW) < 0.001


def test_stratified_chains_each_have_the_drafts_law() -> None:
    uniforms = numbers()
    law = enumerate_law(3, EOS, lambda position: Table(MILD.draft).next_probs)
    for columns in (1, 3):
        drafts = drafted(spread(columns, uniforms))
        assert p_value([whole(row) for row in drafts.tokens[:, 2].tolist()], law) > 0.001


def test_a_round_counts_its_rows() -> None:
    uniforms = numbers()
    drafts = drafted(independent(uniforms), count=8, steps=8, size=4)
    assert play(drafts, uniforms).rows.tolist() == [72] * 4
    open_ended = drafts._replace(ends=torch.zeros_like(drafts.ends))
    doubt = doubts(drafts)["path"]
    never = play_stopped(open_ended, doubt, math.inf, uniforms)
    assert never.rows.tolist() == [72] * 4
    assert never.draft_passes.tolist() == [8] * 4
    at_once = play_stopped(open_ended, doubt, 0.0, uniforms)
    assert at_once.rows.tolist() == [16] * 4  # one token each
    assert play_trunk(drafts, 3, uniforms).rows.tolist() == [1 + 3 + 8 * 5] * 4


def test_equal_prefixes_are_scored_once() -> None:
    tokens = torch.tensor([[[5, 6, 7], [5, 6, 8], [5, 9, 7], [5, 6, 7]]])
    assert tree_rows(tokens).tolist() == [1 + 1 + 2 + 3]


def test_the_threshold_takes_as_many_rows_as_the_chains() -> None:
    uniforms = numbers()
    drafts = [drafted(independent(uniforms), count=8, steps=16, size=64) for _ in range(3)]
    drafts = [one._replace(ends=torch.zeros_like(one.ends)) for one in drafts]
    most = threshold(drafts, "path")
    rows = [(stopped_lengths(one, doubts(one)["path"] > most) + 1).sum(1) for one in drafts]
    assert abs(float(torch.cat(rows).double().mean()) - ROWS) < 1.0


def test_a_text_that_ends_adds_what_it_has() -> None:
    uniforms = numbers()
    drafts = drafted(independent(uniforms), size=2)
    ends = torch.zeros_like(drafts.ends)
    ends[0, :, 1] = True
    none = torch.zeros(2, dtype=torch.int64)
    found = Verified(none + 2, none, none.bool(), none, torch.zeros(2, VOCAB))
    assert tokens_added(drafts._replace(ends=ends), found).tolist() == [2, 3]


def test_the_bound_of_one_column_is_what_the_laws_share() -> None:
    uniforms = numbers()
    drafts = drafted(independent(uniforms), count=1, steps=1, size=40_000)
    p, q = MILD.target[0, 0].exp(), MILD.draft[0, 0].exp()
    shared = torch.minimum(p, q)
    expected = 1 + float(shared.sum() - shared[EOS])
    # Four standard deviations of the two halves' means are 0.02.
    assert abs(at_most(drafts.log_weights.flatten(0, 1), 1) - expected) < 0.02


def test_no_verification_exceeds_the_bound() -> None:
    uniforms = numbers()
    for count in (1, 3):
        drafts = drafted(independent(uniforms), count=count)
        bound = at_most(drafts.log_weights.flatten(0, 1), count)
        tokens = float(play(drafts, uniforms).tokens.double().mean())
        assert bound - 0.3 < tokens < bound + 0.03  # near it, and four errors above at most


def test_groups_of_independent_chains_have_the_bound_of_independent_chains() -> None:
    uniforms = numbers()
    drafts = drafted(independent(uniforms))
    weights = drafts.log_weights
    bounds = [at_most(weights.flatten(0, 1), 3, of) for of in (None, weights)]
    assert abs(bounds[0] - bounds[1]) < 0.05


def test_gains_are_paired_by_context() -> None:
    """What contexts have in common is no part of a gain's interval."""
    assert paired([11.0, 1.0, 6.0], [10.0, 0.0, 5.0])[:3] == (1.0, 1.0, 1.0)


def test_the_table_has_a_row_for_each_layout() -> None:
    def entry(at: float) -> dict[str, Point]:
        base = {"tokens": at, "rows": 72.0, "draft_passes": 8.0, "at_most": at + 1}
        other = {"tokens": at + 0.5, "rows": 70.0, "draft_passes": 16.0}
        return {BASE: base, "other": other, "stratified": {"at_most": at + 1.2}}

    rows = summary([entry(4.0), entry(8.0)])
    assert rows[0]["passes_per_token_1/8"] == 2 / 6
    assert math.isclose(rows[1]["gain"].mean, 0.5)
    assert math.isclose(rows[2]["gain"].mean, 0.2)  # of bounds
    assert table(rows).count("\n") == 4
