"""The potential that asks a reward model's server, against a transport that answers as told.

tests/engine/test_reward.py asks SGLang's own.
"""

import json
import math
from functools import partial
from typing import Any

import httpx
import pytest
from steered import text

from sglang_smc.potentials.library import EndpointError, Http

URL = "http://localhost:1"


class Endpoint:
    """Answers each POST with `answer`, text or JSON, or raises it, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = []
        self.status = 200
        self.asked: list[tuple[str, Any, str | None]] = []
        self.timeout: float | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        key = request.headers.get("Authorization")
        self.asked.append((str(request.url), json.loads(request.content), key))
        self.timeout = request.extensions["timeout"]["read"]
        if isinstance(self.answer, httpx.HTTPError):
            raise self.answer
        sent = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        return httpx.Response(self.status, text=sent)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    server = Endpoint()
    client = partial(httpx.Client, transport=httpx.MockTransport(server))
    monkeypatch.setattr(httpx, "Client", client)
    return server


TEXTS = [text("2", prompt="1+1="), text("4", prompt="1+2=")]


def embeddings(*rows: list[float]) -> list[dict[str, Any]]:
    return [{"embedding": row, "meta_info": {}} for row in rows]


def test_all_texts_go_in_one_post(endpoint: Endpoint) -> None:
    """Red where texts are asked one by one, the template is not used, or values change places."""
    endpoint.answer = embeddings([0.5], [-2.0])
    potential = Http(URL + "/", template="Q: {prompt} A: {output}", scale=2.0)
    potential.open()
    assert potential.complete([]) == [], "SGLang would refuse an empty list"
    assert potential.prefix(TEXTS) == [1.0, -4.0]
    assert endpoint.asked == [(f"{URL}/classify", {"text": ["Q: 1+1= A: 2", "Q: 1+2= A: 4"]}, None)]


def test_whole_texts_may_have_a_mark(endpoint: Endpoint) -> None:
    """Red where `complete` sends what `prefix` does, or claims that both are the same."""
    endpoint.answer = embeddings([0.0], [0.0])
    potential = Http(URL, whole_template="{prompt}{output}<end>")
    potential.complete(TEXTS)
    assert endpoint.asked[0][1] == {"text": ["1+1=2<end>", "1+2=4<end>"]}
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
    endpoint: Endpoint, as_log: str, label: int, numbers: list[float], expected: float
) -> None:
    endpoint.answer = embeddings(numbers)
    found = Http(URL, as_log=as_log, label=label).complete(TEXTS[:1])
    assert found == pytest.approx([expected], abs=1e-12)


def test_shares_of_the_other_route(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordered by `index`, with the key that the environment holds; a share of 0 is no error."""
    monkeypatch.setenv("PRM_KEY", "secret")
    endpoint.answer = {
        "data": [{"index": 1, "probs": [1.0, 0.0]}, {"index": 0, "probs": [0.75, 0.25]}]
    }
    other = {"route": "/v1/classify", "as_log": "log", "model": "prm"}
    potential = Http(URL, label=1, api_key_variable="PRM_KEY", **other)
    assert potential.complete(TEXTS) == [math.log(0.25), -math.inf]
    body = {"input": ["1+1=2", "1+2=4"], "model": "prm"}
    assert endpoint.asked == [(f"{URL}/v1/classify", body, "Bearer secret")]


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (200, "no JSON", "what is not read here: no JSON"),
        (200, {"error": "x"}, "what is not read here"),
        (200, [{"embedding": None}], "what is not read here"),
        (200, embeddings([1.0, 1.0], [1.0, 1.0]), "2 answers for 1 texts"),
        (200, embeddings([]), "0 numbers of a text"),
        (200, embeddings([1.0]), "needs 2"),  # softmax of one number is always 1
        (400, "not an embedding model", r"/classify answered with HTTP 400: not an emb.*--is-"),
        (200, httpx.ReadTimeout("late"), r"within 0\.5 s"),
        (200, httpx.ConnectError("refused"), f"{URL}/classify cannot be reached: refused"),
    ],
)
def test_an_endpoint_that_gives_no_values_is_told(
    endpoint: Endpoint, status: int, answer: Any, expected: str
) -> None:
    endpoint.status, endpoint.answer = status, answer
    with pytest.raises(EndpointError, match=expected):
        Http(URL, as_log="softmax", timeout=0.5).complete(TEXTS[:1])
    assert endpoint.timeout == 0.5


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
def test_arguments_are_checked_as_the_server_starts(
    arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        Http(**{"url": URL, **arguments})
