"""Bound conversations, and carry SMC's results through SGLang's HTTP routes."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

from sglang_smc.guard.prompt_length import check_conversation
from sglang_smc.printable import shown
from sglang_smc.process import is_smc
from sglang_smc.server import presets, routes, usage
from sglang_smc.server.hooks import Hooks

_OPENAI = "sglang.srt.entrypoints.openai."
PATCHES = Hooks(
    why="SGLang shows meta_info on the chat route alone, on request and not in streams.",
    retire_when="SGLang shows meta_info on all OpenAI routes.",
)


# Conversations.

_CONVERSATIONS = {
    "why": "Routes of conversations tokenize before there is a request that the tokenizer manager "
    "sees; 30 MB take gigabytes and minutes.",
    "retire_when": "SGLang bounds a prompt's text before it tokenizes.",
}


@PATCHES.on(
    _OPENAI + "serving_chat.OpenAIServingChat._process_messages",
    "srt/entrypoints/openai/serving_chat.py:1022 (of /v1/messages and /v1/responses, too)",
    **_CONVERSATIONS,
)
@PATCHES.on(
    _OPENAI + "serving_responses.OpenAIServingResponses._make_request_with_harmony",
    "srt/entrypoints/openai/serving_responses.py:416 (of gpt-oss; ValueError is HTTP 400)",
    **_CONVERSATIONS,
)
@PATCHES.on(
    "sglang.srt.entrypoints.ollama.serving.OllamaServing.handle_chat",
    "srt/entrypoints/ollama/serving.py:72 (ValueError is HTTP 500, as all that is wrong there)",
    **_CONVERSATIONS,
)
def bound_conversation(
    original: Callable, serving: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a conversation that cannot fit, before it is rendered and tokenized.

    A preset in chat_template_kwargs is taken out, before SGLang looks for adapters' names.
    """
    manager = serving.tokenizer_manager
    if is_smc(manager.server_args):
        check_conversation(vars(request), manager)
        presets.take_from_template(request, presets.of(manager.server_args))
    return original(serving, request, *args, **kwargs)


# Particles on the OpenAI routes, in `meta_info`, and draft tokens in `usage`.


@PATCHES.on(
    _OPENAI + "serving_chat.OpenAIServingChat._build_chat_response",
    "srt/entrypoints/openai/serving_chat.py:2985 (meta_info, where asked for)",
    why="SGLang shows meta_info on request alone, and no draft tokens in usage.",
    retire_when="SGLang shows an algorithm's own fields wherever they are asked for, and counts "
    "draft tokens as OpenAI's usage does.",
)
def show_particles(
    original: Callable, serving: OpenAIServingBase, request: Any, ret: list[dict], created: int
) -> Any:
    """Show particles in a chat's meta_info without return_meta_info; count draft tokens."""
    if any(routes.has_particles(item["meta_info"]) for item in ret):
        request.return_meta_info = True
    response = original(serving, request, ret, created)
    if not is_smc(serving.tokenizer_manager.server_args):
        return response
    return usage.with_details(response, [item["meta_info"] for item in ret])


@PATCHES.on(
    _OPENAI + "serving_completions.OpenAIServingCompletion._build_completion_response",
    "srt/entrypoints/openai/serving_completions.py:532 (the whole answer)",
)
def completion_with_meta_info(
    original: Callable, serving: OpenAIServingBase, request: Any, ret: list[dict], created: int
) -> Any:
    """Show meta_info of completions, with return_meta_info or return_particles; count drafts."""
    response = original(serving, request, ret, created)
    if is_smc(serving.tokenizer_manager.server_args):
        response = usage.with_details(response, [item["meta_info"] for item in ret])
    shown = [routes.shown(request, item["meta_info"]) for item in ret]
    if not any(shown):
        return response
    body = response.model_dump()
    for choice, meta_info in zip(body["choices"], shown, strict=True):
        choice["meta_info"] = meta_info
    return ORJSONResponse(body)


@PATCHES.on(
    _OPENAI + "serving_chat.OpenAIServingChat._generate_chat_stream",
    "srt/entrypoints/openai/serving_chat.py:2441 (makes the whole stream)",
)
@PATCHES.on(
    _OPENAI + "serving_completions.OpenAIServingCompletion._generate_completion_stream",
    "srt/entrypoints/openai/serving_completions.py:225 (makes the whole stream)",
)
def stream_with_meta_info(
    original: Callable, serving: OpenAIServingBase, adapted: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    """Show meta_info in the chunk that ends a choice of a stream, and count draft tokens in usage.

    Of chats it is shown where there are particles, since SGLang refuses return_meta_info with
    stream.
    """
    chunks = original(serving, adapted, request, raw_request)
    if not is_smc(serving.tokenizer_manager.server_args):
        return chunks
    return routes.with_meta_info(chunks, request, routes.note_finished(adapted))


@PATCHES.on(
    _OPENAI + "serving_chat.OpenAIServingChat._generate_stream_content",
    "srt/entrypoints/openai/serving_chat.py:772 (flushes them where there is a parser)",
    "srt/entrypoints/openai/serving_chat.py:1575 (passes all by keyword)",
    why="SGLang drops the log-probabilities of a step without text, such as one that ends within a "
    "character, on servers without a parser. A round's step has those of several tokens.",
    retire_when="SGLang sends them on servers without a parser, too.",
)
def stream_all_logprobs(
    original: Callable, serving: OpenAIServingBase, *args: Any, **step: Any
) -> AsyncIterator[str]:
    """Send the log-probabilities of a chat stream's step that has no text, as with a parser."""
    chunks = original(serving, *args, **step)
    if step["choice_logprobs"] is None or not is_smc(serving.tokenizer_manager.server_args):
        return chunks
    return routes.with_logprobs(chunks, step)


@PATCHES.on(
    _OPENAI + "serving_completions.OpenAIServingCompletion.handle_request",
    "srt/entrypoints/openai/serving_base.py:80 (the whole of the route)",
)
async def take_meta_info_wish(
    original: Callable, serving: OpenAIServingBase, request: Any, raw_request: Request
) -> Any:
    """Read return_meta_info of completions; SGLang has the field on the chat route alone."""
    if is_smc(serving.tokenizer_manager.server_args) and raw_request is not None:
        wish = (await raw_request.json()).get(routes.META_INFO_WISH)
        if wish not in (None, True, False):
            return serving.create_error_response(
                f"{routes.META_INFO_WISH} is {shown(wish)}; allowed: true or false."
            )
        vars(request)[routes.META_INFO_WISH] = wish
    return await original(serving, request, raw_request)


# Lists of models.


@PATCHES.on(
    "sglang.srt.entrypoints.http_server.set_global_state",
    "srt/entrypoints/http_server.py:2856 (called once the model is there)",
    "srt/entrypoints/http_server.py:1993 (the routes)",
    why="SGLang lists its model and its LoRA adapters; FastAPI keeps the functions of its "
    "routes, so that a hook on these is not called.",
    retire_when="SGLang keeps named sampling parameters.",
)
def list_presets(original: Callable, global_state: Any) -> None:
    """List presets at /v1/models, by routes before SGLang's that call them."""
    from sglang.srt.entrypoints import http_server

    original(global_state)
    manager = global_state.tokenizer_manager
    if manager is not None and is_smc(manager.server_args):
        names = list(presets.of(manager.server_args))
        _route_models(http_server.app, http_server, manager.served_model_name, names)


def _route_models(app: FastAPI, stock: Any, served: str, names: Iterable[str]) -> None:
    listed = [f"{served}:{name}" for name in names]
    router = APIRouter(default_response_class=ORJSONResponse)

    async def card_of(name: str) -> Any:
        card = await stock.retrieve_model(served)
        return card.model_copy(update={"id": name, "root": served, "parent": served})

    @router.get("/v1/models")
    async def available_models() -> Any:
        found = await stock.available_models()
        found.data += [await card_of(name) for name in listed]
        return found

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Any:
        return await (card_of(model) if model in listed else stock.retrieve_model(model))

    app.router.routes[:0] = router.routes
