"""Carry SMC's results through HTTP routes that would drop them."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from sglang.srt.entrypoints.openai.sse_utils import build_sse_content
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_smc.server import usage
from sglang_smc.state.metrics import META_PREFIX

META_INFO_WISH = "return_meta_info"

# Attribute of a request: the meta_info of its finished responses, by their index.
_FINISHED = "smc_finished"

PARTICLES = META_PREFIX + "particles"
TRACE = META_PREFIX + "trace"


def hand_back(answers: AsyncIterator[dict], obj: GenerateReqInput) -> AsyncIterator[dict]:
    """Return a request's responses; note the finished ones where `note_finished` asks for it."""
    finished = vars(obj).get(_FINISHED)
    return answers if finished is None else _noting(answers, finished)


async def _noting(answers: AsyncIterator[dict], finished: dict[int, dict]) -> AsyncIterator[dict]:
    async for answer in answers:
        if answer["meta_info"].get("finish_reason"):
            finished[answer.get("index", 0)] = answer["meta_info"]
        yield answer


def shown(request: Any, meta_info: dict) -> dict | None:
    """Return a response's meta_info if it has particles or a trace, or is requested."""
    return meta_info if has_particles(meta_info) or vars(request).get(META_INFO_WISH) else None


async def with_meta_info(
    chunks: AsyncIterator[str], request: Any, finished: dict[int, dict]
) -> AsyncIterator[str]:
    """Yield a stream of the OpenAI routes, with what SGLang leaves out of some of its chunks.

    In those that end a choice it is meta_info, in the one with the whole usage the draft tokens.
    """
    async for chunk in chunks:
        # Within a text the quotes would be escaped.
        if '"finish_reason":"' in chunk:
            yield _ended(chunk, request, finished)
        elif '"choices":[]' in chunk and '"usage":{' in chunk:
            yield _counted(chunk, finished)
        else:
            yield chunk


async def with_logprobs(chunks: AsyncIterator[str], step: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yield the chunks of a step of a chat's stream, or one with its log-probabilities alone.

    Args:
        step: arguments of SGLang's `_generate_stream_content`.
    """
    is_empty = True
    async for chunk in chunks:
        is_empty = False
        yield chunk
    if is_empty:
        yield build_sse_content(
            chunk_id=step["content"]["meta_info"]["id"],
            created=step.get("created", int(time.time())),  # the oldest release: the chunk's own
            model=step["request"].model,
            index=step["index"],
            logprobs=step["choice_logprobs"],
        )


def _ended(chunk: str, request: Any, finished: dict[int, dict]) -> str:
    """Return a chunk that ends choices, with their meta_info."""
    body = _body_of(chunk)
    for choice in body["choices"]:
        meta_info = shown(request, finished.get(choice["index"], {}))
        if choice["finish_reason"] and meta_info:
            choice["meta_info"] = meta_info
    return _as_chunk(body)


def _counted(chunk: str, finished: dict[int, dict]) -> str:
    """Return the chunk with the usage of all choices, with their draft tokens."""
    body = _body_of(chunk)
    usage.add_details(body, finished.values())
    return _as_chunk(body)


def _body_of(chunk: str) -> dict[str, Any]:
    return json.loads(chunk.removeprefix("data: "))


def _as_chunk(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def note_finished(obj: GenerateReqInput) -> dict[int, dict]:
    """Return a dictionary that receives the meta_info of finished responses, by index."""
    finished: dict[int, dict] = {}
    setattr(obj, _FINISHED, finished)
    return finished


def has_particles(meta_info: dict) -> bool:
    return PARTICLES in meta_info or TRACE in meta_info
