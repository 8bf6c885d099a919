"""Texts that a draft reads in chunks are read whole, once and in order."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_smc.round.prefill import chunks

TEXTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=6)


@given(texts=TEXTS, most=st.integers(1, 30))
def test_chunks_cover_each_text_once_in_order(texts: list[tuple[int, int]], most: int) -> None:
    starts = [a for a, _ in texts]
    ends = [a + length for a, length in texts]
    found = list(chunks(starts, ends, most))
    sizes = [sum(end - start for _, start, end in spans) for spans in found]
    assert sizes[:-1] == [most] * (len(sizes) - 1) and all(0 < size <= most for size in sizes)
    read = [(which, at) for spans in found for which, a, b in spans for at in range(a, b)]
    assert read == [(which, at) for which, (a, n) in enumerate(texts) for at in range(a, a + n)]
