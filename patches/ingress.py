"""Validate requests, and complete responses, in SGLang's tokenizer manager."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import msgspec
from fastapi import HTTPException
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    LoRAUpdateOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_smc.guard.prompt_length import check_texts
from sglang_smc.guard.validation import (
    check_fields,
    check_form,
    check_ids,
    check_labels,
    drop_foreign_stops,
)
from sglang_smc.patches.weights import released
from sglang_smc.process import config_of, is_smc
from sglang_smc.server import lists, presets, refusals, routes, streams, texts
from sglang_smc.server.hooks import Hooks
from sglang_smc.server.refusals import check_logprobs, check_request, check_trace
from sglang_smc.state.metrics import META_PREFIX, correct_proposed
from sglang_smc.upstream import NEWER, OLDER, resolved

PATCHES = Hooks()


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    "srt/managers/tokenizer_manager.py:745 (the first that sees a request)",
    why="SGLang compares few types: a wrong one fails as HTTP 500, or in the scheduler, which "
    "takes all other requests with it. It tokenizes a text before it looks at its length. "
    "Labels that its metrics lack end its own process. No algorithm is asked what a model's "
    "name means.",
    retire_when="SGLang checks the types of sampling_params, token ids and labels itself, and "
    "keeps named sampling parameters.",
)
def generate_request(
    original: Callable, manager: TokenizerManager, obj: Any, request: Any = None
) -> Any:
    """Validate a request's form, and resolve its preset, before all else.

    Values of wrong types, unknown or too large ones, and texts that are longer than any that fits
    are HTTP 400. The settings of the preset that lora_path names are put where the request's own
    would stand.
    """
    server_args = manager.server_args
    if not (is_smc(server_args) and isinstance(obj, GenerateReqInput)):
        return original(manager, obj, request)
    _check_memory(manager)
    refusals.pack(obj)
    check_form(obj, manager.model_config.vocab_size)
    drop_foreign_stops(obj, manager.model_config.vocab_size)
    check_texts(obj.text, manager)
    check_labels(obj, resolved(server_args).tokenizer_metrics_allowed_custom_labels)
    known = presets.of(server_args)
    presets.put_in_place(obj, known, manager.lora_ref_cache, config_of(server_args))
    refusals.pack(obj)
    answers = original(manager, obj, request)
    if not obj.stream and lists.shows_each(request):
        return lists.whole_or_each(answers)
    answers = routes.hand_back(answers, obj)
    if streams.reads_single_tokens(manager, obj, request):
        return streams.token_by_token(answers, manager, obj)
    return answers


def _check_memory(manager: TokenizerManager) -> None:
    if gone := released(manager):
        raise ValueError(f"Memory is released ({', '.join(sorted(gone))}): resume it first.")


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    "srt/managers/tokenizer_manager.py:1140 (raises ValueError for bad requests)",
    why="SGLang asks no algorithm which requests it takes, DFLASH's own check apart; fields "
    "that a worker does not read would be ignored.",
    retire_when="CustomSpecAlgo has a validate_request.",
)
def validate_request(
    original: Callable, manager: TokenizerManager, obj: Any, input_ids: list[int]
) -> None:
    """Answer HTTP 400 to a request with fields that SMC cannot honour, before it is processed."""
    if is_smc(manager.server_args) and isinstance(obj, GenerateReqInput):
        vocab_size = manager.model_config.vocab_size
        check_fields(obj, vocab_size)
        served = refusals.served_by(resolved(manager.server_args))
        config = check_request(obj, config_of(manager.server_args), served=served)
        refusals.check_offered(config, manager.server_args)
        check_ids(input_ids, vocab_size)
        room = manager.context_len - len(input_ids or ())
        check_trace(obj, config, room, manager.preferred_sampling_params or {})
        check_logprobs(obj, vocab_size)
        streams.note_prompt(obj, input_ids)
    original(manager, obj, input_ids)


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.create_abort_task",
    "srt/managers/tokenizer_manager.py:2431 (asks for is_single)",
    why="Two seconds behind a stream SGLang reads what normalize_batch_and_arguments sets: for a "
    "request that was refused before, its log has a traceback.",
    retire_when="SGLang looks for the requests that it has admitted alone.",
)
def create_abort_task(original: Callable, manager: TokenizerManager, obj: Any) -> Any:
    """Abort nothing behind the stream of a request that was refused before it had an id."""
    tasks = original(manager, obj)
    abort = tasks.tasks[0].func

    async def abort_admitted() -> None:
        if hasattr(obj, "is_single"):
            await abort()

    tasks.tasks[0].func = abort_admitted
    return tasks


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
    "srt/managers/tokenizer_manager.py:1914 (raises one of two errors, unless it streams)",
    "srt/managers/tokenizer_manager.py:2043 (yields what it returns)",
    "srt/managers/tokenizer_manager.py:2198 (the first error of an item ends a list)",
    why="One failure in a list that is not streamed takes all answers of that list.",
    retire_when="SGLang returns a list's answers beside its failures.",
)
async def keep_error(
    original: Callable, manager: TokenizerManager, out: dict, state: Any, is_stream: bool
) -> dict | None:
    """Keep the error of a request that SMC has ended beside its answer, until its list is whole."""
    try:
        return await original(manager, out, state, is_stream)
    except (ValueError, HTTPException) as error:
        if lists.is_kept(out):
            return lists.Failed(out, error)
        raise


_ONE_NAME: dict[str, Any] = {
    "why": "SGLang knows no other names that a request may give where it names an adapter.",
    "retire_when": "SGLang keeps named sampling parameters.",
}


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.load_lora_adapter",
    "srt/managers/tokenizer_control_mixin.py:672 (answers with success and error_message)",
    **_ONE_NAME,
)
@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.load_lora_adapter_from_tensors",
    "srt/managers/tokenizer_control_mixin.py:745 (answers as the other)",
    **_ONE_NAME,
)
async def load_lora_adapter(
    original: Callable, manager: TokenizerManager, obj: Any, request: Any = None
) -> Any:
    """Refuse a new adapter with the name of a preset."""
    if is_smc(manager.server_args) and obj.lora_name in presets.of(manager.server_args):
        told = presets.same_name(obj.lora_name)
        return LoRAUpdateOutput(success=False, error_message=told)
    return await original(manager, obj, request)


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_batch_request",
    "srt/managers/tokenizer_manager.py:2087 (of prompts in token ids)",
    why="Memory may have been released since the batch came in.",
    retire_when="SGLang refuses requests while memory is released.",
)
def send_batch(original: Callable, manager: TokenizerManager, tokenized: list) -> Any:
    """Refuse a batch if memory is released by now."""
    if is_smc(manager.server_args):
        _check_memory(manager)
    return original(manager, tokenized)


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
    "srt/managers/tokenizer_manager.py:1852 (the loop over samples)",
    why="All n share one sampling_params: with a seed they would be one text n times.",
    retire_when="SGLang tells parallel samples of a seeded request apart.",
)
def send_request(original: Callable, manager: TokenizerManager, tokenized: Any) -> Any:
    """Give the i-th of n parallel samples the seed + i; refuse it if memory is released by now."""
    if is_smc(manager.server_args) and isinstance(tokenized, TokenizedGenerateReqInput):
        _check_memory(manager)
        tokenized.sampling_params = _sample_params(tokenized.sampling_params)
    return original(manager, tokenized)  # to be awaited, except in the oldest release


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    "srt/managers/tokenizer_manager.py:2578 (with each request's finish reason)",
    why="customized_info carries lists with one element per token, for all requests of a batch "
    "as soon as one of them has a field; totals are numbers of a finished request.",
    retire_when="customized_info can carry a value per request.",
    family=NEWER,
)
def update_meta_info(
    original: Callable,
    manager: TokenizerManager,
    meta_info: dict,
    state: Any,
    customized_info: dict,
    index: int,
    finish_reason: dict | None,
) -> None:
    """Unwrap spec_smc_* in the final meta_info, and decode the tokens of particles and traces.

    Chunks of requests that have not finished have none of it. SGLang has lists with an entry for
    each token, and empty ones for requests without a field.
    """
    others = {name: of for name, of in customized_info.items() if not name.startswith(META_PREFIX)}
    original(manager, meta_info, state, others, index, finish_reason)
    for name in () if finish_reason is None else customized_info.keys() - others.keys():
        if (values := customized_info[name][index]) and _is_own(name, values[-1]):
            meta_info[name] = values[-1]
    texts.add_texts(meta_info, manager)


def _is_own(name: str, value: Any) -> bool:
    """Return whether a field is the request's own: None stands where only others have it."""
    return value is not None or name == META_PREFIX + "log_evidence"


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
    "srt/managers/tokenizer_manager.py:3156 (proposed: --speculative-num-steps in each round)",
    why="SGLang counts drafts as proposed in rounds that draft none, or fewer than the server's K.",
    retire_when="A request may carry its own number of proposed drafts.",
    family=NEWER,
)
def count_proposed(
    original: Callable, manager: TokenizerManager, meta_info: dict, recv_obj: Any, i: int
) -> None:
    """Count the tokens that a request's rounds have drafted as those proposed."""
    original(manager, meta_info, recv_obj, i)
    correct_proposed(meta_info)


@PATCHES.on(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
    "srt/managers/tokenizer_manager.py, of the oldest release",
    why="customized_info carries lists with one element per token; totals are numbers.",
    retire_when="`upstream.OLDER` leaves.",
    family=OLDER,
)
def add_meta_info(
    original: Callable, manager: TokenizerManager, meta_info: dict, recv_obj: Any, i: int
) -> None:
    """Unwrap spec_smc_* in the final meta_info, which the oldest release has as lists.

    Drafts that its rounds have not made are not counted as proposed.
    """
    original(manager, meta_info, recv_obj, i)
    accumulated = manager.rid_to_state[recv_obj.rids[i]].customized_info_accumulated
    for name, values in list(accumulated.items()):
        if name.startswith(META_PREFIX):
            meta_info[name] = values[-1] if values else None
            if not _is_own(name, meta_info[name]):  # SGLang reads it again as it ends a stream
                del meta_info[name], accumulated[name]
    correct_proposed(meta_info)
    texts.add_texts(meta_info, manager)


# SGLang sends the n samples of a request one after another, all with one object, in one task;
# samples of other requests, in their tasks, may come between.
_last_sample: ContextVar[tuple[Any, int]] = ContextVar("last_sample", default=(None, 0))


def _sample_params(params: Any) -> Any:
    if params.n == 1 or params.sampling_seed is None or params.max_new_tokens == 0:
        return params
    last, index = _last_sample.get()
    index = index + 1 if last is params else 0
    _last_sample.set((params, index))
    return msgspec.structs.replace(params, sampling_seed=params.sampling_seed + index)
