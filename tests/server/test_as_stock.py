"""Routes answer as those of a server without speculation.

Each that docs/support.md names is called here, at temperature 0 or for a prompt's own values, where
answers are equal. What is drawn, and how long it takes, is tested elsewhere.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Server, running_server
from routed import MESSAGES, PROMPT, QUESTION, parts_of
from same_answers import LISTS, assert_same, shown

from server.kinds import LOGPROBS
from server.kinds import PROMPT as IDS

PAGE = (Path(__file__).parents[2] / "docs" / "support.md").read_text()

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
    status, own = answers(server, route, body)
    wanted, known = answers(stock, route, body)
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


def test_a_stream_has_an_entry_for_each_token(server: Server) -> None:
    """Of each list, whatever the chunks: red if some are sent again, or left out."""
    body = {"input_ids": IDS, **LOGPROBS, "sampling_params": {**GREEDY, "n": 2}}
    for chunk in parts_of(server.post("/generate", **body, **STREAM).text):
        info = chunk["meta_info"]
        ids = chunk["output_ids"]
        own, top, listed = (info[name] for name in LISTS)
        assert [entry[1] for entry in own] == ids and len(top) == len(listed) == len(ids)
    for tools in ({}, {"tools": [TOOL]}):
        counts = {0: 0, 1: 0}
        asked = {**CHAT, **SHOWN, **STREAM, **tools, "n": 2, "max_tokens": 40}
        for part in parts_of(server.post("/v1/chat/completions", **asked).text):
            for choice in part["choices"]:
                counts[choice["index"]] += len((choice["logprobs"] or {"content": ()})["content"])
        assert set(counts.values()) == {40}, json.dumps(counts)
