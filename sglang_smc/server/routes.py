"""What HTTP routes lose of SMC's settings and answers, and a place to keep it.

`custom_params` exist on SGLang's OpenAI chat and completions routes alone: sent to another one they
are refused, since SGLang would ignore them. A model's name with a preset reaches the tokenizer
manager from those two and from Anthropic's; from `/v1/responses` and Ollama's it does not. What
these know travels in the `scope` of the HTTP request, which all routes hand to the tokenizer
manager.
"""

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import Request
from sglang.srt.managers.io_struct import GenerateReqInput
from transformers import BatchEncoding

from sglang_smc.process import is_smc
from sglang_smc.server import presets
from sglang_smc.server.prompt_length import check_conversation
from sglang_smc.state.counters import META_PREFIX

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

META_INFO_WISH = "return_meta_info"

# In the scope of an HTTP request: the preset that it names; whether its stream loses its last text.
_PRESET = "smc_preset"
_LOSES_LAST_TEXT = "smc_loses_last_text"
# On a request: what is known of its answers once they are finished, by their index.
_FINISHED = "smc_finished"

# How types of content begin that are no text, in the words of all routes.
_MEDIA = ("image", "input_image", "audio", "input_audio", "video", "input_video")

_NOT_CARRIED = ("custom_params", "lora_path")
_SHOWN = {META_PREFIX + "particles", META_PREFIX + "trace"}


def take_over(obj: GenerateReqInput, request: Any) -> None:
    """Give a request what its route has not handed on, or not as SGLang reads it."""
    # What the chat templates of later transformers return: Ollama's route before SGLang 0.5.23.
    ids: Any = obj.input_ids
    if isinstance(ids, BatchEncoding):
        obj.input_ids = ids["input_ids"]
    if isinstance(request, Request) and not obj.lora_path:
        obj.lora_path = request.scope.get(_PRESET)


def hand_back(answers: AsyncIterator[dict], obj: GenerateReqInput, request: Any) -> Any:
    """A request's answers, in the shape that its route does not lose anything of."""
    finished = vars(obj).get(_FINISHED)
    if finished is not None:
        return _noting(answers, finished)
    if isinstance(request, Request) and request.scope.get(_LOSES_LAST_TEXT) and obj.stream:
        return _ending_without_text(answers)
    return answers


async def _noting(answers: AsyncIterator[dict], finished: dict[int, dict]) -> AsyncIterator[dict]:
    async for answer in answers:
        if answer["meta_info"].get("finish_reason"):
            finished[answer.get("index", 0)] = answer["meta_info"]
        yield answer


async def _ending_without_text(answers: AsyncIterator[dict]) -> AsyncIterator[dict]:
    """The last answer twice: its text first, then that it was the last."""
    async for answer in answers:
        if answer["meta_info"].get("finish_reason"):
            yield {**answer, "meta_info": {**answer["meta_info"], "finish_reason": None}}
        yield answer


async def problem_of(
    manager: "TokenizerManager", model: str | None, raw_request: Request
) -> str | None:
    """What is to be refused; else the preset, if the model's name has one, is left in the scope."""
    if not is_smc(manager.server_args):
        return None
    body = await raw_request.json()
    medium = medium_in(body)
    if medium is not None:
        return no_media(medium)
    for place in (body, body.get("options")):  # Ollama's
        for key in _NOT_CARRIED:
            if isinstance(place, dict) and place.get(key) is not None:
                return _not_carried(key, manager)
    name = presets.named_by(model, manager.served_model_name)
    try:
        check_conversation(body, manager)
        if name is None:
            return None
        settings = presets.find(name, presets.of(manager.server_args))
    except ValueError as error:
        return str(error)
    shown_keys = presets.shows_in_answers(settings)
    if shown_keys:
        return (
            f"The preset {name!r} has {' and '.join(shown_keys)}, and this route's answers have no "
            "place for what that shows; allowed: /generate, /v1/chat/completions and "
            "/v1/completions."
        )
    raw_request.scope[_PRESET] = name
    return None


def medium_in(body: dict[str, Any]) -> str | None:
    """What a request of any route brings that is no text; None if it is text alone.

    SGLang tells some of it from text, where a model takes none: Ollama's route drops images.
    """
    messages = body.get("messages", body.get("input"))
    parts = [body, *(messages if isinstance(messages, list) else ())]
    for part in parts:  # which grows by what is within
        if not isinstance(part, dict):
            continue
        content = part.get("content")
        parts += content if isinstance(content, list) else ()
        kind = "images" if part.get("images") else part.get("type")
        if isinstance(kind, str) and kind.startswith(_MEDIA):
            return kind
    return None


def no_media(medium: str) -> str:
    """The answer to a request that brings some."""
    return (
        f"The request has content of type {medium!r}; allowed: text, since an SMC server "
        "writes text from text. Send text only."
    )


def _not_carried(key: str, manager: "TokenizerManager") -> str:
    names = ", ".join(map(repr, presets.of(manager.server_args))) or "none"
    return (
        f"{key} has no effect on this route; allowed: the name of a preset behind the model's, as "
        f"in 'model': '{manager.served_model_name}:NAME'. Presets of this server "
        f"({presets.FLAG}): {names}. /generate, /v1/chat/completions and /v1/completions take "
        "custom_params."
    )


def shown(request: Any, meta_info: dict) -> dict | None:
    """An answer's meta_info, where it has particles or a trace, or the request asks for it."""
    return meta_info if has_particles(meta_info) or vars(request).get(META_INFO_WISH) else None


async def with_meta_info(
    chunks: AsyncIterator[str], request: Any, finished: dict[int, dict]
) -> AsyncIterator[str]:
    """A stream of the OpenAI routes, with `shown` meta_info in the chunks that end its choices."""
    async for chunk in chunks:
        # Within a text the quotes would have a backslash before them.
        yield _ended(chunk, request, finished) if '"finish_reason":"' in chunk else chunk


def _ended(chunk: str, request: Any, finished: dict[int, dict]) -> str:
    """A chunk that ends choices, with their meta_info."""
    body = json.loads(chunk.removeprefix("data: "))
    for choice in body["choices"]:
        meta_info = shown(request, finished.get(choice["index"], {}))
        if choice["finish_reason"] and meta_info:
            choice["meta_info"] = meta_info
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def loses_last_text(raw_request: Request) -> None:
    """Have a request's stream end with an answer that has no text of its own."""
    raw_request.scope[_LOSES_LAST_TEXT] = True


def note_finished(obj: GenerateReqInput) -> dict[int, dict]:
    """Where the meta_info of a request's answers will stand once they are finished, by index."""
    finished: dict[int, dict] = {}
    setattr(obj, _FINISHED, finished)
    return finished


def has_particles(meta_info: dict) -> bool:
    """Whether an answer brings its particles, or what they did."""
    return not _SHOWN.isdisjoint(meta_info)
