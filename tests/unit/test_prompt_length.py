"""Texts that no context can hold are refused by their characters; none that fits ever is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_smc.patches.routes import process_messages
from sglang_smc.server.prompt_length import check_texts, longest_token

PAIR = Path(__file__).parents[2] / "bench" / "pair" / "target"
BYTES = AutoTokenizer.from_pretrained(PAIR)


def pieces(**changes: Any) -> PreTrainedTokenizerFast:
    """As SentencePiece's are: spaces shown, and bytes for what is in no piece."""
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "▁▁▁▁"]
    merges = [("▁", "a")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(vocab)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=changes.get("byte_fallback", True),
        )
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), *changes.get("steps", ())]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = changes.get("pre_tokenizer", pre_tokenizers.Metaspace())
    tokenizer.decoder = decoders.ByteFallback()
    added = changes.get("added", [])
    tokenizer.add_special_tokens(added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def manager(tokenizer: Any, context: int = 10, **changes: Any) -> Any:
    server = SimpleNamespace(speculative_algorithm="SMC")
    given = {"context_len": context, "allow_auto_truncate": False, "server_args": server}
    return SimpleNamespace(tokenizer=tokenizer, **{**given, **changes})


class Slow:
    """A tokenizer in Python, of which nothing is known."""

    is_fast = False


NFC = pieces(steps=[normalizers.NFC()])
KNOWN = (BYTES, pieces(), NFC)
texts = st.text(max_size=40) | st.text(alphabet="a e\u0301\u0323\n1", max_size=80)


@settings(max_examples=300, deadline=None)
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
        pieces(steps=[normalizers.Strip()]),
        pieces(steps=[normalizers.Replace("aa", "a")]),
        pieces(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        pieces(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        pieces(added=[AddedToken("<x>", rstrip=True)]),
        Slow(),
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


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_conversation_is_refused_by_what_users_say_before_it_is_rendered(role: str) -> None:
    """Of other roles a template may leave anything out, such as thoughts."""
    most = 10 * longest_token(BYTES)
    part = SimpleNamespace(type="text", text="a" * most)
    image = SimpleNamespace(type="image_url")
    said = [
        SimpleNamespace(role=role, content=[image, part]),
        SimpleNamespace(role=role, content="b"),
    ]
    serving, rendered = SimpleNamespace(tokenizer_manager=manager(BYTES)), []

    def original(*args: Any, **kwargs: Any) -> None:
        rendered.append((args, kwargs))

    def ask(messages: list[Any]) -> None:
        request = SimpleNamespace(messages=messages)
        process_messages(original, serving, request, False, output_constrained=True)

    ask([*said[:1], SimpleNamespace(role=role, content=" \n" * most)])  # may be trimmed
    assert len(rendered) == 1 and rendered[0][1] == {"output_constrained": True}
    if role == "user":
        with pytest.raises(ValueError, match=f"messages has {most + 1} characters"):
            ask(said)
        assert len(rendered) == 1
    else:
        ask(said)
        assert len(rendered) == 2
