"""openai-python against a server with the shipped pair, which solves what it is asked."""

import json
from pathlib import Path

import dill
import openai
import pytest
from http_server import Server
from pair.task import check, held_out, messages
from spelling import PERSON, is_person

pytestmark = pytest.mark.engine

# At temperature 0 the target solves these.
SOLVED = (1, 3, 5, 7)


def test_problems_are_solved_at_temperature_0(client: openai.OpenAI) -> None:
    """By chat in every mode and by completions: the same text of the target's."""
    own = {"model": "default", "temperature": 0, "max_tokens": 160}
    prompts = [f"<|user|>{held_out(index).question}<|assistant|>" for index in SOLVED]
    completed = client.completions.create(prompt=prompts, **own)  # type: ignore[call-overload]
    for index, choice in zip(SOLVED, completed.choices, strict=True):
        assert check(choice.text, held_out(index))
    whole = completed.choices[0].text
    asked = {**own, "messages": messages(held_out(SOLVED[0]))}
    for mode in ("smc", "exact", "auto"):
        extra = {"custom_params": {"smc": {"mode": mode}}}
        answer = client.chat.completions.create(**asked, extra_body=extra)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == whole
        assert answer.choices[0].finish_reason == "stop"
    stopped = client.chat.completions.create(**asked, stop=["="]).choices[0]  # type: ignore[call-overload]
    assert stopped.message.content == whole[: whole.index("=")]


@pytest.mark.parametrize("mode", ["smc", "exact"])
def test_a_tool_that_must_be_called_is(client: openai.OpenAI, mode: str) -> None:
    tool = {"type": "function", "function": {"name": "register", "parameters": PERSON}}
    wanted = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    own = {"model": "default", "max_tokens": 300, "temperature": 0.7, "seed": 3}
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        messages=[{"role": "user", "content": "What is 2 + 3?"}],
        extra_body={"custom_params": {"smc": {"mode": mode}}},
        **(own | wanted),
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls
    for call in answer.message.tool_calls:
        assert call.function.name == "register"
        assert is_person(call.function.arguments)


class MakesAFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.mkdir, (self.path,)


def test_pickled_code_in_a_request_is_never_read(server: Server, tmp_path: Path) -> None:
    """Where no operator has enabled custom processors."""
    path = tmp_path / "made"
    dill.loads(dill.dumps(MakesAFolder(path)))
    path.rmdir()  # so it would have worked
    processor = json.dumps({"callable": dill.dumps(MakesAFolder(path)).hex()})
    answer = server.post("/generate", input_ids=[3, 4], custom_logit_processor=processor)
    assert answer.status_code == 400
    assert "custom_logit_processor" in answer.text or "custom logit processor" in answer.text
    assert not path.exists()
