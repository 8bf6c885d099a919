"""Potentials: the flag, requests, who asks, who fails, and the library."""

import json
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict
from steered import Broken, Never, Picky, text
from toy_laws import toy
from toy_request import Letters, ToyRequest

from sglang_smc import process
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.potentials import Potential, Text
from sglang_smc.potentials.library import EndpointError, Http, Length, RegexCount, exponent, product
from sglang_smc.potentials.runner import COOL_DOWN, MissingValue, PotentialRunner, Query
from sglang_smc.potentials.spec import (
    Declaration,
    PotentialSpec,
    Schedule,
    declaration_problems,
    load,
    parse_specs,
)
from sglang_smc.rules.potentials import PrefixTree
from sglang_smc.state.texts import has_open_token
from sglang_smc_tools.testing import check_potential

# The flag.


def test_a_declaration_is_taken_apart_and_not_run() -> None:
    found = Declaration.parse('prm=a.b:make(url="http://x:1/y", labels=["good"], scale=-2.5)')
    assert found[:3] == ("prm", "a.b", "make")
    assert found.arguments == {"url": "http://x:1/y", "labels": ["good"], "scale": -2.5}
    assert Declaration.parse("prm=a.b:make").arguments == {}


SHAPE = "NAME=package.module:factory"
NO_CALL = ["(1)", "(offset=open('x'))", "()()", ".open", "(**{'offset': 1})"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *((it, SHAPE) for it in ("steered:Count", "count=steered", "=steered:Count")),
        *((it, SHAPE) for it in ("count=steered:(", "co unt=steered:Count")),
        *((f"count=steered:Count{it}", SHAPE) for it in NO_CALL),
        ("count=nowhere.at_all:Count", "ModuleNotFoundError"),
        ("count=steered:Nothing", "AttributeError"),
        ("count=steered:Count(color='red')", "TypeError"),
        ("count=steered:log_phi(output='')", "gives a float"),
        ("loose=steered:Loose", "frozen=True"),
        ("count=steered:Picky.Args", SHAPE),
        ("count=sys:exit", "SystemExit"),
    ],
)
def test_what_is_no_declaration_or_cannot_be_had_is_told(given: str, told: str) -> None:
    (problem,) = declaration_problems([given])
    assert told in problem and given.split("=")[0] in problem
    (problem,) = declaration_problems(["count=steered:Count", "count=steered:Slow"])
    assert "twice" in problem


def test_what_cannot_be_opened_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first rank, which alone opens them."""
    opened = partial(process.open_runners, mock.Mock(), SMCConfig(), mock.Mock())
    for how, told in (("", "OSError: no weights"), ("(exits=True)", "SystemExit: 1")):
        flag = mock.Mock(return_value=(f"shut=steered:Shut{how}",))
        monkeypatch.setattr(process, "potentials_of", flag)
        monkeypatch.setattr(process, "get_parallel", lambda: mock.Mock(tp_rank=1))
        assert opened()["shut"].name == "shut"
        monkeypatch.setattr(process, "get_parallel", lambda: mock.Mock(tp_rank=0))
        with pytest.raises(RuntimeError, match=f"'shut' cannot be opened: {told}"):
            opened()


# Requests.

KNOWN = load(("count=steered:Count", "slow=steered:Slow", "picky=steered:Picky"))


def test_a_request_names_potentials_as_objects_or_as_json() -> None:
    given = [{"name": "count", "args": {"token": 3}, "when": {"tokens": 2}}]
    (found,) = parse_specs(given)
    assert parse_specs(json.dumps(given)) == (found,)
    resolved = found.resolve(KNOWN)
    assert asdict(resolved.args) == {"token": 3, "weight": 0.7}
    assert (resolved.exponent, resolved.schedule) == (1.0, Schedule(tokens=2))
    assert PotentialSpec("count").resolve(KNOWN).schedule == Schedule(is_each_round=True)


WHEN = [
    *({"tokens": it} for it in (0, True)),
    *({"delimiter": it} for it in ("", -1, "a" * 513)),
    {"tokens": 1, "delimiter": "a"},
]
BESIDE_A_NAME: list[dict[str, Any]] = [
    *({"exponent": exponent} for exponent in (math.nan, "1")),
    *({"when": when} for when in WHEN),
    {"color": 1},
]


@pytest.mark.parametrize(
    "given",
    [
        *([{"name": "count", **more}] for more in BESIDE_A_NAME),
        *({"name": "count"}, [{"nam": "count"}], [{"name": 1}], [{"name": "count"}] * 9),
        *("[{", "[" * 70_000, '[{"name": "count", "args": {"a": ' + "[" * 60_000),
    ],
)
def test_what_is_malformed_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="potential"):
        request_config(SMCConfig(), {"smc": {"potentials": given}})


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (PotentialSpec("other"), "'other', which is unknown; allowed: 'count', "),
        (PotentialSpec("count", {"token": "x"}), "token: int, weight: float"),
        (PotentialSpec("slow"), "seconds: float"),
        (PotentialSpec("picky"), r"'picky' with args=\{\}: SystemExit: 3; allowed: weight"),
    ],
)
def test_what_the_server_has_not_is_refused(asked: PotentialSpec, told: str) -> None:
    """Arguments are the operator's code, in the process that answers HTTP: it must not end."""
    with pytest.raises(ValueError, match=told):
        asked.resolve(KNOWN)
    with pytest.raises(ValueError, match="none, since this server has no"):
        asked.resolve({})


# Who asks.


class Lengths(Potential):
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def complete(self, texts: Sequence[Text], sign: int = -1) -> list[float]:
        self.calls.append((sign, len(texts), threading.get_ident()))
        return [sign * float(len(one.output)) for one in texts]

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return self.complete(texts, 1)


def values_of(potential: Potential, queries: list[Query]) -> list[float | MissingValue]:
    return PotentialRunner("named", potential, 600.0).submit(queries).result()


def test_one_call_for_all_and_each_value_in_its_place() -> None:
    lengths = Lengths()
    asked = [("a", False, 0), ("ab", True, 0), ("abc", False, 1), ("abcd", True, 2)]
    queries = [Query(text(output), is_whole, owner) for output, is_whole, owner in asked]
    assert values_of(lengths, queries) == [1.0, -2.0, 3.0, -4.0]
    (_, _, thread), _ = lengths.calls
    assert sorted(lengths.calls) == [(-1, 2, thread), (1, 2, thread)]
    assert thread != threading.get_ident()
    runner = PotentialRunner("named", lengths, 600.0)  # a round in slices has several under way
    first, second = (runner.submit(few) for few in (queries[:2], queries[2:]))
    assert (first.result(), second.result()) == ([1.0, -2.0], [3.0, -4.0])


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
    queries = [Query(text("a", Broken.Args(one)), False, owner) for owner, one in enumerate(asked)]
    first, *told, forbidden, last = values_of(Broken(), queries)
    assert (first, forbidden, last) == (0.0, -math.inf, 0.0)
    for failed, sentence in zip(told, does.values(), strict=True):
        assert isinstance(failed, MissingValue) and sentence in failed.message


def begun() -> Future[Any]:
    """A call that the thread of its potential is in."""
    call: Future[Any] = Future()
    call.set_running_or_notify_cancel()
    return call


def test_behind_late_calls_a_potential_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    """A circuit breaker: open behind three, half open when it has cooled down and the late call is
    back, closed by one in time. Calls behind one that hangs are late, too, and never begin.
    """
    now = [0.0]
    waits = list[float]()
    runner = PotentialRunner("gated", Never(), 0.0, waits.append, now=lambda: now[0])
    in_time = Future[Any]()
    queued = Future[Any]()
    hung = begun()
    trial = begun()
    in_time.set_result([0.0])

    def is_late(call: Future[Any]) -> bool:
        assert runner.refusal() is None
        answer = runner.wait(call, 0.0)
        assert answer == [0.0] or (isinstance(answer, MissingValue) and answer.is_late)
        return isinstance(answer, MissingValue)

    assert is_late(begun()) and is_late(begun())
    assert not is_late(in_time), "which starts the count anew"
    assert is_late(hung) and is_late(queued) and is_late(Future()) and queued.cancelled()
    refused = runner.refusal()
    assert refused is not None and refused.is_late
    assert "'gated' is not asked: its last 3 calls took more than 0 s" in refused.message
    now[0] += COOL_DOWN
    assert runner.refusal() == refused, "the late call still hangs"
    hung.set_result([0.0])
    assert is_late(trial) and runner.refusal() is not None, "one call tries, and no more"
    trial.set_result([0.0])
    assert runner.refusal() is not None
    now[0] += COOL_DOWN
    assert not is_late(in_time) and runner.refusal() is None
    assert is_late(begun()) and runner.refusal() is None, "closed: one late call is one"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert len(waits) == 9


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
def test_the_tree_knows_each_texts_last_time(settled: str, tails: list[str], in_two: int) -> None:
    decode = Letters(27).decode
    tree = PrefixTree([Schedule.of(when) for when in SCHEDULES], decode)
    ids = {letter: number for number, letter in enumerate("abc")}
    numbers = [[ids[letter] for letter in part] for part in (settled, *tails)]
    tree.nodes(numbers[0][:in_two], [[]])  # the text has grown since
    nodes = tree.nodes(numbers[0], numbers[1:])
    for tail, node in zip(tails, nodes, strict=True):
        found = [at.length if at is not None else None for at in node.due_at]
        whole = settled + tail
        if not whole:
            found[0] = None
        assert found == [last_time(when, whole) for when in SCHEDULES]
    again = tree.nodes(numbers[0], numbers[1:])
    assert all(one is same for one, same in zip(nodes, again, strict=True))


# Requests whose potentials fail, in the package's own rounds.


def play(potential: Potential, *chosen: dict[str, Any], refused: bool = False) -> list[ToyRequest]:
    size = len(chosen)
    runner = PotentialRunner("named", potential, 600.0)
    if refused:
        runner.refusal = lambda: MissingValue("the breaker is open", is_late=True)  # type: ignore[method-assign]
    server = {"num_particles": 3, "num_steps": 2, "max_lag": 8, "limit": 8}
    worker = toy(size, **server, runners={"named": runner}, chosen=chosen)
    reqs = worker.begin(list(range(1, size + 1)))
    worker.play_round(reqs)
    return reqs


def named(*args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"potentials": [{"name": "named", "args": one, **more} for one in args]}


def test_all_who_name_a_potential_that_is_stopped_end_at_once() -> None:
    """Also who would ask it at the end alone. Red if it is asked, which every request waits for."""
    first, last, plain = play(Never(), named({}), named({}, when="end"), {}, refused=True)
    assert plain.to_finish is None
    for req in (first, last):
        assert req.to_finish.message == "the breaker is open"
        assert req.to_finish.status_code == HTTPStatus.SERVICE_UNAVAILABLE


def test_a_request_for_no_tokens_asks_nothing() -> None:
    """SGLang sends one before n samples."""
    runners = {"named": PotentialRunner("named", Never(), 600.0)}
    worker = toy(
        1, num_particles=3, asked={"max_new_tokens": 0}, runners=runners, chosen=(named({}),)
    )
    (req,) = worker.begin([1])
    assert not has_open_token(req) and not req.smc_state.potentials


def test_the_next_request_of_a_row_starts_without_its_values() -> None:
    """Red where the first weights of a request are divided by what another's texts were worth."""
    runners = {"named": PotentialRunner("named", Lengths(), 600.0)}
    own = {**named({}), "return_particles": True, "ess_threshold": 0.0}
    worker = toy(1, num_particles=3, num_steps=2, limit=8, runners=runners, chosen=(own,))

    def weights() -> torch.Tensor:
        reqs = worker.begin([1])
        for _ in range(2):  # values come a round late
            outcome = worker.play_round(reqs).outcome
        return outcome.extras["return_particles"].log_weights

    first = weights()
    second = weights()
    assert first.any()
    assert torch.equal(first, second)


LARGE, FORBID, MOST = {"does": "large"}, {"does": "forbid"}, "for a text; allowed: up to 1e300"


@pytest.mark.parametrize(
    ("potential", "asked", "status", "told"),
    [
        (Broken(), named(LARGE, exponent=1e30), 500, MOST),
        (Broken(), named(LARGE, LARGE), 500, MOST),
        (Broken(), named(LARGE), 500, MOST),
        (Broken(), named(FORBID, LARGE, exponent=1e30), 500, ""),  # 0 * inf has no value
        (Broken(), named(FORBID, {"does": "nothing"}), 400, ""),
        (Picky(), named({}), 500, "SystemExit: 3"),  # accepted where the request came in
    ],
)
def test_what_has_no_value_ends_its_request_alone(
    potential: Potential, asked: dict[str, Any], status: int, told: str
) -> None:
    """phi that floats do not hold is infinite, not HTTP 400, as if all texts were forbidden."""
    req, plain = play(potential, asked, {})
    assert told in req.to_finish.message
    assert req.to_finish.status_code == status and plain.to_finish is None
    assert status == 500 or req.smc_state.counters[-1] <= 0.0
    assert not math.isnan(req.smc_state.counters[-1])


# The potentials that come with the package.


class NoX(Potential):
    prefix_is_complete = True

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return [-math.inf if "x" in text.output else 0.0 for text in texts]

    prefix = complete


def check(
    potential: Potential, texts: Sequence[Text], complete: list[float], prefix: list[float]
) -> None:
    assert potential.complete(texts) == complete
    assert potential.prefix(texts) == prefix
    assert not any(result.failed for result in check_potential(potential, texts))


def test_a_length_costs_what_is_missing_and_what_is_too_much() -> None:
    """Red where a beginning pays for what can still come, or a whole text does not."""
    args = Length.Args(per_token=0.5, target=4)
    check(Length(), [text("ab", args), text("abcdef", args)], [-1.0, -1.0], [0.0, -1.0])


def test_matches_of_the_operators_pattern_count() -> None:
    """Red where matches overlap, or the prompt counts; or with `re`, by a search without end."""
    potential = RegexCount("a+b")
    texts = [text("aabab", potential.Args(-2.0)), text("ba", potential.Args(3.0))]
    check(potential, texts, [-4.0, 0.0], [-4.0, 0.0])
    potential = RegexCount("(a|aa|a?a)+$", seconds=0.01)
    with pytest.raises(TimeoutError):
        potential.complete([text("a" * 60 + "b", potential.Args(1.0))])


def test_a_product_adds_logarithms_has_its_parts_arguments_and_opens_them() -> None:
    """Red where a part gets another's arguments, is left out of the sum, or is never opened."""
    both = product(count=RegexCount("a"), length=Length(), clean=NoX())
    args = msgspec.convert({"count": {"weight": 3.0}, "length": {"per_token": 0.5}}, both.Args)
    sums = [6.0 - 1.5, -math.inf]
    check(both, [text("aab", args), text("aax", args)], sums, sums)
    assert not both.prefix_is_complete, "that of a length is not"
    potential = exponent(product(one=NoX(), other=NoX()), 2.0)
    with mock.patch.object(NoX, "open") as opened:
        potential.open()
    assert opened.call_count == 2 and potential.prefix_is_complete


ONE = {"per_token": 1.0}
WEIGHT = {"weight": 1.0}


@pytest.mark.parametrize(
    ("potential", "wrong"),
    [
        (Length(), ({}, {"per_token": -1.0}, {**ONE, "target": -1}, {**ONE, "x": 1})),
        (
            product(count=RegexCount("a"), clean=NoX()),
            ({}, {"count": {}}, {"count": WEIGHT, "other": {}}, WEIGHT),
        ),
    ],
)
def test_arguments_are_checked(potential: Potential, wrong: tuple[dict[str, Any], ...]) -> None:
    """Red where a part's schema is not asked, or takes what makes nonsense."""
    for args in wrong:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(args, potential.Args)


def test_a_power_of_nothing_is_no_number_less() -> None:
    """Red where 0 * -inf is NaN: a potential to the power 0 is 1."""
    texts = [text("a"), text("x")]
    assert exponent(NoX(), 0.0).complete(texts) == [0.0, 0.0]
    assert exponent(NoX(), 2.0).complete(texts) == [0.0, -math.inf]
    halved = exponent(RegexCount("a"), 0.5)
    assert halved.prefix([text("aa", halved.Args(3.0))]) == [3.0]
    for alpha in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="allowed: a finite number"):
            exponent(NoX(), alpha)
    with pytest.raises(ValueError, match="no parts"):
        product()


# A reward model's server is a transport here; engine/test_pair.py asks SGLang's own.

URL = "http://localhost:1"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    server = mock.Mock()
    client = partial(httpx.Client, transport=httpx.MockTransport(server))
    monkeypatch.setattr(httpx, "Client", client)
    return server


def asked(endpoint: mock.Mock) -> tuple[str, Any, str | None]:
    """Return the address, the body and the key of its one POST."""
    endpoint.assert_called_once()
    (request,) = endpoint.call_args.args
    return str(request.url), json.loads(request.content), request.headers.get("Authorization")


TEXTS = [text("2", prompt="1+1="), text("4", prompt="1+2=")]


def embeddings(*rows: list[float]) -> httpx.Response:
    return httpx.Response(200, json=[{"embedding": row, "meta_info": {}} for row in rows])


def test_all_texts_go_in_one_post(endpoint: mock.Mock) -> None:
    """Red where texts are asked one by one, the template is not used, or values change places."""
    endpoint.return_value = embeddings([0.5], [-2.0])
    potential = Http(URL + "/", template="Q: {prompt} A: {output}", scale=2.0)
    potential.open()
    assert potential.complete([]) == [], "SGLang would refuse an empty list"
    assert potential.prefix(TEXTS) == [1.0, -4.0]
    body = {"text": ["Q: 1+1= A: 2", "Q: 1+2= A: 4"]}
    assert asked(endpoint) == (f"{URL}/classify", body, None)


def test_whole_texts_may_have_a_mark(endpoint: mock.Mock) -> None:
    """Red where `complete` sends what `prefix` does, or claims that both are the same."""
    endpoint.return_value = embeddings([0.0], [0.0])
    potential = Http(URL, whole_template="{prompt}{output}<end>")
    potential.complete(TEXTS)
    assert asked(endpoint)[1] == {"text": ["1+1=2<end>", "1+2=4<end>"]}
    assert not potential.prefix_is_complete
    assert Http(URL).prefix_is_complete


@pytest.mark.parametrize(
    ("as_log", "label", "numbers", "expected"),
    [
        ("value", 1, [3.0, -1.0], -1.0),
        ("sigmoid", 0, [3.0, -1.0], -math.log1p(math.exp(-3.0))),
        ("softmax", 1, [3.0, -1.0], -1.0 - math.log(math.exp(3.0) + math.exp(-1.0))),
        ("sigmoid", 0, [-1000.0, 1000.0], -1000.0),  # exp(1000) is no number
        ("softmax", 0, [-1000.0, 1000.0], -2000.0),
    ],
)
def test_numbers_become_logarithms(
    endpoint: mock.Mock, as_log: str, label: int, numbers: list[float], expected: float
) -> None:
    endpoint.return_value = embeddings(numbers)
    found = Http(URL, as_log=as_log, label=label).complete(TEXTS[:1])
    assert found == pytest.approx([expected], abs=1e-12)


def test_shares_of_the_other_route(endpoint: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordered by `index`, with the key that the environment holds; a share of 0 is no error."""
    monkeypatch.setenv("PRM_KEY", "secret")
    shares = [{"index": 1, "probs": [1.0, 0.0]}, {"index": 0, "probs": [0.75, 0.25]}]
    endpoint.return_value = httpx.Response(200, json={"data": shares})
    other = {"route": "/v1/classify", "as_log": "log", "model": "prm"}
    potential = Http(URL, label=1, api_key_variable="PRM_KEY", **other)
    assert potential.complete(TEXTS) == [math.log(0.25), -math.inf]
    body = {"input": ["1+1=2", "1+2=4"], "model": "prm"}
    assert asked(endpoint) == (f"{URL}/v1/classify", body, "Bearer secret")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (httpx.Response(200, text="no JSON"), "what is not read here: no JSON"),
        (httpx.Response(200, json={"error": "x"}), "what is not read here"),
        (httpx.Response(200, json=[{"embedding": None}]), "what is not read here"),
        (embeddings([1.0, 1.0], [1.0, 1.0]), "2 answers for 1 texts"),
        (embeddings([]), "0 numbers of a text"),
        (embeddings([1.0]), "needs 2"),  # softmax of one number is always 1
        (httpx.Response(400, text="no embedding"), "/classify answered with HTTP 400: no .*--is-"),
        (httpx.ReadTimeout("late"), r"within 0\.5 s"),
        (httpx.ConnectError("refused"), f"{URL}/classify cannot be reached: refused"),
    ],
)
def test_an_endpoint_that_gives_no_values_is_told(
    endpoint: mock.Mock, answer: Any, expected: str
) -> None:
    endpoint.side_effect = [answer]
    with pytest.raises(EndpointError, match=expected):
        Http(URL, as_log="softmax", timeout=0.5).complete(TEXTS[:1])
    assert endpoint.call_args.args[0].extensions["timeout"]["read"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"url": "localhost:1"}, "url="),
        ({"route": "/v1/score"}, "route="),
        ({"as_log": "log"}, "as_log="),
        ({"route": "/v1/classify"}, "as_log="),
        ({"label": -1}, "label="),
        ({"scale": 0.0}, "scale="),
        ({"template": "{prompt}"}, "template"),
        ({"template": "{prompt"}, "template"),
        ({"whole_template": "{answer}{output}"}, "template"),
        ({"api_key_variable": "NOT_THERE_AT_ALL"}, "api_key_variable="),
    ],
)
def test_arguments_are_checked_as_a_server_starts(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Http(**{"url": URL, **arguments})
