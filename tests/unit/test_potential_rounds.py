"""What becomes of requests whose potentials fail, in the package's own rounds."""

import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import pytest
import torch
from steered import Broken, Picky
from toy_laws import EOS, languages
from toy_request import PROMPT, ToyRequest
from toy_worker import ToyWorker

from sglang_smc.options.server import SMCConfig
from sglang_smc.potentials import Potential, Text
from sglang_smc.potentials.calls import Caller, Failed

SERVER = SMCConfig(num_particles=3, num_steps=2, max_lag=8)


class Writes(Potential):
    """Notes what it is given, and tries to write into it."""

    def __init__(self) -> None:
        self.given: list[Text] = []

    def complete(self, texts: Sequence[Text]) -> list[float]:
        self.given += texts
        for text in texts:
            text.output_ids[:] = [7]  # type: ignore[index]
        return [0.0] * len(texts)

    prefix = complete


def play(potential: Potential, *chosen: dict[str, Any], refused: bool = False) -> list[ToyRequest]:
    """Requests behind their first round."""

    class Stopped(Caller):
        def refusal(self) -> Failed | None:
            return Failed("the breaker is open", is_late=True) if refused else super().refusal()

    size = len(chosen)
    sizes = {"num_requests": size, "max_new_tokens": 8, "eos": EOS, "chosen": chosen}
    callers = {"named": Stopped("named", potential, 60.0)}
    worker = ToyWorker(SERVER, *languages(), callers=callers, **sizes)
    reqs = worker.begin(list(range(1, size + 1)), torch.full((size,), 0.4, dtype=torch.float64))
    worker.play_round(reqs)
    return reqs


def named(*args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"potentials": [{"name": "named", "args": one, **more} for one in args]}


def test_what_a_potential_is_given_is_its_own() -> None:
    """Red if it is the scheduler's own list: what is written there is another request's prefix."""
    writes = Writes()
    req, plain = play(writes, named({}), {})
    assert isinstance(req.origin_input_ids, list) and req.origin_input_ids == list(PROMPT)
    assert len(req.output_ids) == 1
    assert writes.given and all(text.prompt_ids == PROMPT for text in writes.given)
    assert len({id(text.prompt_ids) for text in writes.given}) == 1, "copied once a request"
    assert req.to_finish is not None and "TypeError: 'tuple' object" in req.to_finish.message
    assert req.to_finish.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert plain.to_finish is None


def test_all_who_name_a_potential_that_is_stopped_end_at_once() -> None:
    """Also who would ask it at the end alone. Red if it is asked, which every request waits for."""
    writes = Writes()
    chosen = named({}), named({}, when="end"), {}
    first, last, plain = play(writes, *chosen, refused=True)
    assert writes.given == [] and plain.to_finish is None
    for req in (first, last):
        assert req.to_finish is not None and req.to_finish.message == "the breaker is open"
        assert req.to_finish.status_code == HTTPStatus.SERVICE_UNAVAILABLE


LARGE, FORBID = {"does": "large"}, {"does": "forbid"}


@pytest.mark.parametrize(
    "asked",
    [named(LARGE, exponent=1e30), named(LARGE, LARGE), named(LARGE)],
    ids=["exponent", "sum", "alone"],
)
def test_numbers_that_floats_do_not_hold_are_an_error_of_the_potential(
    asked: dict[str, Any],
) -> None:
    """Not HTTP 400, as if all texts were forbidden: phi is infinite, the opposite."""
    (req,) = play(Broken(), asked)
    assert req.to_finish is not None
    assert req.to_finish.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert "for a text; allowed: up to 1e300" in req.to_finish.message


def test_what_is_forbidden_stays_so_beside_large_numbers() -> None:
    (req,) = play(Broken(), named(FORBID, {"does": "nothing"}))
    assert req.to_finish is not None and req.smc_state.counters[-1] <= 0.0
    assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
    (both,) = play(Broken(), named(FORBID, LARGE, exponent=1e30))
    assert both.to_finish is not None
    assert both.to_finish.status_code == HTTPStatus.INTERNAL_SERVER_ERROR, "0 * inf has no value"
    assert not math.isnan(both.smc_state.counters[-1])


def test_arguments_that_raise_in_the_scheduler_end_their_request() -> None:
    """They were accepted where the request came in. Red if the scheduler ends with SystemExit."""
    req, plain = play(Picky(), named({}), {})
    assert req.to_finish is not None and "SystemExit: 3" in req.to_finish.message
    assert req.to_finish.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert plain.to_finish is None
