"""Does the threshold follow the tilt that is asked for, and what answers teach of it?"""

import math
import random

import pytest

from sglang_smc.options.policy import PRIOR_INFORMATION, SCALE, WINDOW_INFORMATION, Dial
from sglang_smc.options.request import RequestConfig, request_config
from sglang_smc.options.server import SMCConfig

INFORMATION = 3.0  # of an answer, as those of the shipped pair have


def answer(rng: random.Random, threshold: float, scale: float = 0.7) -> tuple[float, ...]:
    """Of a server whose tilt is ``scale / (1 + threshold)``: c, numerator, information."""
    noise = rng.gauss(0.0, math.sqrt(INFORMATION))
    return threshold, scale / (1.0 + threshold) * INFORMATION + noise, INFORMATION


@pytest.mark.parametrize(
    ("tilt", "scales"), [(0.05, [0.7]), (0.15, [0.7]), (0.4, [1.5, 0.7]), (0.7, [1.5, 0.7])]
)
def test_answers_come_to_have_the_tilt_that_is_asked_for(tilt: float, scales: list[float]) -> None:
    """To four standard errors of what is remembered: another scale of before is forgotten."""
    dial, rng = Dial(), random.Random(0)
    for scale in scales:
        for _ in range(10_000):
            dial.learn(*answer(rng, dial.threshold(tilt), scale))
        gives = scale / (1.0 + dial.threshold(tilt))
        assert gives == pytest.approx(tilt, rel=4 / (scale * math.sqrt(WINDOW_INFORMATION)))


def test_answers_that_cannot_lean_teach_nothing() -> None:
    """By their noise alone a server of much exact traffic would walk away from what it knows."""
    dial, rng = Dial(), random.Random(2)
    for _ in range(5_000):
        dial.learn(*answer(rng, math.inf))
    assert dial.scale == SCALE
    for _ in range(5_000):
        dial.learn(*answer(rng, 1e6, SCALE))
    assert dial.scale == pytest.approx(SCALE, abs=1e-3)


def test_the_first_guess_weighs_what_it_says_and_no_scale_is_below_zero() -> None:
    """No tilt is exact, whatever is known; more than the scale keeps whole blocks."""
    dial = Dial()
    assert [dial.threshold(tilt) for tilt in (0.0, SCALE, 9.0)] == [math.inf, 0.0, 0.0]
    assert dial.threshold(SCALE / 3) == pytest.approx(2.0)
    dial.learn(0.0, 2 * SCALE * PRIOR_INFORMATION, PRIOR_INFORMATION)
    assert dial.scale == pytest.approx(1.5 * SCALE)
    dial.learn(0.0, -1000.0, 500.0)
    assert dial.scale == dial.threshold(0.1) == 0.0
    assert dial.threshold(0.0) == math.inf


def settled(server: SMCConfig | None = None, **chosen: object) -> RequestConfig:
    return Dial().with_threshold(request_config(server or SMCConfig(), {"smc": chosen}))


def test_a_request_keeps_the_threshold_that_its_tilt_came_to() -> None:
    assert settled(tilt=SCALE / 3).effective_evidence_threshold == pytest.approx(2.0)
    assert settled(tilt=0).effective_evidence_threshold == math.inf
    assert settled(mode="auto").effective_evidence_threshold == 2.0
    assert settled(
        SMCConfig(mode="auto", tilt=SCALE / 5)
    ).effective_evidence_threshold == pytest.approx(4.0)
    assert (
        settled(SMCConfig(mode="auto", tilt=0.1), mode="mixed").effective_evidence_threshold == 0.5
    )
