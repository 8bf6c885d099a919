"""What SMC cannot honour is refused by name; everything else passes."""

import re
from typing import Any

import pytest
from request_fields import (
    GENERATE_REQUEST,
    GENERATE_REQUEST_SOME,
    REFUSED,
    REFUSED_SAMPLING,
    SAMPLING_PARAMS,
    SAMPLING_PARAMS_SOME,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from some_releases import contradictions

from sglang_smc.options.server import SMCConfig
from sglang_smc.server.refusals import MOST_TRACED, check_logprobs, check_session, check_trace
from sglang_smc.server.refusals import check_request as check_request_of
from sglang_smc.upstream import release

SERVER = SMCConfig(num_particles=4, num_steps=3)

REFUSED_FIELDS: dict[str, Any] = {
    "max_thinking_tokens": 10,
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
    "kv_hints": {"protocol_version": "1", "message_id": "a"},
    "multi_item_delimiter_indices": [1],
    "token_indices_to_pool": [1],
    "watermark": {"key": "0x5ec7e7"},
}
REFUSED_PARAMS: dict[str, Any] = {"beam_width": 4, "watermark": {"key": "0x5ec7e7"}}
HERE = [name for name in REFUSED_FIELDS if name in GenerateReqInput.__dataclass_fields__]


def check_request(given: GenerateReqInput) -> None:
    check_request_of(given, SERVER)


def request(params: dict[str, Any] | None = None, **fields: Any) -> GenerateReqInput:
    return GenerateReqInput(input_ids=[1, 2], sampling_params=params, **fields)


def test_every_field_of_sglang_has_been_looked_at() -> None:
    of_request = GenerateReqInput.__dataclass_fields__
    found = [
        *contradictions(of_request, GENERATE_REQUEST, GENERATE_REQUEST_SOME, release()),
        *contradictions(
            SamplingParams.__struct_fields__, SAMPLING_PARAMS, SAMPLING_PARAMS_SOME, release()
        ),
    ]
    assert found == []
    assert sorted(REFUSED_FIELDS) == sorted(REFUSED)
    assert sorted(REFUSED_PARAMS) == sorted(REFUSED_SAMPLING)


@pytest.mark.parametrize("name", HERE)
def test_refused_fields_are_named_with_their_value(name: str) -> None:
    value = REFUSED_FIELDS[name]
    with pytest.raises(ValueError) as raised:
        check_request(request({"max_new_tokens": 4}, **{name: value}))
    hidden = ("watermark", "image_data", "video_data", "audio_data")  # long, or nobody's business
    shown = "..." if name in hidden else repr(value)
    assert f"{name}={shown}" in str(raised.value)
    assert str(raised.value).startswith("SMC speculative decoding does not support")


@pytest.mark.parametrize("name", REFUSED_PARAMS)
def test_refused_sampling_parameters_are_named(name: str) -> None:
    """Whatever the release: one that does not know them refuses them before."""
    with pytest.raises(ValueError, match=f"does not support {name}=") as raised:
        check_request(request({name: REFUSED_PARAMS[name]}))
    assert "5ec7e7" not in str(raised.value), "a secret"


def test_one_beam_is_no_beam_search() -> None:
    check_request(request({"beam_width": 1}))
    check_request(request({"beam_width": None, "watermark": None}))


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        check_request(request(REFUSED_PARAMS, **{name: REFUSED_FIELDS[name] for name in HERE}))
    for name in (*HERE, *REFUSED_PARAMS):
        assert f"{name}=" in str(raised.value)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.2},
        {"frequency_penalty": None, "logit_bias": None, "regex": None},
        {"logit_bias": {"5": 1, "6": -1e9, "7": 0.5}},
        {"logit_bias": {}},
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


VOCAB_SIZE = 1000


def asking(max_new_tokens: int = 4, **fields: Any) -> GenerateReqInput:
    given = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0, **fields}
    return request({"max_new_tokens": max_new_tokens}, **given)


def test_log_probabilities_within_bounds_pass() -> None:
    check_logprobs(asking(), VOCAB_SIZE)
    check_logprobs(asking(top_logprobs_num=128, token_ids_logprob=[5] * 128), VOCAB_SIZE)
    check_logprobs(asking(logprob_start_len=0), VOCAB_SIZE)
    scoring = {"top_logprobs_num": VOCAB_SIZE, "token_ids_logprob": list(range(VOCAB_SIZE))}
    check_logprobs(asking(max_new_tokens=0, **scoring), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs_num": 129}, "top_logprobs_num is 129; allowed: a whole number, 0 to 128"),
        ({"top_logprobs_num": -1}, "top_logprobs_num is -1"),
        ({"top_logprobs_num": 2.5}, "top_logprobs_num is 2.5"),
        ({"top_logprobs_num": True}, "top_logprobs_num is True"),
        ({"token_ids_logprob": [5] * 129}, "the length of token_ids_logprob is 129"),
        ({"logprob_start_len": -2}, "logprob_start_len is -2; allowed: a whole number, -1 or more"),
        (
            {"top_logprobs_num": VOCAB_SIZE + 1, "max_new_tokens": 0},
            "top_logprobs_num is 1001; allowed: a whole number, 0 to 1000",
        ),
    ],
)
def test_log_probabilities_out_of_bounds_are_refused(fields: dict, message: str) -> None:
    """SGLang's scheduler would die of them, or hold more than there is memory for."""
    with pytest.raises(ValueError, match=re.escape(message)):
        check_logprobs(asking(**fields), VOCAB_SIZE)


def test_a_turn_that_replaces_says_which() -> None:
    """Without a rid SGLang's scheduler would end."""
    check_session(request({}))
    check_session(request({}, session_params={"id": "s", "replace": False}))
    check_session(request({}, session_params={"id": "s", "replace": True, "rid": "turn"}))
    with pytest.raises(ValueError, match="replace=True without a rid; allowed: the rid"):
        check_session(request({}, session_params={"id": "s", "replace": True}))


def test_a_small_vocabulary_bounds_log_probabilities() -> None:
    with pytest.raises(ValueError, match="0 to 64"):
        check_logprobs(asking(top_logprobs_num=65), 64)


def test_bounds_are_those_of_requests_that_ask() -> None:
    check_logprobs(asking(return_logprob=False, top_logprobs_num=10**9), VOCAB_SIZE)


@pytest.mark.parametrize(
    "bias",
    [
        [5],
        "5",
        {"5": "much"},
        {"5": None},
        {"5": float("nan")},
        {"5": 1e39},
        {"5": [1.0]},
        {"5": True},
    ],
)
def test_a_bias_is_a_number_for_each_token(bias: Any) -> None:
    with pytest.raises(ValueError, match=r"logit_bias=.*allowed: an object of token ids"):
        check_request(request({"logit_bias": bias}))


def test_a_processor_is_what_sglang_serialized() -> None:
    check_request(request({}, custom_logit_processor=DisallowedTokensLogitsProcessor.to_str()))
    for given in (
        "code",
        "{}",
        "5",
        '{"callable": "xyz"}',
        '{"callable": 5}',
        "[" * 9999,
        7,
        {"a": 1},
    ):
        with pytest.raises(
            ValueError, match=r"custom_logit_processor=.*allowed: what `to_str\(\)`"
        ):
            check_request(request({}, custom_logit_processor=given))


def test_a_request_may_choose_for_itself_what_its_server_allows() -> None:
    check_request(request({"custom_params": {"smc": {"num_particles": 4, "mode": "exact"}}}))
    with pytest.raises(ValueError, match=r"custom_params\['smc'\] has num_particles=5; allowed"):
        check_request(request({"custom_params": {"smc": {"num_particles": 5}}}))


def test_scoring_requests_are_checked_too() -> None:
    with pytest.raises(ValueError, match="unknown key 'particles'"):
        check_request(request({"max_new_tokens": 0, "custom_params": {"smc": {"particles": 2}}}))


def test_unlimited_thinking_is_no_limit() -> None:
    check_request(request({}, max_thinking_tokens=-1))


GRAMMARS = {"json_schema": "{}", "regex": "a+", "ebnf": "root ::= 'a'", "structural_tag": "{}"}


@pytest.mark.parametrize("name", list(GRAMMARS))
def test_a_grammar_is_weighed_with_all_columns_or_verified(name: str) -> None:
    """The evidence of p within a grammar has no known mean; verification renormalises it."""

    def ask(**smc: Any) -> None:
        check_request(request({name: GRAMMARS[name], "custom_params": {"smc": smc}}))

    for chosen in ({}, {"evidence_threshold": 0}, {"mode": "exact"}, {"power": 2.0}):
        ask(**chosen)
    ask(mode="mixed", evidence_threshold=0.5)
    with pytest.raises(ValueError, match=r"evidence_threshold=0.5 beside a grammar; allowed: "):
        ask(evidence_threshold=0.5)


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("regex", "\0", "NUL"),
        ("regex", "a\0b", "NUL"),
        ("ebnf", 'root ::= "a\0"', "NUL"),
        ("json_schema", '{"pattern": "\\u0000"}', "NUL"),
        ("json_schema", '{"properties": {"a\\u0000": {}}}', "NUL"),
        ("structural_tag", '{"format": {"type": "regex", "pattern": "\\u0000"}}', "NUL"),
        ("regex", "\ud800", "surrogate"),
        ("json_schema", '{"const": "\\ud800"}', "surrogate"),
        ("json_schema", "[" * 100_000, "too deeply"),
        ("structural_tag", nested(101), "too deeply"),
        ("regex", "a" * 100_001, "has 100001 characters; allowed: 100000"),
        ("json_schema", "{", "no JSON"),
        ("regex", 5, "a string"),
    ],
)
def test_grammars_that_would_end_the_server_are_refused(name: str, text: Any, message: str) -> None:
    """Each of the first ones did, or was cut short."""
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        check_request(request({name: text}))


def test_deep_and_strange_grammars_pass() -> None:
    for name, text in (
        ("json_schema", nested(99)),
        ("json_schema", "$$ANY$$"),
        ("json_schema", '{"const": "\\ud83d\\ude00"}'),
        ("regex", "\n\t\\x00"),
        ("regex", "("),
    ):
        check_request(request({name: text}))


def traced(params: dict[str, Any], room: int = 10**6, **preferred: Any) -> None:
    """Whether a request with these sampling parameters may have a trace, on N = 4 and K = 7."""
    server = SMCConfig(num_particles=4, num_steps=7)
    asked = request({"custom_params": {"smc": {"trace": True}}, **params})
    check_trace(asked, check_request_of(asked, server), room, preferred)


FITS = MOST_TRACED // 32


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": FITS},
        {},  # SGLang's own 128
        {"max_new_tokens": 2 * FITS, "custom_params": {"smc": {"trace": True, "num_steps": 3}}},
        {"max_new_tokens": 4 * FITS, "temperature": 0},
        {"max_new_tokens": 4 * FITS, "top_k": 1},
        {"max_new_tokens": 9 * FITS, "custom_params": {"smc": {"trace": False}}},
        {"max_new_tokens": 0},
    ],
)
def test_a_trace_within_bounds_passes(params: dict[str, Any]) -> None:
    """Red if the bound is of the server's N and K, or of a chain too many at temperature 0."""
    traced(params)


@pytest.mark.parametrize(
    ("params", "preferred", "given"),
    [
        ({"max_new_tokens": FITS + 1}, {}, f"max_new_tokens={FITS + 1}"),
        ({"max_new_tokens": None}, {}, "max_new_tokens=1000000 (all that its context leaves)"),
        ({}, {"max_new_tokens": FITS + 1}, f"max_new_tokens={FITS + 1}"),
    ],
)
def test_a_trace_that_may_grow_too_large_is_refused(
    params: dict[str, Any], preferred: dict[str, Any], given: str
) -> None:
    """What is given, what is allowed, and what to do."""
    with pytest.raises(ValueError) as error:
        traced(params, **preferred)
    for part in (given, f"num_steps=7 and {given};", f"<= {MOST_TRACED}", f"at most {FITS} new"):
        assert part in str(error.value)


def test_a_trace_is_bounded_by_what_fits_the_context() -> None:
    traced({"max_new_tokens": None}, room=FITS)
    traced({"max_new_tokens": 10**6}, room=FITS)
