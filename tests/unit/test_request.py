"""What SMC cannot honour is refused by name; everything else passes."""

from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_smc.config import SMCConfig
from sglang_smc.request import check_request as check_request_of

SERVER = SMCConfig(num_particles=4, num_steps=3)

REFUSED_PARAMETERS: dict[str, Any] = {
    "frequency_penalty": 0.1,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
}
REFUSED_FIELDS: dict[str, Any] = {
    "custom_logit_processor": "processor",
    "max_thinking_tokens": 10,
    "lora_path": "adapter",
    "image_data": "image",
    "video_data": "video",
    "audio_data": "audio",
    "input_embeds": [[0.1]],
    "positional_embed_overrides": {"0": [0.1]},
    "return_hidden_states": True,
    "return_routed_experts": True,
    "return_indexer_topk": True,
    "return_sampling_mask": True,
    "return_entropy": True,
    "return_logprob": True,
}


def check_request(given: GenerateReqInput) -> None:
    check_request_of(given, SERVER)


def request(params: dict[str, Any] | None = None, **fields: Any) -> GenerateReqInput:
    return GenerateReqInput(input_ids=[1, 2], sampling_params=params, **fields)


@pytest.mark.parametrize("name", list(REFUSED_PARAMETERS))
def test_refused_sampling_parameters_are_named_with_their_value(name: str) -> None:
    value = REFUSED_PARAMETERS[name]
    with pytest.raises(ValueError) as raised:
        check_request(request({name: value, "max_new_tokens": 4}))
    assert f"{name}={value!r}" in str(raised.value)
    assert str(raised.value).startswith("SMC speculative decoding does not support")


@pytest.mark.parametrize("name", list(REFUSED_FIELDS))
def test_refused_fields_are_named_with_their_value(name: str) -> None:
    value = REFUSED_FIELDS[name]
    with pytest.raises(ValueError) as raised:
        check_request(request({"max_new_tokens": 4}, **{name: value}))
    assert f"{name}={value!r}" in str(raised.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        check_request(request(dict(REFUSED_PARAMETERS), **REFUSED_FIELDS))
    for name in (*REFUSED_PARAMETERS, *REFUSED_FIELDS):
        assert f"{name}=" in str(raised.value)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0},
        {"frequency_penalty": None, "logit_bias": None, "logit_bias_": {}, "regex": None},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "sampling_seed": 7},
        {"max_new_tokens": 9, "min_new_tokens": 3, "ignore_eos": True, "n": 4},
        {"stop": ["\n"], "stop_token_ids": [5], "stop_regex": "a+"},
        {"custom_params": {"other": 1}},
        {"custom_params": None},
        {"custom_params": {"smc": None}},
        {"custom_params": {"smc": {}, "other": 1}},
    ],
)
def test_what_smc_honours_passes(params: dict[str, Any] | None) -> None:
    check_request(request(params))


def test_scoring_requests_may_ask_for_log_probabilities() -> None:
    check_request(request({"max_new_tokens": 0}, return_logprob=True))
    with pytest.raises(ValueError, match="return_logprob=True"):
        check_request(request({"max_new_tokens": 1}, return_logprob=True))
    with pytest.raises(ValueError, match="return_logprob=True"):
        check_request(request({}, return_logprob=True))


def test_a_request_may_choose_for_itself_what_its_server_allows() -> None:
    check_request(request({"custom_params": {"smc": {"num_particles": 4, "mode": "exact"}}}))
    with pytest.raises(ValueError, match=r"custom_params\['smc'\] has num_particles=5; allowed"):
        check_request(request({"custom_params": {"smc": {"num_particles": 5}}}))


def test_scoring_requests_are_checked_too() -> None:
    with pytest.raises(ValueError, match="unknown key 'particles'"):
        check_request(request({"max_new_tokens": 0, "custom_params": {"smc": {"particles": 2}}}))


def test_unlimited_thinking_is_no_limit() -> None:
    check_request(request({}, max_thinking_tokens=-1))
