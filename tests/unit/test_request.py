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
from sglang_smc.server.refusals import (
    MOST_TRACED,
    check_logprobs,
    check_request,
    check_session,
    check_trace,
)
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


def check(params: dict[str, Any] | None = None, **fields: Any) -> None:
    check_request(request(params, **fields), SERVER)


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


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        *(({"max_new_tokens": 4}, {name: REFUSED_FIELDS[name]}) for name in HERE),
        *(({name: value}, {}) for name, value in REFUSED_PARAMS.items()),
        (REFUSED_PARAMS, {name: REFUSED_FIELDS[name] for name in HERE}),
    ],
)
def test_what_is_refused_is_named_with_its_value(params: dict, fields: dict) -> None:
    """All of it at once. Of parameters whatever the release: older ones refuse them before."""
    with pytest.raises(ValueError) as raised:
        check(params, **fields)
    hidden = ("watermark", "image_data", "video_data", "audio_data")  # long, or nobody's business
    for name, value in {**params, **fields}.items():
        shown = "..." if name in hidden else repr(value)
        assert f"{name}={shown}" in str(raised.value) or name == "max_new_tokens"
    assert str(raised.value).startswith("SMC speculative decoding does not support")
    assert "5ec7e7" not in str(raised.value), "a secret"


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
        {"custom_params": {"smc": {"num_particles": 4, "mode": "exact"}}},
        {"beam_width": 1},
        {"beam_width": None, "watermark": None},
    ],
)
def test_what_smc_honours_passes(params: dict[str, Any] | None) -> None:
    check(params)
    check(params, max_thinking_tokens=-1)
    check(params, custom_logit_processor=DisallowedTokensLogitsProcessor.to_str())


VOCAB_SIZE = 1000


def ask_logprobs(max_new_tokens: int = 4, vocab_size: int = VOCAB_SIZE, **fields: Any) -> None:
    given = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0, **fields}
    check_logprobs(request({"max_new_tokens": max_new_tokens}, **given), vocab_size)


def test_log_probabilities_within_bounds_pass() -> None:
    """Bounds are those of requests that ask."""
    ask_logprobs()
    ask_logprobs(top_logprobs_num=128, token_ids_logprob=[5] * 128)
    ask_logprobs(logprob_start_len=0)
    scoring = {"top_logprobs_num": VOCAB_SIZE, "token_ids_logprob": list(range(VOCAB_SIZE))}
    ask_logprobs(max_new_tokens=0, **scoring)
    ask_logprobs(return_logprob=False, top_logprobs_num=10**9)


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
        ({"top_logprobs_num": 65, "vocab_size": 64}, "0 to 64"),
    ],
)
def test_log_probabilities_out_of_bounds_are_refused(fields: dict, message: str) -> None:
    """SGLang's scheduler would die of them, or hold more than there is memory for."""
    with pytest.raises(ValueError, match=re.escape(message)):
        ask_logprobs(**fields)


def test_a_turn_that_replaces_says_which() -> None:
    """Without a rid SGLang's scheduler would end."""
    check_session(request({}))
    check_session(request({}, session_params={"id": "s", "replace": False}))
    check_session(request({}, session_params={"id": "s", "replace": True, "rid": "turn"}))
    with pytest.raises(ValueError, match="replace=True without a rid; allowed: the rid"):
        check_session(request({}, session_params={"id": "s", "replace": True}))


NAN, HUGE = float("nan"), 1e39
BIAS = r"logit_bias=.*allowed: an object of token ids"
PROCESSOR = r"custom_logit_processor=.*allowed: what `to_str\(\)`"
SERIALIZED = ("code", "{}", "5", '{"callable": "xyz"}', '{"callable": 5}', "[" * 9999, 7, {"a": 1})


@pytest.mark.parametrize(
    ("params", "fields", "message"),
    [
        *(({"logit_bias": bias}, {}, BIAS) for bias in ([5], "5")),
        *(
            ({"logit_bias": {"5": value}}, {}, BIAS)
            for value in ("much", None, NAN, HUGE, [1.0], True)
        ),
        *(({}, {"custom_logit_processor": given}, PROCESSOR) for given in SERIALIZED),
        (
            {"custom_params": {"smc": {"num_particles": 5}}},
            {},
            r"custom_params\['smc'\] has num_particles=5; allowed",
        ),
        (
            {"max_new_tokens": 0, "custom_params": {"smc": {"particles": 2}}},
            {},
            "unknown key 'particles'",  # of requests that score, too
        ),
    ],
)
def test_what_is_malformed_is_refused(params: dict, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(params, **fields)


GRAMMARS = {"json_schema": "{}", "regex": "a+", "ebnf": "root ::= 'a'", "structural_tag": "{}"}


@pytest.mark.parametrize("name", list(GRAMMARS))
def test_a_grammar_is_weighed_with_all_columns_or_verified(name: str) -> None:
    """The evidence of p within a grammar has no known mean; verification renormalises it."""

    def ask(**smc: Any) -> None:
        check({name: GRAMMARS[name], "custom_params": {"smc": smc}})

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
        check({name: text})


def test_deep_and_strange_grammars_pass() -> None:
    for name, text in (
        ("json_schema", nested(99)),
        ("json_schema", "$$ANY$$"),
        ("json_schema", '{"const": "\\ud83d\\ude00"}'),
        ("regex", "\n\t\\x00"),
        ("regex", "("),
    ):
        check({name: text})


def traced(params: dict[str, Any], room: int = 10**6, **preferred: Any) -> None:
    """Whether a request with these sampling parameters may have a trace, on N = 4 and K = 7."""
    server = SMCConfig(num_particles=4, num_steps=7)
    asked = request({"custom_params": {"smc": {"trace": True}}, **params})
    check_trace(asked, check_request(asked, server), room, preferred)


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
    """Red if the bound is of the server's N and K, or of a chain too many at temperature 0.

    Nor is more counted than the context leaves.
    """
    traced(params)
    traced({"max_new_tokens": None}, room=FITS)
    traced({"max_new_tokens": 10**6}, room=FITS)


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
