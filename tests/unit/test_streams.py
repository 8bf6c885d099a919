"""Streams of several tokens a chunk: a character is sent once, and a parser sees single tokens."""

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from tokenizers import Tokenizer, decoders, models
from toy_request import ToyRequest, begun
from transformers import PreTrainedTokenizerFast

from sglang_smc.patches.detokenizer import keep_sent
from sglang_smc.patches.request_state import stream_output
from sglang_smc.server.routes import with_logprobs
from sglang_smc.server.streams import Splitter, note_prompt, token_by_token
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
    data = text.encode()
    ends = sorted({cut % (len(text.encode()) + 1) for cut in cuts})
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
    sent = ""
    ids = []
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


LENGTH: dict[str, Any] = {"type": "length"}


def sent_by(
    tokenizer: Any,
    vocab_size: int,
    prompt: Sequence[int],
    chunks: Sequence[Sequence[int]],
    reason: dict[str, Any] = LENGTH,
) -> list[str]:
    """What SGLang's detokenizer sends of an answer whose tokens come in these chunks."""
    manager: Any = object.__new__(DetokenizerManager)
    manager.tokenizer = tokenizer
    manager.vocab_size = vocab_size
    manager.decode_status = {}
    manager.disable_tokenizer_batch_decode = False
    manager.is_tool_call_parser_gpt_oss = False
    manager.tool_close_token_ids = set()
    original = inspect.unwrap(DetokenizerManager._decode_batch_token_id_output)
    before = list(prompt[-5:])
    sent = []
    for number, chunk in enumerate(chunks):
        reasons = [reason if number == len(chunks) - 1 else None]
        batch: Any = SimpleNamespace(
            rids=["0"], decoded_texts=[""], decode_ids=[[*before, *chunk]],
            read_offsets=[len(before)], finished_reasons=reasons, no_stop_trim=[False],
            skip_special_tokens=[True], spaces_between_special_tokens=[True],
        )  # fmt: skip
        if number:
            batch.decode_ids = [list(chunk)]
        sent += keep_sent(original, manager, batch)
    return sent


def cut(tokens: Sequence[int], lengths: Sequence[int]) -> list[Sequence[int]]:
    """Tokens in chunks of these lengths, and the rest."""
    ends = [*itertools.takewhile(lambda end: end < len(tokens), itertools.accumulate(lengths))]
    return [tokens[a:b] for a, b in pairwise([0, *ends, len(tokens)])]


@pytest.mark.skipif(not IS_NEWER, reason="this process loads no plugins")
@given(texts, cuts, st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_what_was_sent_is_a_prefix_of_the_whole(
    text: str, cuts: list[int], lengths: list[int]
) -> None:
    """Red if text is sent again where a chunk ends within a character."""
    tokens = byte_tokens(text, cuts)
    tokenizer = ByteTokenizer(tokens)
    ids = range(len(tokens))
    *_, whole = sent = [
        *itertools.accumulate(sent_by(tokenizer, len(tokens), [], cut(ids, lengths)))
    ]
    assert all(text.startswith(some) for some in sent)
    assert whole == text


class Stopped(ToyRequest):
    """A request that puts out tokens of bytes up to a stop string."""

    check_match_stop_str_prefix = Req.check_match_stop_str_prefix
    tail_str = Req.tail_str

    def __init__(self, tokenizer: Any, stop: str, stream: bool) -> None:
        asked = {"stop_strs": [stop], "stop_str_max_len": len(stop.encode())}
        super().__init__(0, 27, 8, asked, None)
        self.smc_state = begun({}).smc_state
        self.tokenizer = tokenizer
        self.stop = stop
        self.stream = stream

    def _stop_match_tail_len(self, new_accepted_len: int) -> int:
        return self.sampling_params.stop_str_max_len + new_accepted_len

    def finished(self) -> bool:
        return self.stop in self.tokenizer.decode(self.output_ids)


class Streamer:
    """What SGLang sends to its detokenizer, whole answers in parts of an interval."""

    interval = 2

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []

    def send(self, reqs: list[Any], *_: Any) -> None:
        for req in reqs:
            is_due = req.finished() or (
                not req.check_match_stop_str_prefix()
                if req.stream
                else len(req.output_ids) % self.interval == 0
            )
            if is_due:
                self.chunks.append(req.output_ids[sum(map(len, self.chunks)) :])


@pytest.mark.skipif(not IS_NEWER, reason="this process loads no plugins")
@given(texts, cuts, st.tuples(st.integers(0, 11), st.integers(1, 12)), st.booleans())
def test_what_a_stop_string_cuts_has_not_been_sent(
    text: str, cuts: list[int], place: tuple[int, int], stream: bool
) -> None:
    """Red if a whole answer keeps the beginning of a stop string of which a part has left, or a
    stream sends it before a character that is not complete.
    """
    begin, length = place
    stop = text[begin % len(text) :][:length]
    tokens = byte_tokens(text, cuts)
    req: Any = Stopped(ByteTokenizer(tokens), stop, stream)
    streamer: Any = Streamer()
    for token in range(len(tokens)):
        if not req.finished():
            req.output_ids.append(token)
            stream_output(Streamer.send, streamer, [req], False)
    matched = {"type": "stop", "matched": stop}
    sent = sent_by(req.tokenizer, len(tokens), [], streamer.chunks, matched)
    assert "".join(sent) == text[: text.find(stop)]


PIECES = ("!", "▁a", "▁", "b", "▁▁c", "d", "▁:", "<eos>")
FOREIGN = 99  # a token of the model that the tokenizer lacks


def spaces_first() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama 2's class: what it decodes loses the space that it begins with."""
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, "!"))
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


async def streamed(chunks: list[dict[str, Any]], manager: Any, obj: Any) -> list[dict[str, Any]]:
    """What `token_by_token` makes of a stream's chunks."""

    async def each() -> AsyncIterator[dict[str, Any]]:
        for chunk in chunks:
            yield chunk

    return [part async for part in token_by_token(each(), manager, obj)]


known = st.sampled_from(range(len(PIECES)))


@given(
    prompt=st.lists(known, min_size=1, max_size=7),
    tokens=st.lists(known | st.just(FOREIGN), min_size=1, max_size=12),
    length=st.integers(1, 5),
    incremental=st.booleans(),
    samples=st.integers(1, 2),
)
def test_streams_are_cut_where_sglang_decodes(
    prompt: list[int], tokens: list[int], length: int, incremental: bool, samples: int
) -> None:
    """Red if tokens are decoded without the prompt before them, which keeps the first's space, or
    if one that the tokenizer lacks is decoded otherwise.
    """
    tokenizer = spaces_first()
    single = sent_by(tokenizer, len(PIECES), prompt, cut(tokens, [1] * len(tokens)))
    obj = GenerateReqInput(input_ids=prompt, stream=True, sampling_params={"n": samples})
    obj.normalize_batch_and_arguments()
    note_prompt(obj if samples == 1 else obj[0], prompt)
    obj.sampling_params = {}
    manager = SimpleNamespace(tokenizer=tokenizer, incremental_streaming_output=incremental)
    chunks = answers(single, length, incremental)
    for chunk in chunks:
        chunk["output_ids"] = [tokens[place] for place in chunk["output_ids"]]
    parts = asyncio.run(streamed(chunks, manager, obj))
    texts = [part["text"] for part in parts]
    assert texts == (single if incremental else [*itertools.accumulate(single)])
