"""Split a stream's chunks at their tokens, for routes that are written for one token a chunk.

A round emits several tokens at once. SGLang's parsers of tool calls return at most one part of a
call for a chunk, and look for some markers in chunks that begin with them; its Ollama routes drop
the text of a stream's last chunk, which is empty where the last token alone ends an answer.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import INIT_INCREMENTAL_DETOKENIZATION_OFFSET
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.patch_tokenizer import decode_without_hf_kwargs
from transformers import PreTrainedTokenizerBase

from sglang_smc.upstream import resolved

_WITHOUT_PARSERS = ("/generate", "/v1/completions")
_OLLAMA = "/api/"
#: Lists of meta_info with an entry for each token; `return_sampling_mask`, with two, is refused.
_PER_TOKEN = {"output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"}

# Attribute of a request: the last tokens of its prompt.
_PROMPT_TAIL = "smc_prompt_tail"

Decode = Callable[[list[int]], Any]


def reads_single_tokens(manager: TokenizerManager, obj: GenerateReqInput, request: Any) -> bool:
    """Return whether the route of a stream is written for one token a chunk."""
    if not (obj.stream and isinstance(request, Request)):
        return False
    path = request.url.path
    has_parser = resolved(manager.server_args).tool_call_parser is not None
    return path.startswith(_OLLAMA) or (has_parser and path not in _WITHOUT_PARSERS)


def note_prompt(obj: GenerateReqInput, input_ids: Sequence[int] | None) -> None:
    """Note the end of a prompt, behind which SGLang decodes; None of one in embeddings."""
    setattr(obj, _PROMPT_TAIL, list(input_ids or ())[-INIT_INCREMENTAL_DETOKENIZATION_OFFSET:])


def _prompt_tail(obj: GenerateReqInput) -> list[int]:
    """Return what `note_prompt` has noted of a single prompt, of which there may be samples."""
    return vars(obj if obj.is_single else obj[0])[_PROMPT_TAIL]


async def token_by_token(
    answers: AsyncIterator[dict[str, Any]], manager: TokenizerManager, obj: GenerateReqInput
) -> AsyncIterator[dict[str, Any]]:
    """Yield a stream's answers as a server yields them that emits one token at a time.

    Args:
        answers: with `text`, `output_ids`, `meta_info` and, of parallel samples, `index`.
    """
    assert isinstance(obj.sampling_params, dict), "a chat is a single request"
    assert manager.tokenizer is not None, "these routes have a chat template"
    decode = decoder(manager.tokenizer, obj.sampling_params)
    samples: dict[int, Splitter] = {}
    async for answer in answers:
        index = answer.get("index", 0)
        if index not in samples:
            incremental = manager.incremental_streaming_output
            samples[index] = Splitter(decode, incremental, _prompt_tail(obj))
        for part in samples[index].split(answer):
            yield part


def decoder(tokenizer: PreTrainedTokenizerBase, params: dict[str, Any]) -> Decode:
    """Return a function from token ids to text, as SGLang's detokenizer decodes a request's."""
    skip = params.get("skip_special_tokens", True)
    if tokenizer.is_fast:
        spaces = params.get("spaces_between_special_tokens", True)
        decode = partial(
            tokenizer.decode, skip_special_tokens=skip, spaces_between_special_tokens=spaces
        )
    else:  # such as tiktoken's, which take no more arguments
        decode = partial(decode_without_hf_kwargs, tokenizer, skip_special_tokens=skip)
    size = len(tokenizer)

    def decode_known(ids: list[int]) -> Any:
        """Decode ids; those that only the model knows, and of images, are token 0 to SGLang."""
        return decode([token if 0 <= token < size else 0 for token in ids])

    return decode_known


class Splitter:
    """Split the answers of one sample's stream at its tokens.

    The parts of an answer always add up to its text. Only where they are cut is decoded here.
    """

    def __init__(self, decode: Decode, incremental: bool, prompt_tail: Sequence[int] = ()) -> None:
        """Start a stream.

        Args:
            decode: of `decoder`.
            incremental: whether an answer has what is new (`--incremental-streaming-output`), or
                all so far.
            prompt_tail: tokens before the first; decoded without any, it may lose its space.
        """
        self._decode = decode
        self._incremental = incremental
        self._num_tokens = self._length = 0  # of what has been yielded; characters
        self._ids = list(prompt_tail)  # what the next tokens are decoded behind, and open ones
        self._num_decoded = len(self._ids)  # of these, tokens whose characters are complete
        self._num_characters = 0  # of the whole text, up to there

    def split(self, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an answer in parts that end with a token each; the last has its finish reason."""
        left_out = (self._num_tokens, self._length) if self._incremental else (0, 0)
        new = answer["output_ids"][self._num_tokens - left_out[0] :]
        num_tokens = self._num_tokens + len(new)  # SGLang appends to its list between the parts
        end = left_out[1] + len(answer["text"])
        for token in new[:-1]:
            length = min(max(self._complete(token), self._length), end)
            part = self._part(answer, left_out, self._num_tokens + 1, length)
            yield {**part, "meta_info": _not_finished(part["meta_info"], self._num_tokens)}
        for token in new[-1:]:
            self._complete(token)
        yield self._part(answer, left_out, num_tokens, end)

    def _part(
        self, answer: dict[str, Any], left_out: tuple[int, int], num_tokens: int, length: int
    ) -> dict[str, Any]:
        """Return what an answer has of a sample's first tokens and characters."""
        first, begin = (self._num_tokens, self._length) if self._incremental else (0, 0)
        self._num_tokens = num_tokens
        self._length = length
        ids = answer["output_ids"]
        text = answer["text"]
        meta_info = answer["meta_info"]
        place = first - left_out[0]
        end = num_tokens - left_out[0]
        # Without a token, one entry is that of the next: of scoring.
        lists = {
            name: meta_info[name][place : max(end, 1)] for name in _PER_TOKEN & meta_info.keys()
        }
        return {
            **answer,
            "output_ids": ids[place:end],
            "text": text[begin - left_out[1] : length - left_out[1]],
            "meta_info": {**meta_info, **lists},
        }

    def _complete(self, token: int) -> int:
        """Return how many characters of the text are complete with the next token."""
        self._ids.append(token)
        before = self._decode(self._ids[: self._num_decoded])
        added = self._decode(self._ids)[len(before) :]
        complete = added.rstrip("�")
        length = self._num_characters + len(complete)
        if complete and complete == added:
            self._ids = self._ids[self._num_decoded :]
            self._num_decoded = len(self._ids)
            self._num_characters = length
        return length


def _not_finished(meta_info: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return an answer's meta_info as it stood at an earlier token."""
    names = ("completion_tokens", "output_token_logprobs_length")
    counts = {name: min(meta_info[name], num_tokens) for name in names if name in meta_info}
    return {**meta_info, **counts, "finish_reason": None}
