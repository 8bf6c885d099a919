"""`sglang_smc_tools.particles`: a value of an answer, by the numbers that the server gave."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from toy_traces import a_trace

import sglang_smc_tools

INFO = {
    "spec_smc_log_evidence": -1.5,
    "spec_smc_particles": [
        {"output_ids": [1, 2], "weight": 0.5, "log_weight": 0.0, "text": "a"},
        {"output_ids": [3], "weight": 0.25, "log_weight": -0.693, "text": "<b>"},
        {"output_ids": [4], "weight": 0.25, "log_weight": -0.693, "text": "<b>"},
        {"output_ids": [5], "weight": 0.0, "log_weight": None},
    ],
}


@pytest.mark.parametrize(
    "answer",
    [
        {"text": "a", "meta_info": INFO},
        {"choices": [{"index": 0, "meta_info": INFO}]},
        [{"meta_info": INFO}],
        SimpleNamespace(model_dump=lambda: {"choices": [{"meta_info": INFO}]}),
    ],
    ids=["generate", "chat", "list of one", "openai-python"],
)
def test_an_answer_of_any_route(answer: Any) -> None:
    found = sglang_smc_tools.particles(answer)
    assert found.texts == ["a", "<b>", "<b>", "5"]
    assert found.weights == [0.5, 0.25, 0.25, 0.0]
    assert found.log_weights[3] == -math.inf
    assert found.posterior() == {"a": 0.5, "<b>": 0.5, "5": 0.0}
    assert found.ess == pytest.approx(1 / 0.375)
    assert repr(found) == "Particles(4, ess=2.67, log_ml=-1.500)"
    shown = found._repr_html_()
    assert "&lt;b&gt;" in shown and "<b>" not in shown


def test_a_frame_and_a_plot() -> None:
    trace = msgspec.to_builtins(a_trace(length=40))
    found = sglang_smc_tools.particles({"meta_info": {**INFO, "spec_smc_trace": trace}})
    assert list(found.frame()["weight"]) == [0.5, 0.25, 0.25, 0.0]
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = found.plot()
    assert len(axes.lines) > 10 and axes.get_xlabel() == "output token"
    assert "<canvas" in found.page()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"text": "", "meta_info": {}}, "return_particles"),
        ([{"meta_info": INFO}, {"meta_info": INFO}], "2 answers"),
        ({"meta_info": INFO}, '"trace": true'),
    ],
)
def test_what_is_missing_is_told(answer: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sglang_smc_tools.particles(answer).plot()
