"""Do the shares of a stream come out as a reader would count them?"""

from typing import Any

import pytest
import streams
from fidelity.grid import kinds


def told(*tokens: int) -> list[dict[str, Any]]:
    return [{"completion_tokens": count} for count in tokens]


def test_only_chunks_with_new_tokens_count() -> None:
    found = list(streams.chunks_of(told(1, 1, 4, 9, 9)))
    assert [chunk.tokens for chunk in found] == [1, 4, 9]
    assert [chunk.seconds for chunk in found] == sorted(chunk.seconds for chunk in found)


def test_the_longest_silence_is_a_share_of_the_stream() -> None:
    """What comes before the first token is another thing, and not counted."""
    times = [(1, 5.0), (3, 6.0), (4, 9.0), (9, 10.0)]
    found = streams.stream_of([streams.Chunk(*chunk) for chunk in times])
    assert found == streams.Stream(chunks=4, silence=3 / 5)


def test_a_row_has_means_and_the_page_shows_them() -> None:
    kind = kinds()[0]
    row = streams.row_of(kind, [streams.Stream(10, 0.1), streams.Stream(20, 0.3)])
    assert row.answers == 2 and row.chunks is not None and row.silence is not None
    assert (row.chunks.mean, row.silence.mean) == (15.0, pytest.approx(0.2))
    page = streams.markdown([row])
    assert kind.name in page and "15.0" in page and "20.0" in page


def test_every_kind_that_is_streamed_is_one_of_the_fidelity_tables() -> None:
    assert set(streams.FAMILIES) <= {kind.family for kind in kinds()}


def test_its_problems_are_none_of_the_tables() -> None:
    from fidelity.measure import MAX_PROBLEMS

    assert streams.FIRST_PROBLEM >= MAX_PROBLEMS
