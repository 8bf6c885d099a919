"""Streams of several tokens a chunk: a character is sent once, and a parser sees single tokens."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.detokenizer_manager import DetokenizerManager

from sglang_smc.patches.detokenizer import keep_sent
from sglang_smc.server.routes import with_logprobs
from sglang_smc.server.streams import Splitter
from sglang_smc.upstream import IS_NEWER

LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def answers(texts: Sequence[str], length: int, incremental: bool = False) -> list[dict[str, Any]]:
    """A stream whose tokens, numbered from 0, have these texts, in chunks of so many.

    Each list of log-probabilities has a token's number in its place.
    """
    chunks = []
    for first in range(0, len(texts), length):
        end = min(first + length, len(texts))
        begin = first if incremental else 0
        chunks.append(
            {
                "text": "".join(texts[begin:end]),
                "output_ids": list(range(begin, end)),
                "meta_info": {
                    "completion_tokens": end,
                    "output_token_logprobs_length": end,
                    "finish_reason": None,
                    **{name: list(range(begin, end)) for name in LISTS},
                },
            }
        )
    chunks[-1]["meta_info"]["finish_reason"] = {"type": "stop"}
    return chunks


CHARACTERS = "ab \n日本語😀é⟦"


def byte_tokens(text: str, cuts: Sequence[int]) -> list[bytes]:
    """A text as tokens of a few bytes each, which end anywhere in a character."""
    data, ends = text.encode(), sorted({cut % (len(text.encode()) + 1) for cut in cuts})
    borders = [0, *(end for end in ends if 0 < end < len(data)), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


class ByteTokenizer:
    """Decodes tokens that are bytes, incomplete ones as byte-level tokenizers do."""

    is_fast = True

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return b"".join(self.tokens[i] for i in ids).decode(errors="replace")

    def batch_decode(self, batch: Sequence[Sequence[int]], **_: object) -> list[str]:
        return [self.decode(ids) for ids in batch]


texts = st.text(CHARACTERS, min_size=1, max_size=12)
cuts = st.lists(st.integers(0, 60), max_size=20)


@given(texts, cuts, st.integers(1, 9), st.booleans())
def test_parts_of_a_chunk_end_with_a_token_each(
    text: str, cuts: list[int], length: int, incremental: bool
) -> None:
    """Red if a character is lost or sent twice, or comes with a token that has a part of it, or if
    a parser gets several tokens at once, or log-probabilities of other tokens than a part's own.
    """
    tokens = byte_tokens(text, cuts)
    tokenizer = ByteTokenizer(tokens)
    splitter = Splitter(tokenizer.decode, incremental)
    complete = [tokenizer.decode(range(i + 1)).rstrip("�") for i in range(len(tokens))]
    sent, ids = "", []
    for chunk in answers([""] * len(tokens), length, incremental):
        end = chunk["meta_info"]["completion_tokens"]
        chunk["text"] = complete[end - 1][len(sent) if incremental else 0 :]
        finished = []
        for number, part in enumerate(splitter.split(chunk), len(ids) + 1):
            sent = sent + part["text"] if incremental else part["text"]
            ids = ids + part["output_ids"] if incremental else part["output_ids"]
            assert sent == complete[len(ids) - 1]
            info = part["meta_info"]
            assert all(info[name] == part["output_ids"] for name in LISTS)
            counts = info["completion_tokens"], info["output_token_logprobs_length"]
            assert counts == (number, number) and number == len(ids)
            finished.append(info["finish_reason"] is not None)
            if not incremental:  # SGLang goes on with the same lists
                for grows in (chunk["output_ids"], *(chunk["meta_info"][name] for name in LISTS)):
                    grows.append(-1)
        assert finished == [False] * (len(finished) - 1) + [end == len(tokens)]
    assert sent == text and ids == list(range(len(tokens)))


def test_scoring_keeps_its_entry_without_a_token() -> None:
    for incremental in (False, True):
        info = {"output_token_logprobs": [], "output_top_logprobs": [7], "finish_reason": {}}
        answer = {"text": "", "output_ids": [], "meta_info": info}
        assert list(Splitter(str, incremental).split(answer)) == [answer]


@pytest.mark.parametrize("told", [[], ["data: text"]], ids=["no text", "text"])
def test_a_step_without_text_sends_its_log_probabilities(told: list[str]) -> None:
    """Red if those of a round that ends within a character are lost, or come twice."""

    async def chunks() -> AsyncIterator[str]:
        for chunk in told:
            yield chunk

    async def sent() -> list[str]:
        return [chunk async for chunk in with_logprobs(chunks(), step)]

    step = {
        "content": {"meta_info": {"id": "one"}},
        "request": SimpleNamespace(model="m"),
        "index": 1,
        "created": 5,
        "choice_logprobs": {"content": [{"token": "a"}]},
    }
    (found,) = asyncio.run(sent())
    if told:
        assert [found] == told
        return
    body = json.loads(found.removeprefix("data: "))
    (choice,) = body["choices"]
    assert (body["id"], body["model"], body["created"], choice["index"]) == ("one", "m", 5, 1)
    assert choice["logprobs"] == step["choice_logprobs"]


@pytest.mark.skipif(not IS_NEWER, reason="this process loads no plugins")
@given(texts, cuts, st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_what_was_sent_is_a_prefix_of_the_whole(
    text: str, cuts: list[int], lengths: list[int]
) -> None:
    """Red if text is sent again where a chunk ends within a character."""
    tokens = byte_tokens(text, cuts)
    manager: Any = object.__new__(DetokenizerManager)
    manager.tokenizer, manager.vocab_size = ByteTokenizer(tokens), len(tokens)
    manager.decode_status, manager.disable_tokenizer_batch_decode = {}, False
    manager.is_tool_call_parser_gpt_oss, manager.tool_close_token_ids = False, set()
    original = inspect.unwrap(DetokenizerManager._decode_batch_token_id_output)
    sent, first = "", 0
    for length in (*lengths, len(tokens)):
        end = min(first + length, len(tokens))
        reason = {"type": "length"} if end == len(tokens) else None
        batch: Any = SimpleNamespace(
            rids=["0"], decoded_texts=[""], decode_ids=[list(range(first, end))], read_offsets=[0],
            finished_reasons=[reason], no_stop_trim=[False], skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )  # fmt: skip
        sent += keep_sent(original, manager, batch)[0]
        assert text.startswith(sent)
        if (first := end) == len(tokens):
            break
    assert sent == text
