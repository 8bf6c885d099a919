"""Traces that are broken: each is refused with a sentence."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_trace import simulated

import sglang_smc
from sglang_smc.view.finding import BY_PARTICLE, checked
from sglang_smc.view.page import page_of

SOUND = msgspec.to_builtins(simulated(3, 4, 60).trace)
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
        sglang_smc.particles({"meta_info": {**INFO, "spec_smc_trace": trace}})


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
