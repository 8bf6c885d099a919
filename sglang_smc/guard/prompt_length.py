"""Reject texts that exceed any context length, before they are tokenized.

SGLang counts a text's tokens by tokenizing it: 30 MB took 4 GB and a hundred seconds. But where a
tokenizer keeps every character, a token covers at most as many as the longest token of the
vocabulary has, so that a text of more characters than context length times that has too many
tokens.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

# Fields of the routes' requests that may become a part of the prompt.
_CONVERSATION = ("messages", "input", "system", "instructions", "tools", "chat_template_kwargs")

_COMPOSED = 4  # the most characters that NFC composes into one: a letter and three marks
# Steps that drop no character, and how many characters each may compose into one.
_NORMALIZERS = {"NFC": _COMPOSED, "Prepend": 1, "Replace": 1, "ByteLevel": 1}
_SPLITS = {"ByteLevel", "Metaspace", "Digits", "Split", "UnicodeScripts"}


def check_texts(texts: str | list[str] | None, manager: TokenizerManager) -> None:
    """Raise ValueError for a prompt, or one of a batch, that exceeds any context."""
    for text in (texts,) if isinstance(texts, str) else texts or ():
        _check_length("text", len(text), manager)


def check_conversation(request: Mapping[str, Any], manager: TokenizerManager) -> None:
    """Raise ValueError for a conversation that exceeds any context.

    All text that a template may render is counted, of all roles, though some templates leave a part
    out.

    Args:
        request: the fields of any chat route's request; values are of JSON's types, or SGLang's
            models of them.
    """
    said = [request.get(name) for name in _CONVERSATION]
    _check_length("The conversation", sum(map(len, _texts(said))), manager)


def _check_length(name: str, length: int, manager: TokenizerManager) -> None:
    """Raise ValueError for a number of characters that exceeds any context.

    With ``--allow-auto-truncate`` any length is accepted.
    """
    context = manager.context_len
    if length <= context or manager.allow_auto_truncate or manager.tokenizer is None:
        return
    longest = longest_token(manager.tokenizer)
    if longest is not None and length > context * longest:
        raise ValueError(
            f"{name} has {length} characters, which are more tokens than the context length "
            f"of {context}: a token has {longest} characters at most, so {context * longest} are "
            "allowed, and of these as many as make tokens that fit. Shorten it."
        )


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings within a value but images, stripped, as templates do."""
    pending = [value]
    while pending:  # no recursion: a client may nest values arbitrarily deep
        inner = pending.pop()
        if isinstance(inner, str):
            yield inner.strip()
        elif isinstance(inner, Mapping):
            pending += [*inner, *(inner[name] for name in inner if name != "image_url")]
        elif isinstance(inner, (list, tuple)):
            pending += inner
        elif hasattr(inner, "__dict__"):
            pending += [part for name, part in vars(inner).items() if name != "image_url"]


@lru_cache(maxsize=4)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the most characters that one token covers; None where there is no bound.

    There is none where characters may be dropped or a token may cover any number: in tokenizers
    that are not Rust's, that map unknown words to one token, strip or fold spaces, or truncate
    texts.
    """
    if not tokenizer.is_fast:
        return None
    backend = cast("Tokenizer", tokenizer.backend_tokenizer)
    found = json.loads(backend.to_str())
    added = found["added_tokens"]
    model = found["model"]
    composed = _composed(found["normalizer"])
    if (
        composed is None
        or found["truncation"] is not None
        or not _keeps_all(found["pre_tokenizer"])
        or not _knows_all(found["pre_tokenizer"], model)
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    return composed * max(map(len, tokenizer.get_vocab()))


def _composed(normalizer: dict[str, Any] | None) -> int | None:
    """Return how many characters a normalizer composes into one; None where it may drop any."""
    composed = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] not in _NORMALIZERS:
            return None
        if step["type"] == "Replace" and not _replaces_one(step):
            return None
        composed *= _NORMALIZERS[step["type"]]
    return composed


def _replaces_one(step: dict[str, Any]) -> bool:
    """Return whether a replacement never shortens: one character by one or more."""
    return len(step["pattern"].get("String", "..")) == 1 and bool(step["content"])


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether the words that a text is split into contain all characters."""
    return all(
        step["type"] in _SPLITS and step.get("behavior") != "Removed"
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _knows_all(pre_tokenizer: dict[str, Any] | None, model: dict[str, Any]) -> bool:
    """Return whether there is a token for each byte, so that no unknown token is used."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback"):
        return True
    steps = _steps(pre_tokenizer, "pretokenizers")
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    is_bytes = any(step["type"] == "ByteLevel" for step in steps)
    return is_bytes and model["type"] == "BPE" and alphabet <= model["vocab"].keys()


def _steps(found: dict[str, Any] | None, of_sequence: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, which may be a nested sequence."""
    if found is None:
        return []
    if found["type"] != "Sequence":
        return [found]
    return [step for inner in found[of_sequence] for step in _steps(inner, of_sequence)]
