"""Reasoning and tool calls on the chat route: parsers read the text that particles agree on."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from conformance.scripted import (
    ARGUMENTS,
    CALL,
    EOS,
    FORECAST,
    REASONING,
    START,
    THOUGHT_BEGINS,
    THOUGHT_ENDS,
    TOOL,
    make_scripted_model,
    token_of,
)
from http_server import Server, running_server
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

SAID = ["I", "will", "look", "out"]
CALLS = [*CALL, *(f"{word} " for word in CALL)]  # twice, in other tokens
BEHIND = ["and", "then", "answer"]
WORDS = ["<think>", *REASONING, "</think>", *SAID, *CALLS, *BEHIND]
QUESTION = {"role": "user", "content": "about the weather"}


@pytest.fixture(scope="module", params=[False, True], ids=["whole chunks", "incremental"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """Its draft is less sure of its words than the target is."""
    folder = tmp_path_factory.mktemp("scripted")
    each = (("target", 30.0), ("draft", 4.0))
    said = [token_of(word) for word in WORDS]
    pair = [make_scripted_model(folder / name, said, certainty=value) for name, value in each]
    own = {"num_particles": 4, "reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    own["incremental_streaming_output"] = request.param
    own["enable_strict_thinking"] = not request.param
    with running_server(folder, **smc_arguments(*pair, **own)) as running:
        yield running


Call = tuple[str, dict[str, Any]]  # a tool's name, its arguments
BOTH: list[Call] = [("forecast", ARGUMENTS)] * 2


def parts_of(choices: list[Any]) -> tuple[list[str], list[str], list[Call], set[str]]:
    """Reasoning, content, calls, and why they end, of a message or of a stream's chunks."""
    reasoning = ""
    content = ""
    calls = {}
    for choice in choices:
        part = choice.delta if hasattr(choice, "delta") else choice.message
        reasoning += getattr(part, "reasoning_content", None) or ""
        content += part.content or ""
        for i, call in enumerate(part.tool_calls or []):
            written = calls.setdefault(i if hasattr(choice, "message") else call.index, ["", ""])
            written[0] += call.function.name or ""
            written[1] += call.function.arguments or ""
    reasons = {choice.finish_reason for choice in choices} - {None}
    made = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return reasoning.split(), content.split(), made, reasons


def test_chats_have_reasoning_and_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    """SGLang's parser keeps text behind calls in streams alone."""
    asked: dict[str, Any] = {"model": "m", "messages": [QUESTION], "tools": [TOOL], "seed": 1}
    whole = parts_of(client.chat.completions.create(**asked).choices)
    assert whole == (REASONING, SAID, BOTH, {"tool_calls"})
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = parts_of([chunk.choices[0] for chunk in chunks])
    assert streamed == (REASONING, SAID + BEHIND, BOTH, {"tool_calls"})


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}], ids=["text", "calls"])
def test_a_stream_has_a_log_probability_for_each_token(
    client: openai.OpenAI, tools: dict[str, Any]
) -> None:
    """Of each sample: red if a part of a chunk has those of the others too."""
    asked: dict[str, Any] = {"model": "m", "messages": [QUESTION], "seed": 1, "n": 2, **tools}
    shown = {"logprobs": True, "top_logprobs": 2, "stream": True}
    tokens: list[list[str]] = [[], []]
    for chunk in client.chat.completions.create(**asked, **shown):
        for choice in chunk.choices:
            places = choice.logprobs.content if choice.logprobs else ()
            tokens[choice.index] += [place.token for place in places]
            assert all(len(place.top_logprobs) == 2 for place in places)
    whole = [*map(token_of, WORDS), EOS]
    assert tokens == [whole, whole]


def test_a_thought_has_no_more_tokens_than_a_request_allows(server: Server) -> None:
    """Its opening is one of them. Red if a round counts the tokens of its drafts otherwise."""
    asked = {"text": f"about the weather {START}", "require_reasoning": True}
    budgets = range(len(REASONING) + 1)
    answers = server.outcomes([{**asked, "max_thinking_tokens": most} for most in budgets])
    if server.get("/server_info").json()["enable_strict_thinking"]:
        texts = [
            one.json()["text"].replace(THOUGHT_BEGINS, f"{THOUGHT_BEGINS} ") for one in answers
        ]
        thoughts = [text.partition(THOUGHT_ENDS)[0].split() for text in texts]
        assert thoughts == [[THOUGHT_BEGINS, *REASONING][:most] for most in budgets]
    else:
        assert {one.status_code for one in answers} == {400}
        assert all("--enable-strict-thinking" in one.text for one in answers)


def test_messages_keep_the_order_of_text_and_calls(server: Server) -> None:
    """Red if text that comes in one chunk with the end of a call goes first: it ends the call."""
    client = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
    tool = {"name": "forecast", "input_schema": FORECAST["parameters"]}
    asked: Any = {"model": "m", "messages": [QUESTION], "tools": [tool], "max_tokens": 60}
    for _ in range(4):
        with client.messages.stream(**asked) as stream:
            made = stream.get_final_message().content
        blocks = [block for block in made if block.type != "text" or block.text.strip()]
        assert [block.type for block in blocks] == ["thinking", "text", *["tool_use"] * 2, "text"]
        thinking, said, first, second, behind = blocks
        assert first.input == second.input == ARGUMENTS
        assert (thinking.thinking.split(), said.text.split()) == (REASONING, SAID)
        assert behind.text.split() == BEHIND
