"""Anthropic's and Ollama's own clients, which choose by the model's name."""

import anthropic
import ollama
import pytest
from http_server import Server
from routed import MESSAGES

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return server.get("/v1/models").json()["data"][0]["id"]


def test_anthropic_whole_and_streamed(server: Server, model: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    greedy = {"temperature": 0.0}  # later releases of the client have no argument for it
    asked = {"messages": MESSAGES, "max_tokens": 24, "extra_body": greedy}
    whole = client.messages.create(model=f"{model}:two", **asked).content[0].text
    with client.messages.stream(model=f"{model}:two", **asked) as stream:
        assert "".join(stream.text_stream) == whole
    with pytest.raises(anthropic.BadRequestError, match="'two'"):
        client.messages.create(model=f"{model}:exat", **asked)
    keys = {"custom_params": {"smc": {"num_particles": 3}}}
    with pytest.raises(anthropic.BadRequestError, match="preset"):
        client.messages.create(model=model, **asked | {"extra_body": keys})


def test_ollama_whole_and_streamed(server: Server, model: str) -> None:
    client = ollama.Client(host=server.url)
    assert f"{model}:two" in [card.model for card in client.list().models]
    asked = {"messages": MESSAGES, "options": {"num_predict": 24, "seed": 3, "temperature": 1.0}}
    whole = client.chat(model=f"{model}:two", **asked).message.content
    parts = client.chat(model=f"{model}:two", **asked, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole
    with pytest.raises(ollama.ResponseError, match="'two'") as refused:
        client.chat(model=f"{model}:exat", **asked)
    assert refused.value.status_code == 400
