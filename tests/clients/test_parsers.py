"""Reasoning and tool calls on the chat route: parsers read the text that particles agree on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from http_server import Server, running_server
from tiny_models import make_tiny_model, smc_arguments
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.engine

PAD, EOS, START = "<pad>", "<eos>", "<start>"
# Each message's words, and then the word that the model goes on from.
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}" + START
REASONING = ["it", "is", "about", "the", "weather"]
SAID = ["I", "will", "look", "out"]
ARGUMENTS = {"city": "Paris", "days": 3}
CALL = ["<tool_call>", '{"name":', '"forecast",', '"arguments":', '{"city":', '"Paris",']
CALL += ['"days":', "3}}", "</tool_call>"]
CALLS = [*CALL, *(f"{word} " for word in CALL)]  # twice, in other tokens
BEHIND = ["and", "then", "answer"]
WORDS = ["<think>", *REASONING, "</think>", *SAID, *CALLS, *BEHIND]
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


@pytest.fixture(scope="module", params=[False, True], ids=["whole chunks", "incremental"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """Its draft is less sure of its words than the target is."""
    folder = tmp_path_factory.mktemp("scripted")
    each = (("target", 30.0), ("draft", 4.0))
    pair = [make_scripted_model(folder / name, certainty) for name, certainty in each]
    own = {"num_particles": 4, "reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    own["incremental_streaming_output"] = request.param
    with running_server(folder, **smc_arguments(*pair, **own)) as running:
        yield running


Call = tuple[str, dict[str, Any]]  # a tool's name, its arguments
BOTH: list[Call] = [("forecast", ARGUMENTS)] * 2


def parts_of(choices: list[Any]) -> tuple[list[str], list[str], list[Call], set[str]]:
    """Reasoning, content, calls, and why they end, of a message or of a stream's chunks."""
    reasoning, content, calls = "", "", {}
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
    whole = [*(f"{word} " for word in WORDS), EOS]
    assert tokens == [whole, whole]


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
