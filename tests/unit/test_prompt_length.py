"""Texts that no context can hold are refused by their characters; none that fits ever is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from tiny_models import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_smc.guard.prompt_length import check_texts, longest_token
from sglang_smc.patches.routes import bound_conversation

PAIR = Path(__file__).parents[2] / "bench" / "pair" / "target"
BYTES = AutoTokenizer.from_pretrained(PAIR)


def pieces(
    *steps: Any, byte_fallback: bool = True, cut: Any = None, added: tuple[AddedToken, ...] = ()
) -> PreTrainedTokenizerFast:
    """Return one like SentencePiece's: spaces shown, and bytes for what is in no piece."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "▁▁▁▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    own = {"byte_fallback": byte_fallback}
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, **own)
    tokenizer = Tokenizer(model)
    shown = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([*shown, *steps])
    tokenizer.pre_tokenizer = cut or pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def manager(tokenizer: Any, context: int = 10, **changes: Any) -> Any:
    server = SimpleNamespace(speculative_algorithm="SMC", speculative_smc_presets=None)
    given = {"context_len": context, "allow_auto_truncate": False, "server_args": server}
    return SimpleNamespace(tokenizer=tokenizer, **{**given, **changes})


NFC = pieces(normalizers.NFC())
KNOWN = (BYTES, pieces(), NFC)
texts = st.text(max_size=40) | st.text(alphabet="a e\u0301\u0323\n1", max_size=80)


@settings(max_examples=60)
@given(st.sampled_from(KNOWN), texts)
def test_no_text_that_fits_is_refused(tokenizer: Any, text: str) -> None:
    """Red where a token may stand for more characters than it is taken for."""
    longest = longest_token(tokenizer)
    assert longest is not None
    assert len(text) <= longest * len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_the_longest_token_is_the_vocabularys() -> None:
    assert longest_token(BYTES) == max(map(len, BYTES.get_vocab()))
    assert longest_token(NFC) == 4 * longest_token(pieces()) == 24  # <0xFF>


@pytest.mark.parametrize(
    "tokenizer",
    [
        tiny_tokenizer(8, 1),  # any word is one unknown token, and spaces are none
        pieces(byte_fallback=False),
        pieces(normalizers.Strip()),
        pieces(normalizers.Replace("aa", "a")),
        pieces(cut=pre_tokenizers.WhitespaceSplit()),
        pieces(cut=pre_tokenizers.Split(" ", "removed")),
        pieces(added=(AddedToken("<x>", rstrip=True),)),
        mock.Mock(is_fast=False),  # in Python: nothing is known of it
    ],
)
def test_where_a_token_may_stand_for_any_number_nothing_is_refused(tokenizer: Any) -> None:
    assert longest_token(tokenizer) is None
    check_texts("a" * 10**6, manager(tokenizer))


def test_a_text_that_is_too_long_is_refused_with_its_length_and_the_limit() -> None:
    most = 10 * longest_token(BYTES)
    check_texts("a" * most, manager(BYTES))
    message = rf"text has {most + 1} characters.*context length of 10.* {most} are allowed"
    with pytest.raises(ValueError, match=message):
        check_texts(["a", "a" * (most + 1)], manager(BYTES))
    check_texts("a" * (most + 1), manager(BYTES, context=11))
    check_texts("a" * (most + 1), manager(BYTES, allow_auto_truncate=True))
    check_texts("a" * (most + 1), manager(None))
    check_texts(None, manager(BYTES))


MOST = 10 * (longest_token(BYTES) or 0)
LONG = "a" * (MOST + 1)
PLAIN = [{"role": "user", "content": "x"}]
CALL = {"name": "f", "arguments": LONG}
SAID = {
    **{
        role: [{"role": role, "content": LONG}, *PLAIN]
        for role in ("user", "system", "developer", "assistant")
    },
    "thoughts": [{"role": "assistant", "content": "x", "reasoning_content": LONG}],
    "tool": [{"role": "tool", "tool_call_id": "a", "content": LONG}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a" * (MOST // 4 + 1)}] * 4}],
    "many": [{"role": "user", "content": "a"}] * MOST,
    "call": [{"role": "assistant", "tool_calls": [{"id": "a", "function": CALL}]}],
}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {}}}
CHATS: dict[str, dict[str, Any]] = {
    **{name: {"messages": messages} for name, messages in SAID.items()},
    "tools": {"messages": PLAIN, "tools": [TOOL]},
    "template": {"messages": PLAIN, "chat_template_kwargs": {"documents": [{LONG: 1}]}},
}
STAND_IN = manager(BYTES, served_model_name="default")


@pytest.mark.parametrize("said", CHATS)
def test_a_conversation_is_refused_by_all_that_is_in_it(said: str) -> None:
    request = ChatCompletionRequest(model="default", **CHATS[said])
    rendered = mock.Mock()
    with pytest.raises(ValueError, match=r"The conversation has \d+ characters.* are allowed"):
        bound_conversation(rendered, SimpleNamespace(tokenizer_manager=STAND_IN), request)
    rendered.assert_not_called()


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * MOST}}]


@pytest.mark.parametrize("content", ["a" * (MOST - 20), " \n" * MOST, IMAGE])
def test_a_conversation_that_may_fit_is_rendered(content: Any) -> None:
    """Spaces may be trimmed, and images are no text."""
    messages = [{"role": "user", "content": content}]
    request = ChatCompletionRequest(model="default", messages=messages)
    rendered = mock.Mock()
    serving: Any = SimpleNamespace(tokenizer_manager=STAND_IN)
    bound_conversation(rendered, serving, request, stream=False)
    assert rendered.call_args.kwargs == {"stream": False}


@pytest.mark.parametrize(
    "body",
    [
        {"input": LONG},
        {"instructions": LONG, "input": "x"},
        {"input": SAID["parts"]},
        {"messages": [SimpleNamespace(role="user", content=LONG)]},
    ],
)
def test_routes_that_render_by_themselves_refuse_it_too(body: dict[str, Any]) -> None:
    """`/v1/responses` of gpt-oss, and Ollama's chat, whose messages are objects."""
    rendered = mock.Mock()
    serving = SimpleNamespace(tokenizer_manager=STAND_IN)
    with pytest.raises(ValueError, match="The conversation has"):
        bound_conversation(rendered, serving, SimpleNamespace(**body), None)
    rendered.assert_not_called()
