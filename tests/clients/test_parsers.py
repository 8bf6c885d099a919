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
    each = (("target", 30.0), ("draft", 4.0))
    pair = [make_scripted_model(folder / name, certainty) for name, certainty in each]
    own = {"num_particles": 4, "reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    with running_server(folder, **smc_arguments(*pair, **own)) as running:
        yield running


Told = tuple[list[str], str, str, dict[str, Any], set[str]]
TOLD: Told = (REASONING, CONTENT, "forecast", ARGUMENTS, {"tool_calls"})


def told_apart(choices: list[Any]) -> Told:
    """Reasoning, content, a call's name and arguments, and why they end, of parts of a message."""
    reasoning, content, name, arguments = "", "", "", ""
    for choice in choices:
        part = choice.delta if hasattr(choice, "delta") else choice.message
        reasoning += getattr(part, "reasoning_content", None) or ""
        content += part.content or ""
        for call in part.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    reasons = {choice.finish_reason for choice in choices} - {None}
    return reasoning.split(), content.strip(), name, json.loads(arguments), reasons


def test_reasoning_and_calls_are_told_apart_whole_and_streamed(client: openai.OpenAI) -> None:
    """A chunk may bring several tokens at once, and end within a marker's neighbourhood."""
    asked: dict[str, Any] = {"model": "m", "messages": [QUESTION], "tools": [TOOL], "seed": 1}
    assert told_apart(client.chat.completions.create(**asked).choices) == TOLD
    chunks = client.chat.completions.create(**asked, stream=True)
    assert told_apart([chunk.choices[0] for chunk in chunks]) == TOLD


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
