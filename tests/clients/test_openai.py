"""Tools that openai-python asks the shipped pair to call, and code in place of a processor."""

import json
from pathlib import Path

import dill
import openai
import pytest
from http_server import Server
from spelling import PERSON, is_person

pytestmark = pytest.mark.engine


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
