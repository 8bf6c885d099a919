"""Traces of real answers in a crowd, and what potentials add; `test_routes` has streams of them."""

from typing import Any

import pytest
from steered import log_phi
from trace_replay import Replayed, read, replay

from server.kinds import CHOICES, KINDS, POTENTIALS
from sglang_smc.state.trace import Trace

NEAR = 1e-5  # weights are sums of numbers in float32


def assert_told(answer: dict[str, Any], smc: dict[str, Any]) -> Replayed:
    """A trace that comes to the answer: its text, its log-evidence, its number of rounds."""
    info = answer["meta_info"]
    trace = read(info)
    found = replay(trace, is_plain="power" not in smc, tolerance=NEAR)
    assert found.output_ids == answer["output_ids"]
    assert trace.mode == info["spec_smc_mode"]
    assert len(trace.rounds) == info["spec_smc_rounds_ct"]
    assert sum(one.resampled for one in trace.rounds) == info["spec_smc_resample_ct"]
    mean = sum(one.ess for one in trace.rounds) / len(trace.rounds)
    assert mean == pytest.approx(info["spec_smc_ess_mean"])
    if info["spec_smc_log_evidence"] is not None:
        last = trace.rounds[-1].log_evidence
        assert last == pytest.approx(info["spec_smc_log_evidence"])
    for particle in info.get("spec_smc_particles") or ():
        assert particle["output_ids"] in found.particles
    return found


def test_each_trace_comes_to_its_answer(crowd: dict[str, dict[str, Any]]) -> None:
    """All choices beside each other and those without: red where one has a neighbour's rounds."""
    for index, smc in enumerate(CHOICES):
        assert_told(crowd[f"trace {index}"], smc)


def test_a_trace_tells_what_potentials_added(crowd: dict[str, dict[str, Any]]) -> None:
    """All its fields agree; along the answer's line the gains add up to log phi of the text."""
    assert any(271 in crowd[f"potential {name}"]["output_ids"] for name in POTENTIALS)
    for name in POTENTIALS:
        answer = crowd[f"potential {name}"]
        smc = KINDS[f"potential {name}"]["sampling_params"]["custom_params"]["smc"]
        found = assert_told(answer, smc)
        evidence = answer["meta_info"]["spec_smc_log_evidence"]
        assert found.log_evidence == pytest.approx(evidence, abs=NEAR)
        gains = gains_of_answer(read(answer["meta_info"]))
        assert gains == pytest.approx(log_phi(answer["output_ids"], 271), abs=1e-9)


def gains_of_answer(trace: Trace) -> float:
    place = 0
    total = 0.0
    for traced in reversed(trace.rounds):
        place = place if traced.narrowed_to is None else traced.narrowed_to[place]
        place = traced.ancestors[place]
        assert traced.log_potentials is not None
        total += traced.log_potentials[place] or 0.0
    return total
