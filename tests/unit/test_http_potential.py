"""The potential that asks a reward model's server, against a server that answers as told.

tests/engine/test_reward.py asks SGLang's own.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from sglang_smc.potentials import Text
from sglang_smc.potentials.http import EndpointError, Http


class Endpoint(ThreadingHTTPServer):
    """Answers each POST with `answer`, which may be text, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Any = []
        self.status, self.delay = 200, 0.0
        self.asked: list[tuple[str, Any, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        time.sleep(self.server.delay)
        found = self.server.answer
        sent = (found if isinstance(found, str) else json.dumps(found)).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # of who did not wait
            self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        """Nothing is to be told."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def text(prompt: str, output: str) -> Text:
    both = [[ord(c) for c in part] for part in (prompt, output)]
    return Text(*both, None, lambda ids: "".join(map(chr, ids)))


TEXTS = [text("1+1=", "2"), text("1+2=", "4")]


def embeddings(*rows: list[float]) -> list[dict[str, Any]]:
    return [{"embedding": row, "meta_info": {}} for row in rows]


def test_all_texts_go_in_one_post(endpoint: Endpoint) -> None:
    """Red where texts are asked one by one, the template is not used, or values change places."""
    endpoint.answer = embeddings([0.5], [-2.0])
    potential = Http(endpoint.url + "/", template="Q: {prompt} A: {output}", scale=2.0)
    potential.open()
    assert potential.prefix(TEXTS) == [1.0, -4.0]
    assert endpoint.asked == [("/classify", {"text": ["Q: 1+1= A: 2", "Q: 1+2= A: 4"]}, None)]


def test_whole_texts_may_have_a_mark(endpoint: Endpoint) -> None:
    """Red where `complete` sends what `prefix` does, or claims that both are the same."""
    endpoint.answer = embeddings([0.0], [0.0])
    potential = Http(endpoint.url, whole_template="{prompt}{output}<end>")
    potential.complete(TEXTS)
    assert endpoint.asked[0][1] == {"text": ["1+1=2<end>", "1+2=4<end>"]}
    assert not potential.prefix_is_complete
    assert Http(endpoint.url).prefix_is_complete


@pytest.mark.parametrize(
    ("as_log", "label", "expected"),
    [
        ("value", 1, -1.0),
        ("sigmoid", 0, -math.log1p(math.exp(-3.0))),
        ("softmax", 1, -1.0 - math.log(math.exp(3.0) + math.exp(-1.0))),
    ],
)
def test_numbers_become_logarithms(
    endpoint: Endpoint, as_log: str, label: int, expected: float
) -> None:
    """Red where a map is another's, or the label is not the one asked for."""
    endpoint.answer = embeddings([3.0, -1.0])
    found = Http(endpoint.url, as_log=as_log, label=label).complete(TEXTS[:1])
    assert found == pytest.approx([expected], abs=1e-12)


def test_large_numbers_do_not_overflow(endpoint: Endpoint) -> None:
    """Red where exp(1000) is computed."""
    endpoint.answer = embeddings([-1000.0, 1000.0])
    assert Http(endpoint.url, as_log="sigmoid").complete(TEXTS[:1]) == [-1000.0]
    assert Http(endpoint.url, as_log="softmax").complete(TEXTS[:1]) == [-2000.0]


def test_shares_of_the_other_route(endpoint: Endpoint) -> None:
    """Red where the order is not by `index`, or a share of 0 is an error."""
    endpoint.answer = {
        "data": [{"index": 1, "probs": [1.0, 0.0]}, {"index": 0, "probs": [0.75, 0.25]}]
    }
    potential = Http(endpoint.url, route="/v1/classify", as_log="log", label=1, model="prm")
    assert potential.complete(TEXTS) == [math.log(0.25), -math.inf]
    assert endpoint.asked[0][:2] == (
        "/v1/classify",
        {"input": ["1+1=2", "1+2=4"], "model": "prm"},
    )


def test_the_key_comes_from_the_environment(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where a key would have to stand in the command line."""
    monkeypatch.setenv("PRM_KEY", "secret")
    endpoint.answer = embeddings([0.0])
    Http(endpoint.url, api_key_variable="PRM_KEY").complete(TEXTS[:1])
    assert endpoint.asked[0][2] == "Bearer secret"


def test_nothing_is_asked_about_no_texts(endpoint: Endpoint) -> None:
    """Red where SGLang would refuse an empty list."""
    assert Http(endpoint.url).complete([]) == []
    assert endpoint.asked == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("no JSON", "what is not read here: no JSON"),
        ({"error": "x"}, "what is not read here"),
        ([{"embedding": None}], "what is not read here"),
        (embeddings([1.0], [1.0]), "2 answers for 1 texts"),
        (embeddings([]), "0 numbers of a text"),
    ],
)
def test_answers_of_another_form(endpoint: Endpoint, answer: Any, expected: str) -> None:
    """Red where a KeyError of ours is all that an operator would see."""
    endpoint.answer = answer
    with pytest.raises(EndpointError, match=expected):
        Http(endpoint.url).complete(TEXTS[:1])


def test_one_label_has_no_share(endpoint: Endpoint) -> None:
    """Red where softmax of one number, always 1, passes for a judgement."""
    endpoint.answer = embeddings([1.0])
    with pytest.raises(EndpointError, match="needs 2"):
        Http(endpoint.url, as_log="softmax").complete(TEXTS[:1])


def test_an_error_of_the_server_is_told(endpoint: Endpoint) -> None:
    """Red where status, address or what it said is left out."""
    endpoint.status, endpoint.answer = 400, "not an embedding model"
    with pytest.raises(EndpointError, match=r"/classify answered with HTTP 400: not an emb.*--is-"):
        Http(endpoint.url).complete(TEXTS[:1])


def test_a_slow_server_is_not_waited_for(endpoint: Endpoint) -> None:
    """Red where the timeout is not passed on."""
    endpoint.delay = 0.5
    with pytest.raises(EndpointError, match=r"within 0\.05 s"):
        Http(endpoint.url, timeout=0.05).complete(TEXTS[:1])


def test_a_server_that_is_not_there() -> None:
    """Red where httpx's error comes through."""
    with pytest.raises(EndpointError, match=r"http://127\.0\.0\.1:9/classify cannot be reached"):
        Http("http://127.0.0.1:9").complete(TEXTS[:1])


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
    """Red where the first request would find out."""
    with pytest.raises(ValueError, match=expected):
        Http(**{"url": "http://localhost:1", **arguments})
