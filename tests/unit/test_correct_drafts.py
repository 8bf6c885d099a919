"""Draft tokens count once they are emitted, up to the end of their answer."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_smc.state.correct_drafts import CorrectDrafts

K = 8


class Counted(NamedTuple):
    drafts: list[int]  # by round
    num_emitted: int


def counted(rounds: list[tuple[int, int]], num_after_end: int = 0) -> Counted:
    """An answer of rounds that keep and put out so many tokens, cut at its end."""
    found = CorrectDrafts()
    num_emitted = 0
    drafts = []
    for number, (num_kept, num_new) in enumerate(rounds, 1):
        found.add_round(num_kept, num_new)
        num_emitted += found.emit(num_after_end if number == len(rounds) else 0)
        assert found.emit(0) == 0, "a round is counted once"
        drafts += found.take()
    found.cut()
    return Counted([*drafts, *found.take()], num_emitted)


@pytest.mark.parametrize(
    ("rounds", "num_after_end", "drafts"),
    [
        ([(2, 2)], 0, [1]),  # the end is a draft token: of two tokens one is a draft, as in SGLang
        ([(8, 2)], 0, [1]),  # columns after the end are kept, and are no tokens
        ([(8, 9)], 7, [1]),  # nor are those that SGLang cuts
        ([(0, 1), (8, 1)], 0, [0, 0]),
        ([(0, 1), (1, 2)], 0, [0, 1]),
        ([(3, 0), (2, 0), (4, 9)], 0, [3, 2, 1]),  # particles agree late
        ([(3, 2), (2, 2)], 0, [3, 0]),  # the drawn one ended in the first round
        ([(3, 0), (3, 0)], 0, [0, 0]),  # aborted
        ([(1, 4), (3, 4)], 0, [1, 3]),  # a mean of particles that keep unlike numbers
    ],
)
def test_a_round_counts_as_far_as_it_is_emitted(
    rounds: list[tuple[int, int]], num_after_end: int, drafts: list[int]
) -> None:
    assert counted(rounds, num_after_end).drafts == drafts


@given(st.lists(st.integers(0, K), min_size=1, max_size=12), st.data())
def test_tokens_of_a_pass_are_one_more_than_its_drafts(
    kept: list[int], data: st.DataObject
) -> None:
    """Fifty answers of 3 tokens: red where the last round counts what lies behind the end."""
    length = sum(kept) + len(kept) - data.draw(st.integers(0, kept[-1]))
    places = data.draw(st.lists(st.integers(0, length), min_size=len(kept) - 1))
    cuts = [0, *sorted(places[: len(kept) - 1]), length]
    most = [0, *itertools.accumulate(num + 1 for num in kept)]  # tokens there are by then
    ends = [min(cut, bound) for cut, bound in zip(cuts, most, strict=True)]
    ends[-1] = length
    rounds = [
        (num, end - begin) for num, (begin, end) in zip(kept, itertools.pairwise(ends), strict=True)
    ]
    found = counted(rounds)
    assert found.num_emitted == length
    assert len(found.drafts) == len(kept)
    assert sum(found.drafts) + len(kept) == length


def test_tokens_that_a_retraction_drops_count_for_nothing() -> None:
    found = CorrectDrafts()
    found.add_round(4, 0)
    found.emit(0)
    found.cut()
    found.add_round(2, 3)
    found.emit(0)
    assert found.take() == [0, 2]
