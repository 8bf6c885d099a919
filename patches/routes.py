"""Carry SMC's settings and results through SGLang's HTTP routes (`server/routes.py`)."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from sglang_smc.guard.prompt_length import check_conversation
from sglang_smc.process import is_smc
from sglang_smc.server import presets, routes
from sglang_smc.server.hooks import Hooks

# Routes without custom_params.


_OPENAI = "sglang.srt.entrypoints.openai."
_OLLAMA = "sglang.srt.entrypoints.ollama.serving.OllamaServing."
_NO_FIELD = (
    "SGLang's model of this route's requests drops fields that it has not, and keeps the model's "
    "name to itself."
)
_OLLAMA_WHY = (
    " A wrong value is HTTP 500. A stream's last chunk tells that it is the last, and has no text: "
    "of SMC's that may be all."
)
_OLLAMA_END = (
    "SGLang's Ollama routes read the model's name, answer HTTP 400, and stream all of the text."
)
_PER_ROUTE = "SGLang's routes take custom_params and refuse fields that they do not know."
PATCHES = Hooks(
    why="SGLang shows meta_info on the chat route alone, on request and not in streams.",
    retire_when="SGLang shows meta_info on all OpenAI routes.",
)


@PATCHES.on(
    "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_messages",
    "srt/entrypoints/anthropic/serving.py:189 (the whole of the route)",
    why=_NO_FIELD,
    retire_when=_PER_ROUTE,
)
async def handle_messages(
    original: Callable, serving: AnthropicServing, request: Any, raw_request: Request
) -> Any:
    """Answer HTTP 400 to what Anthropic's route would ignore, and to what cannot fit.

    That is custom_params, unknown presets, and conversations that are longer than any that fits.
    The route passes on the model's name by itself.
    """
    manager = serving.openai_serving_chat.tokenizer_manager
    problem = await routes.problem_of(manager, request.model, raw_request)
    if problem:
        return serving._error_response(
            status_code=400, error_type="invalid_request_error", message=problem
        )
    return await original(serving, request, raw_request)


@PATCHES.on(
    _OPENAI + "serving_responses.OpenAIServingResponses.create_responses",
    "srt/entrypoints/openai/serving_responses.py:316 (the whole of the route)",
    why=_NO_FIELD,
    retire_when=_PER_ROUTE,
)
async def create_responses(
    original: Callable,
    serving: OpenAIServingResponses,
    request: Any,
    raw_request: Request | None = None,
) -> Any:
    """Pass on the preset of /v1/responses, and answer HTTP 400 to what the route would ignore."""
    if raw_request is not None:
        problem = await routes.problem_of(serving.tokenizer_manager, request.model, raw_request)
        if problem:
            return serving.create_error_response(problem)
    return await original(serving, request, raw_request)


@PATCHES.on(
    _OLLAMA + "handle_chat",
    "srt/entrypoints/ollama/serving.py:72 (the whole of the route)",
    why=_NO_FIELD + _OLLAMA_WHY,
    retire_when=_OLLAMA_END,
)
@PATCHES.on(
    _OLLAMA + "handle_generate",
    "srt/entrypoints/ollama/serving.py:172 (the whole of the route)",
    why=_NO_FIELD + _OLLAMA_WHY,
    retire_when=_OLLAMA_END,
)
async def handle_ollama(
    original: Callable, serving: OllamaServing, request: Any, raw_request: Request
) -> Any:
    """Pass on the preset in the model's name; answer HTTP 400, and stream the last text, too.

    HTTP 400 is for custom_params, unknown presets, conversations that cannot fit, and what else is
    wrong.
    """
    problem = await routes.problem_of(serving.tokenizer_manager, request.model, raw_request)
    if problem:
        return ORJSONResponse({"error": problem}, status_code=400)
    raw_request.scope[routes.LOSES_LAST_TEXT] = True
    try:
        return await original(serving, request, raw_request)
    except ValueError as error:
        return ORJSONResponse({"error": str(error)}, status_code=400)


@PATCHES.on(
    _OLLAMA + "_convert_options_to_sampling_params",
    "srt/entrypoints/ollama/serving.py:58 (the table of names)",
    why="SGLang calls it `seed`, which its sampling parameters do not know: HTTP 500.",
    retire_when="SGLang maps the seed to sampling_seed.",
)
def ollama_params(original: Callable, serving: OllamaServing, options: Any = None) -> dict:
    """Rename Ollama's seed to sampling_seed."""
    params = original(serving, options)
    if "seed" in params:
        params["sampling_seed"] = params.pop("seed")
    return params


# Conversations.


@PATCHES.on(
    _OPENAI + "serving_chat.OpenAIServingChat._process_messages",
    "srt/entrypoints/openai/serving_chat.py:1022 (ValueError is HTTP 400)",
    why="The chat route, and those that make a chat of theirs, tokenize before there is a "
    "request that the tokenizer manager sees; 30 MB take gigabytes and minutes.",
    retire_when="SGLang bounds a prompt's text before it tokenizes.",
)
def process_messages(
    original: Callable, serving: OpenAIServingBase, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Answer HTTP 400 to a conversation that cannot fit, before it is rendered and tokenized."""
    manager = serving.tokenizer_manager
    if is_smc(manager.server_args):
        check_conversation(vars(request), manager)
    return original(serving, request, *args, **kwargs)


# Particles on the OpenAI routes, in `meta_info`.


@PATCHES.on(
    _OPENAI + "serving_chat.OpenAIServingChat._build_chat_response",
    "srt/entrypoints/openai/serving_chat.py:2985 (meta_info, where asked for)",
    retire_when="SGLang shows an algorithm's own fields wherever they are asked for.",
)
def show_particles(
    original: Callable, serving: OpenAIServingBase, request: Any, ret: list[dict], created: int
) -> Any:
    """Show particles in a chat's meta_info without return_meta_info."""
    if any(routes.has_particles(item["meta_info"]) for item in ret):
        request.return_meta_info = True
    return original(serving, request, ret, created)


@PATCHES.on(
    _OPENAI + "serving_completions.OpenAIServingCompletion._build_completion_response",
    "srt/entrypoints/openai/serving_completions.py:532 (the whole answer)",
)
def completion_with_meta_info(
    original: Callable, serving: OpenAIServingBase, request: Any, ret: list[dict], created: int
) -> Any:
    """Show meta_info of completions, with return_meta_info or return_particles."""
    response = original(serving, request, ret, created)
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
    """Show meta_info in the chunk that ends a choice of a stream.

    Of chats it is shown where there are particles, since SGLang refuses return_meta_info with
    stream.
    """
    chunks = original(serving, adapted, request, raw_request)
    if not is_smc(serving.tokenizer_manager.server_args):
        return chunks
    return routes.with_meta_info(chunks, request, routes.note_finished(adapted))


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
                f"{routes.META_INFO_WISH} is {wish!r}; allowed: true or false."
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


@PATCHES.on(
    _OLLAMA + "get_tags",
    "srt/entrypoints/ollama/serving.py:287 (the whole of the list)",
    why="SGLang lists its one model.",
    retire_when="SGLang keeps named sampling parameters.",
)
def ollama_tags(original: Callable, serving: OllamaServing) -> Any:
    """List presets at /api/tags."""
    found = original(serving)
    manager = serving.tokenizer_manager
    if is_smc(manager.server_args):
        for name in presets.of(manager.server_args):
            tagged = f"{manager.served_model_name}:{name}"
            found.models.append(
                found.models[0].model_copy(update={"name": tagged, "model": tagged})
            )
    return found
