"""What a server makes of what its answers were watched to be: windows, gauges, warnings."""

import functools
import logging
import math
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from toy_request import ToyRequest

from sglang_smc import process
from sglang_smc.options.request import RequestConfig
from sglang_smc.patches.request_state import update_finish_state
from sglang_smc.state.fidelity import (
    ALL,
    FAULT,
    INFORMATION,
    WARNING_SECONDS,
    AnswerFidelity,
    FidelityWindows,
    Sums,
    Window,
    warning_of,
)
from sglang_smc.state.metrics import Counters, Monitor
from sglang_smc.state.request import RequestState


def answer(
    mode: str = "smc", tilt: float = 0.3, information: float = 4.0, count: int = 10
) -> AnswerFidelity:
    return AnswerFidelity(mode, 0.5, tilt * information, information, 0.25 * count, count)


def sums_of(*answers: AnswerFidelity) -> Sums:
    return functools.reduce(lambda total, one: total.plus(Sums.of(one)), answers, Sums())


def test_a_tilt_weighs_answers_by_what_they_say() -> None:
    sums = sums_of(answer(tilt=1.0, information=9.0), answer(tilt=0.0, information=1.0, count=30))
    assert sums.tilt == 0.9
    assert sums.innovation == 0.25
    assert (sums.answers, sums.watched, sums.information) == (2, 40, 10.0)


def test_nothing_watched_is_no_tilt_of_zero() -> None:
    """Who was not watched is left out."""
    watched = FidelityWindows()
    watched.add(AnswerFidelity("smc", 0.5, 0.0, 0.0, 0.0, 0.0))
    assert watched.all == Sums()
    assert list(watched.as_dict()) == [ALL]
    assert (Sums().tilt, Sums().tilt_error, Sums().innovation, str(Sums())) == (None,) * 3 + ("-",)
    sums = sums_of(answer(information=0.0))  # draft and target are one
    assert (sums.tilt, sums.tilt_error) == (None, None)
    assert sums.innovation is not None


def test_the_standard_error_is_the_larger_of_what_laws_and_answers_say() -> None:
    """And it is that of the tilt: of 400 windows of normal answers the spread errs by 1 in 28.

    Five of them are 18 %.
    """
    alike = sums_of(*[answer(tilt=0.3)] * 100)
    assert alike.tilt_error == pytest.approx(400**-0.5)
    apart = sums_of(*[answer(tilt=3.3), answer(tilt=-2.7)] * 50)
    assert apart.tilt == pytest.approx(0.3)
    assert apart.tilt_error == pytest.approx(math.sqrt(100 * (3.0 * 4.0) ** 2) / 400)
    drawn = random.Random(0)
    tilts = []
    for _ in range(400):
        of = [drawn.uniform(1, 7) for _ in range(60)]
        sums = sums_of(*(answer("exact", drawn.gauss(0, i**-0.5), i) for i in of))
        assert sums.tilt is not None and sums.tilt_error is not None
        tilts.append(sums.tilt / sums.tilt_error)
    assert math.sqrt(sum(tilt**2 for tilt in tilts) / 400) == pytest.approx(1.0, abs=0.18)


def test_a_window_lets_the_oldest_half_go() -> None:
    window = Window(information=40.0)
    whole = [window.add(answer(tilt=float(i >= 10))) for i in range(20)]
    assert [one is not None for one in whole] == [i % 10 == 9 for i in range(20)]
    assert whole[9] == sums_of(*[answer(tilt=0.0)] * 10)
    assert whole[19] == sums_of(*[answer(tilt=1.0)] * 10), "no answer is judged twice"
    assert window.sums == sums_of(*[answer(tilt=1.0)] * 5)
    # Answers that say little fill one by their number.
    window = Window(most=6)
    whole = [window.add(answer(information=1e-9)) for _ in range(12)]
    assert [place for place, one in enumerate(whole) if one is not None] == [5, 11]


@pytest.mark.parametrize(
    ("mode", "zero", "errors", "advice"),
    [
        ("exact", 0.0, FAULT, ("report", "/server_info")),
        ("exact", 0.0, -FAULT, ("report", "/server_info")),
        ("smc", 0.5, 2.0, ("-mode auto", "exact", "evidence-threshold", "draft-model")),
    ],
)
def test_tilts_are_told_where_they_are_surely_wrong(
    mode: str, zero: float, errors: float, advice: tuple[str, ...]
) -> None:
    """Exact answers five standard errors from zero, others where they are more than half way."""
    tilts = [zero + errors * by * INFORMATION**-0.5 for by in (0.98, 1.02)]
    near, far = (sums_of(*[answer(mode, tilt)] * 250) for tilt in tilts)
    assert warning_of(mode, near) is None
    text = warning_of(mode, far) or ""
    assert all(word in text for word in advice) and (mode == "smc" or str(far) in text)
    assert warning_of("smc", sums_of(*[answer(tilt=-2.0)] * 250)) is None


def test_a_mode_is_warned_of_once_in_a_while_and_by_itself() -> None:
    clock = [0.0]
    watched = FidelityWindows(lambda: clock[0], lambda: Window(information=8.0))
    far, fine = answer(tilt=3.0), answer("mixed", tilt=0.0)

    def told() -> list[bool]:
        return [watched.add(one) is not None for one in (far, fine, far, fine)]

    assert told() == [False, False, True, False]
    assert told() == [False] * 4, "but not so soon again"
    clock[0] += WARNING_SECONDS
    assert told() == [False, False, True, False]
    found = watched.as_dict()
    assert set(found) == {ALL, "smc", "mixed"}
    assert found["mixed"]["tilt"] == 0.0
    assert found["smc"]["tilt"] == 3.0
    assert {found[ALL]["tilt"], found[ALL]["answers"]} != {None, 0}


@pytest.mark.parametrize("logs", [True, False])
def test_the_log_has_the_tilt_and_what_is_wrong_with_it(
    caplog: pytest.LogCaptureFixture, logs: bool
) -> None:
    caplog.set_level(logging.INFO)
    found, reporter = Monitor(interval=1), {"current_scheduler_metrics_enabled": False}
    found.report_as(cast(Any, SimpleNamespace(**reporter, is_stats_logging_rank=logs)))
    for number in range(250):
        if number == 1:
            found.end_round()
        found.end_answer(answer("exact", tilt=0.5))
    assert ("tilt: 0.50 +- 0.50" in caplog.text) == logs
    assert ("This is a fault" in caplog.text) == logs


def test_an_answer_is_taken_in_once_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (True, False):
        monitor, state = Monitor(interval=1), RequestState.of(0, RequestConfig(num_particles=4))
        monkeypatch.setattr(process, "_monitor", monitor)
        watched = {"tilt_sum": 1.0, "tilt_information": 4.0, "watched_ct": 2.0}
        state.counters = [watched.get(name, 0.0) for name in Counters._fields]
        req: Any = ToyRequest(0, 9, 9, {}, None)
        req.smc_state, req.stream = state, stream
        req.output_ids = req.output_ids_through_stop = [5]
        for has_ended in (False, True, True):
            req.finished = lambda has_ended=has_ended: has_ended
            update_finish_state(lambda *_: None, req, 1)
            assert monitor.fidelity()[ALL]["answers"] == has_ended
        assert monitor.fidelity()["smc"]["tilt"] == 0.25
        assert req.customized_info["spec_smc_tilt"] == [0.25]
