"""Who descends from whom, held against a simulation that knows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_trace import simulated

from sglang_smc.view.genealogy import Genealogy, genealogy
from sglang_smc.view.record import Trace


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4, 7]), st.integers(2, 80), st.integers(1, 6))
def test_lineages_read_what_particles_read(
    seed: int, num_particles: int, length: int, num_steps: int
) -> None:
    """The surviving lineage is the answer, and each particle's text is what its ancestors say."""
    made = simulated(seed, num_particles, length, num_steps)
    found = genealogy(made.trace)
    assert found.answer == made.answer
    assert [found.text_of(head) for head in found.heads] == made.texts
    assert surviving(found) == made.answer


def surviving(found: Genealogy) -> list[int]:
    """The tokens that are drawn in bold, by their positions."""
    tokens = {
        here.start + place: token
        for here in found.segments
        for place, token in enumerate(here.tokens[: here.surviving])
    }
    return [tokens[position] for position in range(len(tokens))]


@given(st.integers(0, 10_000))
def test_who_has_no_descendant_is_told_why(seed: int) -> None:
    found = genealogy(simulated(seed, 6, 60).trace)
    parents = {here.parent for here in found.segments}
    for place, here in enumerate(found.segments):
        assert 0 <= here.before <= 1 and 0 <= here.after <= 1
        if place not in parents and place not in found.heads:
            assert here.fate in ("dead", "resampled", "narrowed", "drawn", "resized", "retracted")
        assert here.parent is None or here.parent < place


@given(st.integers(0, 10_000))
def test_the_answers_lineage_ends_nowhere_but_at_its_end(seed: int) -> None:
    """Red where a retraction marks as ended what was emitted."""
    found = genealogy(simulated(seed, 4, 200).trace)
    _, *ancestors = found.lineage(found.heads[0])
    for here in (found.segments[place] for place in ancestors):
        assert here.fate is None or here.surviving < len(here.tokens)


@given(st.integers(0, 10_000), st.sampled_from([1, 4, 7]))
def test_what_potentials_say_stands_at_the_text_that_they_said_it_of(
    seed: int, num_particles: int
) -> None:
    made = simulated(seed, num_particles, 60)
    found = genealogy(made.trace)
    told = {
        tuple(found.text_of(place)): here.log_potential
        for place, here in enumerate(found.segments)
        if here.log_potential != 0
    }
    assert told == made.judged
    assert all(here.tokens for here in found.segments if here.log_potential != 0)


def test_a_trace_without_rounds_is_told() -> None:
    trace = Trace(mode="smc", num_particles=2, num_steps=2, prompt_length=1, rounds=[])
    with pytest.raises(ValueError, match="no round"):
        genealogy(trace)
