"""Which requests an SMC server takes, and what it answers to the others.

What SMC cannot honour in p, in q and in the weights is refused by name, never
ignored. SGLang turns the ValueError into HTTP 400.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_smc.config import SMCConfig
from sglang_smc.request_config import request_config

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput


class _Refusal(NamedTuple):
    field: str
    is_used: Callable[[Any], bool]
    instead: str


def _is_not(default: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != default


_WITHOUT_IT = "Leave it out, or send the request to a server without --speculative-algorithm SMC"

_PARAMETERS = (
    _Refusal("frequency_penalty", _is_not(0.0), "Only 0 is allowed"),
    _Refusal("presence_penalty", _is_not(0.0), "Only 0 is allowed"),
    _Refusal("repetition_penalty", _is_not(1.0), "Only 1 is allowed"),
    _Refusal("logit_bias", bool, _WITHOUT_IT),
    _Refusal("json_schema", bool, _WITHOUT_IT),
    _Refusal("regex", bool, _WITHOUT_IT),
    _Refusal("ebnf", bool, _WITHOUT_IT),
    _Refusal("structural_tag", bool, _WITHOUT_IT),
)

_FIELDS = (
    _Refusal("custom_logit_processor", bool, _WITHOUT_IT),
    _Refusal("max_thinking_tokens", _is_not(-1), _WITHOUT_IT),
    _Refusal("lora_path", bool, _WITHOUT_IT),
    _Refusal("image_data", bool, "Send text only"),
    _Refusal("video_data", bool, "Send text only"),
    _Refusal("audio_data", bool, "Send text only"),
    _Refusal("input_embeds", bool, "Send text or input_ids"),
    _Refusal("positional_embed_overrides", bool, "Send text or input_ids"),
    _Refusal("return_hidden_states", bool, _WITHOUT_IT),
    _Refusal("return_routed_experts", bool, _WITHOUT_IT),
    _Refusal("return_indexer_topk", bool, _WITHOUT_IT),
    _Refusal("return_sampling_mask", bool, _WITHOUT_IT),
    _Refusal("return_entropy", bool, _WITHOUT_IT),
)

# Scoring (max_new_tokens = 0) never meets the draft, so its log-probabilities are SGLang's own.
_GENERATED_LOGPROBS = (
    _Refusal(
        "return_logprob", bool, "Only scoring requests, with max_new_tokens 0, may ask for logprobs"
    ),
)


def check_request(request: "GenerateReqInput", server: SMCConfig) -> None:
    """Raise ValueError that names every field of one request that SMC cannot honour.

    ``server`` bounds what the request may choose for itself.
    """
    params = request.sampling_params or {}
    problems = [
        *_used(_PARAMETERS, params.get),
        *_used(_FIELDS, lambda field: getattr(request, field)),
    ]
    if params.get("max_new_tokens") != 0:
        problems += _used(_GENERATED_LOGPROBS, lambda field: getattr(request, field))
    if problems:
        raise ValueError("SMC speculative decoding does not support " + " ".join(problems))
    request_config(server, params.get("custom_params"))


def _used(refusals: tuple[_Refusal, ...], read: Callable[[str], Any]) -> list[str]:
    return [
        f"{refusal.field}={read(refusal.field)!r}. {refusal.instead}."
        for refusal in refusals
        if refusal.is_used(read(refusal.field))
    ]
