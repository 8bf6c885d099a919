"""Structured output as chat clients ask for it: response_format and tools."""

import json

import openai
import pytest
from http_server import Server
from spelling import PERSON, is_person

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
TOOL = {"type": "function", "function": {"name": "register", "parameters": PERSON}}
MODES = ("smc", "exact")


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def arguments(mode: str) -> dict:
    choice = {"smc": {"mode": mode}}
    return {
        "model": "default",
        "messages": MESSAGES,
        "max_tokens": 300,
        "temperature": 0.7,
        "seed": 3,
        "extra_body": {"custom_params": choice},
    }


@pytest.mark.parametrize("mode", MODES)
def test_response_format_whole_and_streamed(client: openai.OpenAI, mode: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    asked = {**arguments(mode), "response_format": wanted}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    assert is_person(whole.message.content or "")
    chunks = client.chat.completions.create(**asked, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(parts) == whole.message.content


@pytest.mark.parametrize("mode", MODES)
def test_a_tool_that_must_be_called_is(client: openai.OpenAI, mode: str) -> None:
    wanted = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(**arguments(mode), **wanted).choices[0]
    assert answer.finish_reason == "tool_calls"
    for call in answer.message.tool_calls or []:
        assert call.function.name == "register"
        assert is_person(call.function.arguments)
    assert answer.message.tool_calls


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "("}, "Failed to compile regex grammar"),
        ({"regex": "\0"}, "NUL"),
        ({"ebnf": 'root ::= a\na ::= a "x"'}, "admits no text"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "Only one of"),
    ],
)
def test_what_no_text_can_follow_is_http_400(server: Server, asked: dict, message: str) -> None:
    body = {"text": "2 + 3", "sampling_params": {"max_new_tokens": 8, **asked}}
    answer = server.post("/generate", **body)
    assert answer.status_code == 400 and message in answer.text
    assert json.loads(server.post("/generate", text="2 + 3").text)["text"]
