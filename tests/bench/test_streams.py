"""Do the shares of a stream come out as a reader would count them?"""

import pytest
import streams
from fidelity.grid import kinds
from fidelity.measure import MAX_PROBLEMS


def test_chunks_and_silence_of_a_stream() -> None:
    """Only chunks with new tokens count, and no time before the first."""
    found = list(streams.chunks_of([{"completion_tokens": count} for count in (1, 1, 4, 9, 9)]))
    assert [chunk.tokens for chunk in found] == [1, 4, 9]
    times = [(1, 5.0), (3, 6.0), (4, 9.0), (9, 10.0)]
    stream = streams.stream_of([streams.Chunk(*chunk) for chunk in times])
    assert stream == streams.Stream(chunks=4, silence=3 / 5)


def test_a_row_has_means_of_problems_that_no_table_asks() -> None:
    row = streams.row_of(kinds()[0], [streams.Stream(10, 0.1), streams.Stream(20, 0.3)])
    assert row.answers == 2 and row.chunks is not None and row.silence is not None
    assert (row.chunks.mean, row.silence.mean) == (15.0, pytest.approx(0.2))
    assert set(streams.FAMILIES) <= {kind.family for kind in kinds()}
    assert streams.FIRST_PROBLEM >= MAX_PROBLEMS
