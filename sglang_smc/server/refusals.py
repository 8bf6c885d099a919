"""Validate requests of an SMC server against what SMC supports.

A setting that SMC cannot honor in p, in q and in the weights is refused by name, never ignored.
SGLang turns the ValueError into HTTP 400.
"""

import json
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_smc.guard.grammar_text import FIELDS as GRAMMARS
from sglang_smc.guard.grammar_text import check_grammars
from sglang_smc.guard.validation import change_params
from sglang_smc.options.request import CUSTOM_PARAMS, POTENTIALS_KEY, RequestConfig, request_config
from sglang_smc.options.server import SETTINGS, SMCConfig, out_of_range
from sglang_smc.potentials.spec import FLAG, declaration_problems, load
from sglang_smc.printable import in_all, shown
from sglang_smc.process import potentials_of
from sglang_smc.state.logprobs import MOST_LISTED
from sglang_smc.upstream import Arguments, resolved


class _Refusal(NamedTuple):
    field: str  # reads as None where this SGLang has no such field
    is_used: Callable[[Any], bool]
    instead: str
    is_shown: bool = True


def _is_not(default: float | None) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != default


MOST_TRACED = 2**19
"""The most tokens that the rounds of a traced request may draft, at one kept token a round."""

_DEFAULT_NEW_TOKENS: int | None = SamplingParams().max_new_tokens

_WITHOUT_IT = "Leave it out, or send the request to a server without --speculative-algorithm SMC"

_FIELDS = (
    _Refusal(
        "max_thinking_tokens",
        _is_not(-1),
        "Start the server with --enable-strict-thinking, and a --reasoning-parser that bans tokens "
        "in thoughts (qwen3, glm45, kimi_k2) or the environment variable SGLANG_MAX_THINK_TOKENS",
    ),
    _Refusal(
        "image_data", bool, "Send text only (--enable-multimodal serves some)", is_shown=False
    ),
    _Refusal("video_data", bool, "Send text only", is_shown=False),
    _Refusal("audio_data", bool, "Send text only", is_shown=False),
    _Refusal("input_embeds", bool, "Send text or input_ids"),
    _Refusal("positional_embed_overrides", bool, "Send text or input_ids"),
    _Refusal("return_hidden_states", bool, _WITHOUT_IT),
    _Refusal("return_routed_experts", bool, "Start the server with --enable-return-routed-experts"),
    _Refusal("return_indexer_topk", bool, _WITHOUT_IT),
    _Refusal("return_sampling_mask", bool, _WITHOUT_IT),
    _Refusal("return_entropy", bool, _WITHOUT_IT),
    _Refusal("watermark", _is_not(None), _WITHOUT_IT, is_shown=False),
    _Refusal("kv_hints", bool, "Leave it out: it is for external caches, which SMC refuses"),
    _Refusal("multi_item_delimiter_indices", bool, "Score each item in a request of its own"),
    _Refusal("token_indices_to_pool", bool, "Score each item without score_extraction_token"),
)
_SAMPLING = (
    _Refusal("beam_width", _is_not(1), "Leave it out; custom_params['smc'] sets num_particles"),
    _Refusal("watermark", _is_not(None), _WITHOUT_IT, is_shown=False),
)


def served_by(server_args: Arguments) -> list[str]:
    """Return the fields of requests that a server with these arguments takes, and others refuse."""
    by_flag = {
        "max_thinking_tokens": _limits_thoughts(server_args),
        "image_data": server_args.enable_multimodal,
        "return_routed_experts": server_args.enable_return_routed_experts,
    }
    return [field for field, is_on in by_flag.items() if is_on]


def _limits_thoughts(server_args: Arguments) -> bool:
    """Return whether SGLang's grammars count a thought's tokens.

    They do where they ban tokens in thoughts, or limit all thoughts; else a request's limit has
    no effect (`ReasonerGrammarBackend.enable_token_filter`).
    """
    name = server_args.reasoning_parser
    if not server_args.enable_strict_thinking or name is None:
        return False
    if envs.SGLANG_MAX_THINK_TOKENS.get() >= 0:
        return True
    return _bans_in_thoughts(name)


@cache
def _bans_in_thoughts(reasoning_parser: str) -> bool:
    """Return whether a reasoning parser names tokens that no thought may have."""
    try:
        parser = ReasoningParser(reasoning_parser, stream_reasoning=False)
        return bool(parser.detector.think_excluded_tokens)
    except ValueError:  # response templates need a tokenizer, and ban nothing
        return False


def check_request(
    request: GenerateReqInput, server: SMCConfig, *, served: Container[str] = ()
) -> RequestConfig:
    """Return the configuration of one request, within the bounds of ``server``.

    Raises ValueError naming all that SMC cannot honor, but fields that this server has ``served``.
    """
    params = _params(request)
    refused = [one for one in _FIELDS if one.field not in served]
    problems = _used(refused, lambda field: getattr(request, field, None))
    problems += _used(_SAMPLING, params.get)
    if problems:
        raise ValueError("SMC speculative decoding does not support " + in_all(problems))
    _check_images(request)
    _check_edits(params.get("logit_bias"), request.custom_logit_processor)
    check_grammars(params)
    constrained = any(params.get(field) for field in GRAMMARS)
    return request_config(server, params.get("custom_params"), constrained=constrained)


def check_trace(
    request: GenerateReqInput, config: RequestConfig, room: int, preferred: Mapping[str, Any]
) -> None:
    """Raise ValueError where a trace may grow too large to be kept and sent.

    Args:
        room: tokens that the context has left after its prompt.
        preferred: the server's default sampling parameters.
    """
    params = {**preferred, **_params(request)}
    if not config.trace or params.get("max_new_tokens") == 0:
        return
    asked = params.get("max_new_tokens", _DEFAULT_NEW_TOKENS)
    longest = max(0, room if asked is None else min(asked, room))
    of_each = config.num_particles * (config.num_steps + 1)
    if of_each * longest > MOST_TRACED:
        given = f"{longest}" if asked is not None else f"{longest} (all that its context leaves)"
        raise ValueError(
            f"{CUSTOM_PARAMS} has trace=true with num_particles={config.num_particles}, "
            f"num_steps={config.num_steps} and max_new_tokens={given}; allowed: num_particles * "
            f"(num_steps + 1) * max_new_tokens <= {MOST_TRACED}, since a trace holds all that is "
            f"drafted. Ask for at most {MOST_TRACED // of_each} new tokens, for fewer particles or "
            "steps, or leave trace out."
        )


def check_logprobs(request: GenerateReqInput, vocab_size: int) -> None:
    """Raise ValueError where one request sets more log-probabilities than a round returns.

    `guard.validation` checks that the numbers are some at all.
    """
    # Scoring (max_new_tokens = 0) runs no rounds, so that no bound applies.
    scores = _params(request).get("max_new_tokens") == 0
    most = vocab_size if scores else min(MOST_LISTED, vocab_size)
    listed = request.token_ids_logprob
    num_listed = len(listed) if isinstance(listed, list) else 0  # SGLang refuses what is no list
    each = {
        "top_logprobs_num": request.top_logprobs_num,
        "the length of token_ids_logprob": num_listed,
    }
    for name, given in each.items() if request.return_logprob else ():
        if given > most:
            raise ValueError(f"{name} is {shown(given)}; allowed: a whole number, 0 to {most}.")


def _params(request: GenerateReqInput) -> dict[str, Any]:
    params = request.sampling_params or {}
    assert isinstance(params, dict), "of one request, which `guard.validation` has looked at"
    return params


def _used(refusals: Iterable[_Refusal], read: Callable[[str], Any]) -> list[str]:
    return [
        f"{refusal.field}={shown(read(refusal.field)) if refusal.is_shown else '...'}. "
        f"{refusal.instead}."
        for refusal in refusals
        if refusal.is_used(read(refusal.field))
    ]


def _check_images(request: GenerateReqInput) -> None:
    """Raise ValueError for images in a session, and for features that SGLang would not check."""
    if request.image_data and request.session_params:
        raise ValueError("image_data is given in a session; allowed: text. Leave out one of both.")
    pending: list[Any] = [request.image_data]
    while pending:  # no recursion: a client may nest values arbitrarily deep
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        elif isinstance(one, dict):
            told = "image_data has what is processed already"
            raise ValueError(f"{told}; allowed: an image, its URL, path or base64.")


_HIGHEST_BIAS = 1e30  # does not overflow float32 at the lowest temperature


def _check_edits(logit_bias: Any, processor: Any) -> None:
    """Raise ValueError for logit edits that would end SGLang's scheduler."""
    if logit_bias is not None and not _is_bias(logit_bias):
        raise ValueError(
            f"logit_bias={shown(logit_bias)}; allowed: an object of token ids, as strings, and "
            f"numbers from -{_HIGHEST_BIAS:g} to {_HIGHEST_BIAS:g}."
        )
    if processor and not _is_serialized(processor):
        raise ValueError(
            f"custom_logit_processor={shown(processor)}; allowed: what `to_str()` of a subclass of "
            "sglang.srt.sampling.custom_logit_processor.CustomLogitProcessor returns."
        )


def _is_bias(given: Any) -> bool:
    return isinstance(given, dict) and all(
        isinstance(token, str) and type(value) in (int, float) and abs(value) <= _HIGHEST_BIAS
        for token, value in given.items()
    )


def _is_serialized(given: Any) -> bool:
    """Return whether SGLang could parse the processor; it is not loaded."""
    try:
        return bool(bytes.fromhex(json.loads(given)["callable"]))
    except (TypeError, KeyError, ValueError, RecursionError):
        return False


def potential_problems(server_args: Arguments) -> list[str]:
    """Return what is wrong with the server's potentials, a sentence each."""
    given = server_args.speculative_smc_potential
    if given is None:
        return []
    if not SETTINGS["potential"].allowed.holds(given):
        return [out_of_range("potential", given)]
    found = declaration_problems(given)
    if given and server_args.skip_tokenizer_init:
        found.append(
            f"{FLAG} is given with --skip-tokenizer-init; allowed: one of both, since potentials "
            "read texts. Leave --skip-tokenizer-init out."
        )
    seconds = server_args.speculative_smc_potential_timeout
    watchdog = server_args.watchdog_timeout
    if seconds is not None and watchdog and seconds >= watchdog:
        found.append(
            f"--speculative-smc-potential-timeout is {seconds:g} with --watchdog-timeout "
            f"{watchdog:g}; allowed: less, since SGLang ends a server whose batch takes that long."
        )
    return found


def check_offered(asked: RequestConfig, server_args: Arguments, where: str = CUSTOM_PARAMS) -> None:
    """Raise ValueError where a request names potentials or arguments that the server lacks.

    Errors call these settings ``where``; the server's arguments may be resolved or not.
    """
    if resolved(server_args).disaggregation_mode == "decode":
        _check_transferred(asked)
    potentials: Mapping[str, Any] = load(potentials_of(server_args)) if asked.potentials else {}
    for spec in asked.potentials:
        try:
            spec.resolve(potentials)
        except ValueError as error:
            raise ValueError(f"{where} has {error}") from error


def _check_transferred(asked: RequestConfig) -> None:
    """Raise ValueError where a prefill server without SMC cannot sample the first token.

    A trace would show it a second time behind a retraction.
    """
    options = {
        f"power={asked.power}": asked.power != 1.0,
        "potentials": asked.potentials,
        "structured output": asked.constrained,
        "trace=true": asked.trace,
    }
    if given := [name for name, present in options.items() if present]:
        raise ValueError(
            f"The request has {', '.join(given)} on a server with --disaggregation-mode decode; "
            "allowed: none of these, since a prefill server without SMC samples its first token. "
            "Send it to a server that prefills by itself."
        )


def pack(request: GenerateReqInput) -> None:
    """Convert the potentials that a request names to JSON text: SGLang passes on nothing deeper.

    Invalid requests are left to later validation; the caller's objects are not modified.
    """
    change_params(request, _packed)


def _packed(params: Any) -> Any:
    custom = params.get("custom_params") if isinstance(params, dict) else None
    smc = custom.get("smc") if isinstance(custom, dict) else None
    given = smc.get(POTENTIALS_KEY) if isinstance(smc, dict) else None
    if custom is None or smc is None or not isinstance(given, (list, tuple)):
        return params
    try:
        text = json.dumps(given)
    except (TypeError, ValueError, RecursionError):
        return params
    return {**params, "custom_params": {**custom, "smc": {**smc, POTENTIALS_KEY: text}}}
