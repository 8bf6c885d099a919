"""A tool that must be called, as chat clients ask for it."""

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
def test_a_tool_that_must_be_called_is(client: openai.OpenAI, mode: str) -> None:
    wanted = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(**arguments(mode), **wanted).choices[0]
    assert answer.finish_reason == "tool_calls"
    for call in answer.message.tool_calls or []:
        assert call.function.name == "register"
        assert is_person(call.function.arguments)
    assert answer.message.tool_calls
