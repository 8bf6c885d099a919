"""What the flag declares, what requests name, who asks, and which beginnings are asked about."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict
from steered import Broken, Slow
from toy_request import Letters

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.potentials import Potential, Text
from sglang_smc.potentials.asked import Asked, Schedule, asked_of, schedule_of
from sglang_smc.potentials.calls import (
    COOL_DOWN,
    MOST_LATE,
    Caller,
    Failed,
    Question,
    callers_of,
)
from sglang_smc.potentials.declared import choose, declared, load, problems
from sglang_smc.potentials.readings import Readings
from sglang_smc.smc.judging import elect, revalue

# The flag.


def test_a_declaration_is_taken_apart_and_not_run() -> None:
    found = declared('prm=a.b:make(url="http://x:1/y", labels=["good"], scale=-2.5)')
    assert found[:3] == ("prm", "a.b", "make")
    assert found.arguments == {"url": "http://x:1/y", "labels": ["good"], "scale": -2.5}
    assert declared("prm=a.b:make").arguments == {}


@pytest.mark.parametrize(
    "given",
    [
        "steered:Count",
        "count=steered",
        "=steered:Count",
        "count=steered:Count(1)",
        "count=steered:Count(offset=open('x'))",
        "count=steered:Count()()",
        "count=steered:Count.open",
        "count=steered:(",
        "co unt=steered:Count",
        "count=steered:Count(**{'offset': 1})",
    ],
)
def test_what_is_no_declaration_is_told(given: str) -> None:
    (problem,) = problems([given])
    assert given in problem and "NAME=package.module:factory" in problem


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("count=nowhere.at_all:Count", "ModuleNotFoundError"),
        ("count=steered:Nothing", "AttributeError"),
        ("count=steered:Count(color='red')", "TypeError"),
        ("count=steered:log_phi(output='')", "gives a float"),
        ("loose=steered:Loose", "frozen=True"),
        ("count=steered:Picky.Args", "NAME=package.module:factory"),
        ("count=sys:exit", "SystemExit"),
    ],
)
def test_what_cannot_be_had_is_told(given: str, told: str) -> None:
    (problem,) = problems([given])
    assert told in problem and given.split("=")[0] in problem


def test_names_are_given_once() -> None:
    (problem,) = problems(["count=steered:Count", "count=steered:Slow"])
    assert "twice" in problem


def test_what_cannot_be_opened_is_told() -> None:
    assert callers_of(("shut=steered:Shut",), 1.0, print, opens=False)["shut"].name == "shut"
    with pytest.raises(RuntimeError, match="'shut' cannot be opened: OSError: no weights"):
        callers_of(("shut=steered:Shut",), 1.0, print, opens=True)
    with pytest.raises(RuntimeError, match="'shut' cannot be opened: SystemExit: 1"):
        callers_of(("shut=steered:Shut(exits=True)",), 1.0, print, opens=True)


# Requests.

KNOWN = load(("count=steered:Count", "slow=steered:Slow"))
PICKY = load(("picky=steered:Picky",))


def test_a_request_names_potentials_as_objects_or_as_json() -> None:
    (found,) = asked_of([{"name": "count", "args": {"token": 3}, "when": {"tokens": 2}}])
    assert asked_of('[{"name": "count", "args": {"token": 3}, "when": {"tokens": 2}}]') == (found,)
    chosen = choose(found, KNOWN)
    assert asdict(chosen.args) == {"token": 3, "weight": 0.7}
    assert (chosen.exponent, chosen.schedule) == (1.0, Schedule(tokens=2))
    assert choose(Asked("count"), KNOWN).schedule == Schedule(is_each_round=True)


@pytest.mark.parametrize(
    "given",
    [
        {"name": "count"},
        [{"nam": "count"}],
        [{"name": "count", "color": 1}],
        [{"name": 1}],
        [{"name": "count", "exponent": math.nan}],
        [{"name": "count", "exponent": "1"}],
        [{"name": "count", "when": {"tokens": 0}}],
        [{"name": "count", "when": {"tokens": True}}],
        [{"name": "count", "when": {"delimiter": ""}}],
        [{"name": "count", "when": {"delimiter": -1}}],
        [{"name": "count", "when": {"tokens": 1, "delimiter": "a"}}],
        [{"name": "count"}] * 9,
        "[{",
        "[" * 70_000,
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_is_malformed_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="potential"):
        request_config(SMCConfig(), {"smc": {"potentials": given}})


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (Asked("other"), "'other', which is unknown; allowed: 'count', 'slow'"),
        (Asked("count", {"token": "x"}), "token: int, weight: float"),
        (Asked("slow"), "seconds: float"),
    ],
)
def test_what_the_server_has_not_is_refused(asked: Asked, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        choose(asked, KNOWN)
    with pytest.raises(ValueError, match="none, since this server has no"):
        choose(asked, {})


def test_arguments_that_raise_anything_are_refused() -> None:
    """They are the operator's code, in the process that answers HTTP: it must not end."""
    with pytest.raises(ValueError, match=r"'picky' with args=\{\}: SystemExit: 3; allowed: weight"):
        choose(Asked("picky"), PICKY)


def test_potentials_make_another_target() -> None:
    """Kept whole blocks, a long lag, a first token of each particle's own."""
    plain = request_config(SMCConfig(), None)
    found = request_config(SMCConfig(), {"smc": {"potentials": [{"name": "count"}]}})
    assert plain.is_normalized and not found.is_normalized
    assert (plain.covering, found.covering) == (0.5, 0.0)
    assert (plain.lag, found.lag) == (4, 256)
    vote = {"selection": "vote", "answer_pattern": "a"}
    assert request_config(SMCConfig(), {"smc": vote}).lag == 256


# Who asks.


def text(output: str, args: Any = None) -> Text:
    return Text([0], [ord(letter) - ord("a") for letter in output], args, Letters(27).decode)


def test_one_call_for_all_and_each_value_in_its_place() -> None:
    class Lengths(Potential):
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []
            self.thread = 0

        def complete(self, texts: Sequence[Text]) -> list[float]:
            self.calls.append(("complete", len(texts)))
            self.thread = threading.get_ident()
            return [-float(len(one.output)) for one in texts]

        def prefix(self, texts: Sequence[Text]) -> list[float]:
            self.calls.append(("prefix", len(texts)))
            return [float(len(one.output)) for one in texts]

    lengths = Lengths()
    asked = [("a", False, 0), ("ab", True, 0), ("abc", False, 1), ("abcd", True, 2)]
    questions = [Question(text(output), is_whole, owner) for output, is_whole, owner in asked]
    answers = Caller("lengths", lengths, 10.0).ask(questions).answers()
    assert answers == [1.0, -2.0, 3.0, -4.0]
    assert sorted(lengths.calls) == [("complete", 2), ("prefix", 2)]
    assert lengths.thread != threading.get_ident()


def test_who_is_at_fault_fails_alone() -> None:
    does = {
        "raise": "raised RuntimeError: the oracle is silent",
        "exit": "raised SystemExit: the oracle has left",
        "interrupt": "raised KeyboardInterrupt",
        "cancel": "raised CancelledError",
        "panic": "raised Panic.",
        "write": "raised TypeError: 'tuple' object does not support item assignment",
        "short": "gave 0 values for 1 texts",
        "nan": "gave nan",
    }
    asked = ["nothing", *does, "forbid", "nothing"]
    questions = [
        Question(text("a", Broken.Args(one)), False, owner) for owner, one in enumerate(asked)
    ]
    first, *told, forbidden, last = Caller("broken", Broken(), 10.0).ask(questions).answers()
    assert (first, forbidden, last) == (0.0, -math.inf, 0.0)
    for failed, sentence in zip(told, does.values(), strict=True):
        assert isinstance(failed, Failed) and sentence in failed.message


class Gated(Potential):
    """Answers once its gate is open; it opens and shuts while no call waits there."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()

    def shut(self) -> None:
        self.gate.clear()
        self.entered.clear()

    def complete(self, texts: Sequence[Text]) -> list[float]:
        self.entered.set()
        self.gate.wait()
        return [0.0] * len(texts)


def test_behind_late_calls_in_a_row_a_potential_is_not_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A circuit breaker: open behind three, half open when it has cooled down and the late call is
    back, closed by one in time. With no seconds at all every call that waits at its gate is late.
    """
    gated, now, whole = Gated(), [0.0], [Question(text("a"), True, 0)]
    caller = Caller("gated", gated, 0.0, now=lambda: now[0])

    def is_late() -> bool:
        assert caller.refusal() is None
        call = caller.ask(whole)
        if gated.gate.is_set():
            wait([call.future])
        else:
            gated.entered.wait()
        return isinstance(call.answers()[0], Failed)

    assert is_late() and is_late()
    come_back(caller)
    gated.gate.set()
    assert not is_late(), "which starts the count anew"
    gated.shut()
    assert all(is_late() for _ in range(MOST_LATE))
    refused = caller.refusal()
    assert refused is not None and refused.is_late
    assert "'gated' is not asked: its last 3 calls took more than 0 s" in refused.message
    now[0] += COOL_DOWN
    assert caller.refusal() == refused, "the late call still hangs"
    come_back(caller)
    assert is_late() and caller.refusal() is not None, "one call tries, and no more"
    come_back(caller)
    assert caller.refusal() is not None
    now[0] += COOL_DOWN
    gated.gate.set()
    assert not is_late() and caller.refusal() is None
    gated.shut()
    assert is_late() and caller.refusal() is None, "closed: one late call is one"
    come_back(caller)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def come_back(caller: Caller) -> None:
    """Let the late call end, and the next one wait at the gate again."""
    gated = caller.potential
    assert isinstance(gated, Gated) and caller._hung is not None
    gated.gate.set()
    wait([caller._hung])
    gated.shut()


def test_who_takes_too_long_is_left_behind_and_so_is_who_waits_for_it() -> None:
    waits: list[float] = []
    caller = Caller("slow", Slow(), 0.2, waits.append)
    late = [Question(text("a", Slow.Args(0.6)), True, 0)]
    first, second = caller.ask(late), caller.ask([Question(text("a", Slow.Args(0.0)), True, 0)])
    for call in (first, second):
        (answer,) = call.answers()
        assert isinstance(answer, Failed) and answer.is_late and "0.2 s" in answer.message
    assert len(waits) == 2 and sum(waits) > 0.1
    first.future.result()
    (answer,) = caller.ask([Question(text("a", Slow.Args(0.0)), True, 0)]).answers()
    assert answer == 0.0


# Which beginnings are asked about.

SCHEDULES: list[Any] = ["round", "end", {"tokens": 3}, {"delimiter": 1}, {"delimiter": "ab"}]


def last_time(when: Any, output: str) -> int | None:
    """Tokens of the last beginning that is asked about; None where there is none."""
    if when == "end":
        return None
    if when == "round":
        return len(output) or None
    (kind, value), *_ = when.items()
    if kind == "tokens":
        return len(output) // value * value or None
    delimiter = "b" if value == 1 else value
    found = output.rfind(delimiter)
    return None if found < 0 else found + len(delimiter)


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", max_size=12), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_readings_know_the_last_time_of_each_text(
    settled: str, tails: list[str], in_two: int
) -> None:
    decode = Letters(27).decode
    readings = Readings([schedule_of(when) for when in SCHEDULES], decode)
    ids = {letter: number for number, letter in enumerate("abc")}
    numbers = [[ids[letter] for letter in part] for part in (settled, *tails)]
    readings.places(numbers[0][:in_two], [[]])  # the text has grown since
    places = readings.places(numbers[0], numbers[1:])
    for tail, place in zip(tails, places, strict=True):
        found = [at.length if at is not None else None for at in place.asked_at]
        whole = settled + tail
        if not whole:
            found[0] = None
        assert found == [last_time(when, whole) for when in SCHEDULES]
    again = readings.places(numbers[0], numbers[1:])
    assert all(one is same for one, same in zip(places, again, strict=True))


# What becomes of weights.


def test_weights_hold_the_last_value_alone() -> None:
    weights = torch.tensor([[0.5, -0.5, -math.inf, 0.0]], dtype=torch.float64)
    first = revalue(weights, torch.zeros(1, 4).double(), torch.tensor([[1.0, math.nan, 2.0, 3.0]]))
    assert first.log_weights.tolist() == [[1.5, -0.5, -math.inf, 3.0]]
    second = revalue(
        first.log_weights, first.log_values, torch.tensor([[-1.0, 2.0, 0.0, -math.inf]])
    )
    assert second.log_weights.tolist() == [[-0.5, 1.5, -math.inf, -math.inf]]


@given(
    st.lists(
        st.tuples(st.integers(-1, 2), st.one_of(st.floats(-3, 3), st.just(-math.inf))),
        min_size=1,
        max_size=6,
    )
)
def test_a_vote_leaves_the_weight_to_one_answer(particles: list[tuple[int, float]]) -> None:
    answers = torch.tensor([[answer for answer, _ in particles]])
    weights = torch.tensor([[weight for _, weight in particles]], dtype=torch.float64)
    found = elect(weights, answers)
    totals = {
        answer: sum(math.exp(w) for a, w in particles if a == answer)
        for answer, _ in particles
        if answer >= 0
    }
    if not totals or max(totals.values()) == 0 or not weights.isfinite().any():
        assert torch.equal(found, weights)
        return
    left = {a for (a, _), w in zip(particles, found[0].tolist(), strict=True) if w > -math.inf}
    (winner,) = left
    assert totals[winner] >= max(totals.values()) * (1 - 1e-12)
    assert float(found.logsumexp(1)) == pytest.approx(float(weights.logsumexp(1)), abs=1e-9)
