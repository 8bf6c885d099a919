"""Routes and methods of `sgl.Engine` answer as those of a server without speculation.

Each that docs/support.md names is called here, at temperature 0 or for a prompt's own values, where
answers are equal. What is drawn, and how long it takes, is tested elsewhere.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Server, running_server
from routed import MESSAGES, PROMPT, QUESTION, parts_of
from tiny_models import smc_arguments

from server.kinds import LOGPROBS
from server.kinds import PROMPT as IDS

PAGE = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
NEAR = 2e-4
#: Times and names of one answer, what the cache held, and what speculation has beside its answers.
OWN = re.compile(
    "id|response_id|created|created_at|completed_at|.*_ts|.*time|.*latency|.*duration|.*_wait"
    "|.*throughput|spec_.*|cached_tokens.*|prompt_tokens_details|input_tokens_details"
    "|cache_read_input_tokens"
)

Request = tuple[str, dict[str, Any]]  # a route, and what is posted to it
GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
PROMPTS = [IDS, [*IDS, 9], [5]]
SCORED = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, **LOGPROBS}
DRAWN = {"sampling_params": GREEDY, **LOGPROBS}
CHAT = {"model": "default", "messages": MESSAGES, "max_tokens": 24, "temperature": 0.0}
SHOWN = {"logprobs": True, "top_logprobs": 3}
COMPLETION = {"model": "default", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.0}
OLLAMA = {"model": "default", "stream": False, "options": {"num_predict": 24, "temperature": 0.0}}
STREAM = {"stream": True}
KINDS = ("token", "top", "token_ids")  # of lists with an entry for each token
ITEMS = {"model": "default", "label_token_ids": [20, 21]}
YES_NO = {"id": "a", "type": "yes_no", "question": "Is it?"}
QUESTIONS = [
    YES_NO,
    {"id": "b", "type": "choice", "question": "Which?", "options": [{"name": "x"}, {"name": "y"}]},
    {"id": "c", "type": "score", "question": "How?", "levels": ["low", "high"]},
]
NOUL = {"w": {"type": "noul", "instructions": "Is it?"}}
TOOL_TEXT = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

REQUESTS: dict[str, Request] = {
    "scoring": ("/generate", SCORED),
    "scoring by text": ("/generate", {**SCORED, "input_ids": None, "text": QUESTION}),
    "scoring at a temperature": (
        "/generate",
        {**SCORED, "sampling_params": {"max_new_tokens": 0, "temperature": 0.5}},
    ),
    "scoring with a prompt's own": ("/generate", {**SCORED, "logprob_start_len": 0}),
    "scoring of the listed": (
        "/generate",
        {**SCORED, "top_logprobs_num": 0, "return_text_in_logprobs": True},
    ),
    "scoring of the likeliest": ("/generate", {**SCORED, "token_ids_logprob": None}),
    "scoring of a list": ("/generate", {**SCORED, "input_ids": PROMPTS}),
    "scoring twice": ("/generate", {**SCORED, "sampling_params": {"max_new_tokens": 0, "n": 2}}),
    "scoring in a stream": ("/generate", {**SCORED, **STREAM}),
    "scoring of a list in a stream": ("/generate", {**SCORED, "input_ids": PROMPTS, **STREAM}),
    "no log-probabilities": ("/generate", {**SCORED, "return_logprob": False}),
    "generation": ("/generate", {"input_ids": IDS, **DRAWN}),
    "generation of a list": ("/generate", {"input_ids": PROMPTS, **DRAWN}),
    "items": ("/v1/score", {**ITEMS, "query": "a", "items": ["1"], "apply_softmax": True}),
    "items, not scaled": (
        "/v1/score",
        {**ITEMS, "query": "a", "items": ["1", "b"], "return_token_logprobs": True},
    ),
    "items in ids": (
        "/v1/score",
        {
            "query": [5, 6],
            "items": [[7], [8, 9]],
            "label_token_ids": [[20, 21], [30, 31]],
            "apply_softmax": True,
            "temperature": 0.5,
        },
    ),
    "decisions": ("/v1/decisions", {"input": QUESTION, "questions": QUESTIONS}),
    "system one": ("/v1/systemone", {"model": "x", "state": QUESTION, "questions": NOUL}),
    "a reranker": ("/v1/rerank", {"query": QUESTION, "documents": ["Paris", "Bonn"]}),
    "chat": ("/v1/chat/completions", {**CHAT, **SHOWN}),
    "chat without a token": ("/v1/chat/completions", {**CHAT, **SHOWN, "max_tokens": 0}),
    "chat as SageMaker's": ("/invocations", CHAT),
    "completion": ("/v1/completions", {**COMPLETION, "logprobs": 3, "echo": True}),
    "completions": ("/v1/completions", {**COMPLETION, "prompt": [PROMPT, QUESTION]}),
    "response": (
        "/v1/responses",
        {
            "model": "default",
            "input": QUESTION,
            "max_output_tokens": 24,
            "temperature": 0.0,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
            "store": False,
        },
    ),
    "messages": ("/v1/messages", CHAT),
    "count": ("/v1/messages/count_tokens", {"model": "default", "messages": MESSAGES}),
    "chat as Ollama's": ("/api/chat", {**OLLAMA, "messages": MESSAGES}),
    "generation as Ollama's": ("/api/generate", {**OLLAMA, "prompt": PROMPT}),
    "generation as Vertex AI's": (
        "/vertex_generate",
        {"instances": [{"text": PROMPT}], "parameters": {"sampling_params": GREEDY}},
    ),
    "tokens": ("/tokenize", {"model": "default", "prompt": QUESTION}),
    "texts": ("/detokenize", {"model": "default", "tokens": IDS}),
    "calls": ("/parse_function_call", {"text": TOOL_TEXT, "tools": [TOOL]}),
    "thoughts": (
        "/separate_reasoning",
        {"text": "<think>a</think>b", "reasoning_parser": "qwen3"},
    ),
}
REQUESTS["calls"][1]["tool_call_parser"] = "hermes"
#: What a model that generates has no answer for.
REFUSED: dict[str, Request] = {
    "embedding": ("/encode", {"text": QUESTION}),
    "embeddings": ("/v1/embeddings", {"model": "default", "input": QUESTION}),
    "class": ("/classify", {"text": QUESTION}),
    "classes": ("/v1/classify", {"model": "default", "input": QUESTION}),
    "items within one text": (
        "/v1/score",
        {**ITEMS, "query": "a", "items": ["1"], "score_extraction_token": "1"},
    ),
}
READ = ("/health", "/model_info", "/server_info", "/v1/models")
IN_SESSIONS = ("/open_session", "/close_session")
METHODS = {
    "generate",
    "async_generate",
    "score",
    "async_score",
    "open_session",
    "close_session",
    "flush_cache",
    "get_model_info",
    "get_server_info",
}


@pytest.fixture(scope="module")
def stock(
    server: Server, spelling: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The shared server's target, without speculation."""
    arguments: dict[str, Any] = {
        "model_path": spelling[0],
        "api_key": server.key,
        "context_length": 512,
        "max_total_tokens": 20_000,
        "enable_cache_report": True,
        "enable_priority_scheduling": True,
        "tool_call_parser": "hermes",
    }
    with running_server(tmp_path_factory.mktemp("stock"), **arguments) as running:
        yield running


def shown(answer: Any) -> Any:
    """An answer without what is its own, and with the ids of models and requests alike."""
    if isinstance(answer, dict):
        return {name: shown(of) for name, of in answer.items() if not OWN.fullmatch(name)}
    if isinstance(answer, (list, tuple)):
        return [shown(of) for of in answer]
    return answer


def assert_same(own: Any, stock: Any, where: str) -> None:
    """The same fields, and values but for rounding."""
    if isinstance(stock, dict):
        assert isinstance(own, dict) and own.keys() == stock.keys(), where
        for name, value in stock.items():
            assert_same(own[name], value, f"{where}.{name}")
    elif isinstance(stock, list):
        assert isinstance(own, list) and len(own) == len(stock), (where, own, stock)
        for place, value in enumerate(stock):
            assert_same(own[place], value, f"{where}[{place}]")
    elif isinstance(stock, float):
        assert own == pytest.approx(stock, abs=NEAR), where
    else:
        assert own == stock, where


def answers(server: Server, route: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status, and what is answered; of a stream its last chunks, in the prompts' order."""
    found = server.post(route, **body)
    if not body.get("stream"):
        return found.status_code, shown(found.json())
    last = {chunk.get("index", 0): chunk for chunk in parts_of(found.text)}
    return found.status_code, shown([last[index] for index in sorted(last)])


@pytest.mark.parametrize("name", [*REQUESTS, *REFUSED])
def test_a_route_answers_as_without_speculation(
    server: Server, stock: Server, model: str, name: str
) -> None:
    """Red if one fails, lacks a field, or has another value in it."""
    route, body = (REQUESTS | REFUSED)[name]
    if "model" in body:
        body = {**body, "model": model}
    (status, own), (wanted, known) = answers(server, route, body), answers(stock, route, body)
    assert (status, wanted) == ((400, 400) if name in REFUSED else (200, 200)), (own, known)
    assert_same(own, known, name)


def test_scoring_beside_generation_has_no_value_of_its_own(server: Server, stock: Server) -> None:
    """Stock SGLang has one in such a batch: of a token that it draws and does not return."""
    sizes = [{"max_new_tokens": size, "temperature": 0.0} for size in (0, 3)]
    body = {**LOGPROBS, "input_ids": [IDS, IDS], "sampling_params": sizes}
    (_, own), (_, known) = answers(server, "/generate", body), answers(stock, "/generate", body)
    known[0]["meta_info"] |= {"output_token_logprobs": [], "output_token_logprobs_length": 0}
    assert_same(own, known, "beside")


@pytest.mark.parametrize("route", READ)
def test_what_is_read_has_all_fields(server: Server, stock: Server, route: str) -> None:
    own, known = (one.get(route) for one in (server, stock))
    assert own.status_code == known.status_code == 200
    if known.content and isinstance(known.json(), dict):
        assert own.json().keys() >= known.json().keys()


def test_all_that_the_page_names_is_called() -> None:
    section = PAGE.partition("**Routes")[2].partition("\n\n")[0]
    routes = {route for route, _ in (REQUESTS | REFUSED).values()}
    named = set(re.findall(r"`(/[^`]+)`", section))
    assert named == routes | set(READ) | set(IN_SESSIONS)
    assert set(re.findall(r"`Engine\.(\w+)`", section)) == METHODS


@pytest.fixture(scope="module")
def called(engine: Callable[..., Any], spelling: tuple[str, str]) -> Any:
    """An engine of the pair, without a server."""
    sizes = {"num_particles": 4, "num_steps": 4, "max_lag": 32}
    room = {"context_length": 512, "max_total_tokens": 20_000}
    return engine(**smc_arguments(*spelling, **sizes, **room), incremental_streaming_output=True)


def joined(chunks: list[dict[str, Any]]) -> Any:
    """The whole answer of incremental chunks, each of which has an entry for each of its tokens."""
    lists = [f"output_{kind}_logprobs" for kind in KINDS]
    whole = {**chunks[-1], "meta_info": dict(chunks[-1]["meta_info"])}
    for name in lists:
        parts = [chunk["meta_info"][name] for chunk in chunks]
        sizes = [len(chunk["output_ids"]) for chunk in chunks]
        assert [len(part) for part in parts] == sizes or sizes == [0]
        whole["meta_info"][name] = [entry for part in parts for entry in part]
    whole["output_ids"] = [token for chunk in chunks for token in chunk["output_ids"]]
    return shown({**whole, "text": "".join(chunk["text"] for chunk in chunks)})


def test_methods_of_an_engine_answer_as_routes_without_speculation(
    called: Any, stock: Server
) -> None:
    for body in (SCORED, {"input_ids": IDS, **DRAWN}, {"input_ids": PROMPTS, **DRAWN}):
        known = answers(stock, "/generate", body)[1]
        assert_same(shown(called.generate(**body)), known, "generate")
        chunks = list(called.generate(**{**body, "input_ids": IDS}, stream=True))
        assert_same(joined(chunks), known[0] if isinstance(known, list) else known, "streamed")
        later = called.loop.run_until_complete(called.async_generate(**body))
        assert_same(shown(later), known, "async_generate")
    for name in ("items", "items, not scaled", "items in ids"):
        route, body = REQUESTS[name]
        known = answers(stock, route, body)[1]
        asked = {key: value for key, value in body.items() if key != "model"}
        later = called.loop.run_until_complete(called.async_score(**asked))
        for found in (called.score(**asked), later):
            assert_same(found.scores, known["scores"], name)
            assert_same(found.token_logprobs, known["token_logprobs"], name)
            assert found.prompt_tokens == known["usage"]["prompt_tokens"]
    with pytest.raises(ValueError, match="embedding"):
        called.encode(QUESTION)


def test_an_item_of_an_engines_list_fails_alone(called: Any) -> None:
    """Its grammar ends before it may; where all fail the call raises, as it does of one."""
    fails = {**GREEDY, "regex": "abc", "min_new_tokens": 20}
    failed, whole = called.generate(input_ids=[IDS, IDS], sampling_params=[fails, GREEDY])
    alone = called.generate(input_ids=IDS, sampling_params=GREEDY)
    assert shown(whole) == shown(alone)
    assert "admits no text here" in failed["meta_info"]["finish_reason"]["message"]
    for ids in (IDS, [IDS, IDS]):
        with pytest.raises(ValueError, match="admits no text here"):
            called.generate(input_ids=ids, sampling_params=fails)


def test_sessions_of_an_engine_and_of_routes_go_on(called: Any, stock: Server) -> None:
    """Two turns, the second behind the first."""
    opened = stock.post("/open_session", capacity_of_str_len=1000).json()
    own = called.open_session(capacity_of_str_len=1000)
    last: list[Any] = [None, None]
    for turn in (IDS, [9, 33]):
        body = {"input_ids": turn, "sampling_params": GREEDY}
        known = stock.post("/generate", **body, session_params={"id": opened, "rid": last[0]})
        found = called.generate(**body, session_params={"id": own, "rid": last[1]})
        assert_same(shown(found), shown(known.json()), "a turn")
        last = [one["meta_info"]["id"] for one in (known.json(), found)]
    assert stock.post("/close_session", session_id=opened).status_code == 200
    called.close_session(own)
    assert called.flush_cache().success
    wanted, told = stock.get("/model_info").json(), called.get_model_info()
    assert all(told[name] == wanted[name] for name in ("model_path", "is_generation"))
    assert called.get_server_info().keys() >= {"internal_states", "version"}


def test_a_stream_has_an_entry_for_each_token(server: Server) -> None:
    """Of each list, whatever the chunks: red if some are sent again, or left out."""
    body = {"input_ids": IDS, **LOGPROBS, "sampling_params": {**GREEDY, "n": 2}}
    for chunk in parts_of(server.post("/generate", **body, **STREAM).text):
        info, ids = chunk["meta_info"], chunk["output_ids"]
        own, top, listed = (
            info[f"output_{kind}_logprobs"] for kind in ("token", "top", "token_ids")
        )
        assert [entry[1] for entry in own] == ids and len(top) == len(listed) == len(ids)
    for tools in ({}, {"tools": [TOOL]}):
        counts = {0: 0, 1: 0}
        asked = {**CHAT, **SHOWN, **STREAM, **tools, "n": 2, "max_tokens": 40}
        for part in parts_of(server.post("/v1/chat/completions", **asked).text):
            for choice in part["choices"]:
                counts[choice["index"]] += len((choice["logprobs"] or {"content": ()})["content"])
        assert set(counts.values()) == {40}, json.dumps(counts)
