"""Who descends from whom, held against a replay of rounds, and traces that are broken."""

import copy
from functools import cache
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_grammar import Letters, runners
from toy_traces import DYING, a_trace, serve
from trace_replay import replay

import sglang_smc_tools
from sglang_smc.options.request import Budget
from sglang_smc.state.trace import Trace
from sglang_smc_tools.view.finding import BY_PARTICLE, checked
from sglang_smc_tools.view.genealogy import Genealogy, genealogy, lineage
from sglang_smc_tools.view.page import page_of

LETTERS = {"runners": runners(letters=Letters())}
SCORED = {"potentials": [{"name": "letters", "when": "round"}]}
BUDGETS = {"budgets": (Budget(5, 4), Budget(2, 2), Budget(4, 3))}
#: What requests choose, and how they are served.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one particle": ({"num_particles": 1}, {}),
    "often resampled": ({"resample_at": "token", "ess_threshold": 1.0}, {}),
    "a short lag": ({"max_lag": 2, "evidence_threshold": 0}, {}),
    "dying": (DYING, {"asked": {"top_k": 2}}),
    "resized": ({"evidence_threshold": 0}, BUDGETS),
    "retracted": ({"evidence_threshold": 0}, {"retracts_behind": (1, 3)}),
    "verified": ({"mode": "exact"}, {}),
    "potentials": (SCORED | {"max_lag": 30}, LETTERS | {"max_lag": 30}),
}


@cache
def traces(name: str) -> list[Trace]:
    chosen, more = RUNS[name]
    told = serve(30, {"trace": True, **chosen}, **more)
    return [one.trace for one in told if one.trace.rounds and not one.trace.emitted_after]


@pytest.mark.parametrize("name", RUNS)
def test_lineages_read_what_particles_read(name: str) -> None:
    """The surviving lineage is the answer, and each particle's text is what its ancestors say."""
    for trace in traces(name):
        found = genealogy(trace)
        made = replay(trace, is_plain=False)
        assert found.answer == surviving(found) == made.output_ids
        assert [text_of(found, head) for head in found.heads] == made.texts
        told = {
            tuple(text_of(found, place)): -inf if here.log_potential is None else here.log_potential
            for place, here in enumerate(found.segments)
            if here.log_potential != 0
        }
        assert told == made.scores and bool(told) <= (name == "potentials")
        assert all(here.tokens for here in found.segments if here.log_potential != 0)


def text_of(found: Genealogy, segment: int) -> list[int]:
    """The tokens of a particle up to the end of a segment, as the page reads them."""
    pieces: list[list[int]] = []
    end = found.segments[segment].end
    for here in (found.segments[at] for at in lineage(segment, found.segments)):
        pieces.append(here.tokens[: max(0, end - here.start)])
        end = min(end, here.start)
    return [token for piece in reversed(pieces) for token in piece]


def surviving(found: Genealogy) -> list[int]:
    """The tokens that are drawn in bold, by their positions."""
    tokens = {
        here.start + place: token
        for here in found.segments
        for place, token in enumerate(here.tokens[: here.surviving])
    }
    return [tokens[position] for position in range(len(tokens))]


def test_a_lineage_ends_with_a_reason_and_the_answers_nowhere() -> None:
    """Red where a retraction marks as ended what was emitted."""
    fates = set()
    for found in (genealogy(trace) for name in RUNS for trace in traces(name)):
        parents = {here.parent for here in found.segments}
        for place, here in enumerate(found.segments):
            assert 0 <= here.before <= 1 and 0 <= here.after <= 1
            if place not in parents and place not in found.heads:
                assert here.fate is not None
            assert here.parent is None or here.parent < place
            fates.add(here.fate)
        _, *ancestors = lineage(found.heads[0], found.segments)
        for here in (found.segments[place] for place in ancestors):
            assert here.fate is None or here.surviving < len(here.tokens)
    ends = {"narrowed", "drawn", "resized", "retracted", "end"}
    assert fates == {"dead", "resampled", "verification", None} | ends


def test_a_trace_without_rounds_is_told() -> None:
    trace = Trace(mode="smc", num_particles=2, num_steps=2, prompt_length=1, rounds=[])
    with pytest.raises(ValueError, match="no round"):
        genealogy(trace)


SOUND = msgspec.to_builtins(a_trace())
INFO = {"spec_smc_particles": [{"output_ids": [1], "weight": 1.0, "log_weight": 0.0}]}
INDICES = ("ancestors", "narrowed_to", "resized_from")
COLUMNS = [name for name in BY_PARTICLE if name not in ("drafted", "ended")]


def with_round(at: int, **fields: Any) -> dict[str, Any]:
    """Return the sound trace of four particles with other fields in one round."""
    broken = copy.deepcopy(SOUND)
    broken["rounds"][at].update(fields)
    return broken


BROKEN = [
    *(with_round(1, **{name: [0, 0]}) for name in COLUMNS),
    *(with_round(1, **{name: [0, 1, 2, 4]}) for name in INDICES),
    *(with_round(1, **{name: [0, 1, 2, -1]}) for name in INDICES),
    with_round(0, begins=[]),
    with_round(0, begins=None),
    with_round(0, begins=[5] * 5),
    with_round(1, begins=None, emitted_before=[5]),
    with_round(1, resized_from=[]),
    with_round(1, resized_from=[0, 1]),
    with_round(1, bonus=[1] * 9),
    with_round(1, ended=[True]),
    with_round(1, drafted=[[1]] * 3),
    with_round(1, kept=[-1, 0, 0, 0]),
    {**SOUND, "version": "1"},
    {**SOUND, "rounds": [3]},
    {**SOUND, "pieces": {"5": 5}},
]


@pytest.mark.parametrize("trace", BROKEN)
def test_a_broken_trace_is_refused_where_it_is_read(trace: dict[str, Any]) -> None:
    """Red where a list, an index or a type is not held against its round."""
    with pytest.raises(ValueError, match=r"this is no trace: .* - at `"):
        checked(trace)
    with pytest.raises(ValueError, match="this is no trace"):
        sglang_smc_tools.particles({"meta_info": {**INFO, "spec_smc_trace": trace}})


HOSTILE = (None, True, -1, 4, 10**30, 1.5, "", "x", [], [0], [9, 9], [[]], {}, {"a": []})


@given(st.data())
def test_any_value_in_any_place_is_drawn_or_refused(data: st.DataObject) -> None:
    """Red where a value that is put into the record comes to another error than ValueError."""
    broken = copy.deepcopy(SOUND)
    at = broken["rounds"]
    while isinstance(at, (list, dict)) and at:
        parent = at
        key = data.draw(st.sampled_from(range(len(at)) if isinstance(at, list) else sorted(at)))
        at = at[key]
        if data.draw(st.booleans()):
            break
    parent[key] = data.draw(st.sampled_from(HOSTILE))
    try:
        page_of(checked(broken))
    except ValueError as error:
        assert "this is no trace" in str(error)


def test_texts_that_move_for_thousands_of_rounds_have_a_page() -> None:
    """Two texts have ended and change places in each round: red where descent is by recursion."""
    first = {
        "log_weights_before": [0.0, 0.0], "drafted": [[], []], "kept": [0, 0],
        "log_weights": [0.0, 0.0], "log_potentials": [1.0, 2.0], "ess": 2.0,
        "log_block_evidence": 0.0, "cut": "none", "resampled": False, "ancestors": [1, 0],
        "bonus": [None, None], "ended": [True, True], "log_weights_after": [0.0, 0.0],
        "log_evidence": 0.0, "emitted": [],
    }  # fmt: skip
    rounds = [{**first, "begins": [1, 2]}, *[first] * 3000]
    sizes = {"mode": "smc", "num_particles": 2, "num_steps": 2, "prompt_length": 1}
    assert "</html>" in page_of(checked({**sizes, "rounds": rounds}))
