"""Reasoning and tool calls on the chat route: parsers read the text that particles agree on."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from http_server import Server, running_server
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from tiny_models import make_tiny_model, smc_arguments
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_smc.patches.routes import parse_stream_chunk

pytestmark = pytest.mark.engine

PAD, EOS, START = "<pad>", "<eos>", "<start>"
# Each message's words, and then the word that the model goes on from.
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}" + START
REASONING = ["it", "is", "about", "the", "weather"]
SAID = ["I", "will", "look", "out"]
ARGUMENTS = {"city": "Paris", "days": 3}
CALL = ['{"name":', '"forecast",', '"arguments":', '{"city":', '"Paris",', '"days":', "3}}"]
WORDS = ["<think>", *REASONING, "</think>", *SAID, "<tool_call>", *CALL, "</tool_call>"]
CONTENT = " ".join(SAID)
PARAMETERS = {"city": {"type": "string"}, "days": {"type": "integer"}}
FORECAST = {"name": "forecast", "parameters": {"type": "object", "properties": PARAMETERS}}
TOOL = {"type": "function", "function": FORECAST}
QUESTION = {"role": "user", "content": "about the weather"}


def make_scripted_model(path: Path, certainty: float) -> str:
    """Save a model that answers each chat with `WORDS`, no two alike, a space behind each.

    A Llama whose layers add nothing, so that the next token follows from the last one alone.

    Args:
        certainty: the logit of the right next word; all others have 0.
    """
    vocabulary = [PAD, EOS, START, *(word + " " for word in WORDS)]
    size = len(vocabulary)
    hidden = 16 * -(-size // 16)
    make_tiny_model(path, vocab_size=size, hidden=hidden, layers=1, heads=1, kv_heads=1)
    model: Any = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        after = [*range(3, size), 1]  # of START and each word
        # The last norm makes a word's one entry the root of the width.
        model.lm_head.weight[after, range(2, size)] = certainty / hidden**0.5
    model.save_pretrained(path)
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": PAD}
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special
    )
    made.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its draft is less sure of its words than the target is."""
    folder = tmp_path_factory.mktemp("scripted")
    pair = [
        make_scripted_model(folder / "target", 30.0),
        make_scripted_model(folder / "draft", 4.0),
    ]
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    settings = {"num_particles": 4, "num_steps": 3, "enable_cache_report": True}
    with running_server(folder, **smc_arguments(*pair, **settings, **parsers)) as running:
        yield running


def test_reasoning_and_calls_are_told_apart(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=[QUESTION], tools=[TOOL], seed=1)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content.split() == REASONING  # type: ignore[attr-defined]
    assert (choice.message.content or "").strip() == CONTENT
    [call] = choice.message.tool_calls or []
    assert call.function.name == "forecast"  # type: ignore[union-attr]
    assert json.loads(call.function.arguments) == ARGUMENTS  # type: ignore[union-attr]


def test_streams_tell_them_apart(client: openai.OpenAI) -> None:
    """A chunk may bring several tokens at once, and end within a marker's neighbourhood."""
    stream = client.chat.completions.create(
        model="m", messages=[QUESTION], tools=[TOOL], seed=1, stream=True
    )
    reasoning, content, names, arguments, reasons = "", "", "", "", set()
    for chunk in stream:
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            names += call.function.name or ""
            arguments += call.function.arguments or ""
        reasons |= {reason} - {None}
    assert reasoning.split() == REASONING
    assert content.strip() == CONTENT
    assert (names, json.loads(arguments)) == ("forecast", ARGUMENTS)
    assert reasons == {"tool_calls"}


def test_without_tools_the_call_is_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=[QUESTION], seed=1)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    expected = f"{CONTENT} <tool_call> {' '.join(CALL)} </tool_call>"
    assert (choice.message.content or "").strip() == expected


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    first = [{"role": "user", "content": " ".join(["weather"] * 20)}]
    history = [*first, {"role": "assistant", "content": "out"}, {"role": "user", "content": "look"}]
    for messages in (first, history):
        answer = client.chat.completions.create(model="m", messages=messages, seed=1)  # type: ignore[arg-type]
        assert answer.choices[0].message.reasoning_content.split() == REASONING  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 20


def test_a_call_survives_chunks_of_any_length() -> None:
    """Stock parsers lose arguments, and the name, of a call that comes in one chunk."""
    text = " ".join(WORDS[len(REASONING) + 2 :])
    for cut in range(len(text)):
        parser = FunctionCallParser([Tool(**TOOL)], "hermes")
        found = [
            parse_stream_chunk(inspect.unwrap(FunctionCallParser.parse_stream_chunk), parser, chunk)
            for chunk in (text[:cut], text[cut:])
        ]
        assert "".join(normal for normal, _ in found).strip() == CONTENT
        calls = [call for _, some in found for call in some]
        assert "".join(call.name or "" for call in calls) == "forecast"
        assert json.loads("".join(call.parameters for call in calls)) == ARGUMENTS
