"""Carry SMC's settings and results through HTTP routes that would drop them.

`custom_params` exist on SGLang's OpenAI chat and completions routes alone: other routes refuse
them, since SGLang would ignore them. A model's name with a preset reaches the tokenizer manager
from those two and from Anthropic's route; from `/v1/responses` and Ollama's it does not. For these
the preset is stored in the `scope` of the HTTP request, which all routes pass to the tokenizer
manager.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from fastapi import Request
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from transformers import BatchEncoding, PreTrainedTokenizerBase

from sglang_smc.guard.prompt_length import check_conversation
from sglang_smc.options.request import PARTICLES_KEY, TRACE_KEY
from sglang_smc.process import is_smc
from sglang_smc.server import presets
from sglang_smc.state.metrics import META_PREFIX

META_INFO_WISH = "return_meta_info"

# Keys in the scope of an HTTP request: its preset; whether its stream drops the last text.
_PRESET = "smc_preset"
LOSES_LAST_TEXT = "smc_loses_last_text"
# Attribute of a request: the meta_info of its finished responses, by their index.
_FINISHED = "smc_finished"

# Prefixes of content types other than text, on all routes.
_MEDIA = ("image", "input_image", "audio", "input_audio", "video", "input_video")

_NOT_CARRIED = ("custom_params", "lora_path")
_PARTICLES = META_PREFIX + "particles"
_TRACE = META_PREFIX + "trace"


def take_over(obj: GenerateReqInput, request: Any) -> None:
    """Set the fields of a request that its route drops, or passes in another form."""
    # Chat templates of later transformers return this, on Ollama's route before SGLang 0.5.23.
    ids: Any = obj.input_ids
    if isinstance(ids, BatchEncoding):
        obj.input_ids = ids["input_ids"]
    if isinstance(request, Request) and not obj.lora_path:
        obj.lora_path = request.scope.get(_PRESET)


def hand_back(answers: AsyncIterator[dict], obj: GenerateReqInput, request: Any) -> Any:
    """Return a request's responses, in a form of which its route drops nothing."""
    finished = vars(obj).get(_FINISHED)
    loses_text = isinstance(request, Request) and request.scope.get(LOSES_LAST_TEXT) and obj.stream
    return answers if finished is None and not loses_text else _handed_back(answers, finished)


async def _handed_back(
    answers: AsyncIterator[dict], finished: dict[int, dict] | None
) -> AsyncIterator[dict]:
    """Note each finished response; without ``finished`` yield its text before its finish reason."""
    async for answer in answers:
        meta_info = answer["meta_info"]
        if meta_info.get("finish_reason") and finished is not None:
            finished[answer.get("index", 0)] = meta_info
        elif meta_info.get("finish_reason"):
            yield {**answer, "meta_info": {**meta_info, "finish_reason": None}}
        yield answer


async def problem_of(
    manager: TokenizerManager, model: str | None, raw_request: Request
) -> str | None:
    """Return an error for a request; else store the preset in its model's name in the scope."""
    if not is_smc(manager.server_args):
        return None
    body = await raw_request.json()
    medium = _medium_in(body)
    if medium is not None:
        return (
            f"The request has content of type {medium!r}; allowed: text on this route. Send text "
            "only, or images to the chat route of a server with --enable-multimodal."
        )
    for place in (body, body.get("options")):  # Ollama's
        for key in _NOT_CARRIED:
            if isinstance(place, dict) and place.get(key) is not None:
                return _not_carried(key, manager)
    name = presets.named_by(model, manager.served_model_name)
    try:
        check_conversation(body, manager)
        known = presets.of(manager.server_args), manager.lora_ref_cache
        settings = (presets.find(name, *known) if name else None) or {}
    except ValueError as error:
        return str(error)
    shown_keys = [key for key in (PARTICLES_KEY, TRACE_KEY) if settings.get(key)]
    if shown_keys:
        return (
            f"The preset {name!r} has {' and '.join(shown_keys)}, and this route's answers have no "
            "place for what that shows; allowed: /generate, /v1/chat/completions and "
            "/v1/completions."
        )
    raw_request.scope[_PRESET] = name
    return None


def _medium_in(body: dict[str, Any]) -> str | None:
    """Return the first content type in a request that is not text, or None.

    SGLang ignores some such content where a model takes text alone: Ollama's route drops images.
    """
    messages = body.get("messages", body.get("input"))
    parts = [body, *(messages if isinstance(messages, list) else ())]
    for part in parts:  # grows by nested parts
        if not isinstance(part, dict):
            continue
        content = part.get("content")
        parts += content if isinstance(content, list) else ()
        kind = "images" if part.get("images") else part.get("type")
        if isinstance(kind, str) and kind.startswith(_MEDIA):
            return kind
    return None


def _not_carried(key: str, manager: TokenizerManager) -> str:
    names = ", ".join(map(repr, presets.of(manager.server_args))) or "none"
    return (
        f"{key} has no effect on this route; allowed: the name of a preset behind the model's, as "
        f"in 'model': '{manager.served_model_name}:NAME'. Presets of this server "
        f"({presets.FLAG}): {names}. /generate, /v1/chat/completions and /v1/completions take "
        "custom_params."
    )


def shown(request: Any, meta_info: dict) -> dict | None:
    """Return a response's meta_info if it has particles or a trace, or is requested."""
    return meta_info if has_particles(meta_info) or vars(request).get(META_INFO_WISH) else None


async def with_meta_info(
    chunks: AsyncIterator[str], request: Any, finished: dict[int, dict]
) -> AsyncIterator[str]:
    """Yield a stream of the OpenAI routes, with meta_info in the chunks that end its choices."""
    async for chunk in chunks:
        # Within a text the quotes would be escaped.
        yield _ended(chunk, request, finished) if '"finish_reason":"' in chunk else chunk


def _ended(chunk: str, request: Any, finished: dict[int, dict]) -> str:
    """Return a chunk that ends choices, with their meta_info."""
    body = json.loads(chunk.removeprefix("data: "))
    for choice in body["choices"]:
        meta_info = shown(request, finished.get(choice["index"], {}))
        if choice["finish_reason"] and meta_info:
            choice["meta_info"] = meta_info
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def note_finished(obj: GenerateReqInput) -> dict[int, dict]:
    """Return a dictionary that receives the meta_info of finished responses, by index."""
    finished: dict[int, dict] = {}
    setattr(obj, _FINISHED, finished)
    return finished


def has_particles(meta_info: dict) -> bool:
    """Return whether a response has particles or a trace."""
    return _PARTICLES in meta_info or _TRACE in meta_info


def add_texts(meta_info: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Decode the particles of a response, and each token of its trace.

    A particle's text leaves special tokens out, as texts of responses do; a token's own does not.
    """
    if tokenizer is None:
        return
    for particle in meta_info.get(_PARTICLES) or ():
        particle["text"] = tokenizer.decode(particle["output_ids"], skip_special_tokens=True)
    trace = meta_info.get(_TRACE)
    if trace and "pieces" not in trace:  # SGLang processes the end of a stream twice
        ids = sorted(_tokens_of(trace["rounds"]) | set(trace.get("emitted_after") or ()))
        trace["pieces"] = {str(one): tokenizer.decode([one]) for one in ids}


def _tokens_of(rounds: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return all tokens in a trace's rounds."""
    found: set[int] = set()
    for one in rounds:
        found.update(one.get("emitted_before") or (), one.get("begins") or ())
        found.update(one["emitted"], *one["drafted"])
        found.update(token for token in one["bonus"] if token is not None)
    return found
