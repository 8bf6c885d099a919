"""What SGLang lets pass, and then fails on: refused with the name of what is wrong."""

import functools
from typing import Any

import pytest
from hostile import HOSTILE
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_smc.guard.validation import check_fields, check_form, check_labels
from sglang_smc.options.request import KEYS, request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.printable import MOST_SHOWN, in_all, shown
from sglang_smc.server import presets
from sglang_smc.server.refusals import check_request

VOCAB = 64


def check(**fields: Any) -> None:
    """As a request comes in, and as SGLang then looks at each one of a batch."""
    given = {"input_ids": [1, 2], **fields}
    request = GenerateReqInput(**given)
    check_form(request, VOCAB)
    request.normalize_batch_and_arguments()
    single = [request] if request.is_single else [request[i] for i in range(request.batch_size)]
    for one in single:
        check_fields(one, VOCAB)


GOOD: tuple[dict[str, Any], ...] = (
    {},
    {"sampling_params": {"max_new_tokens": 5, "temperature": 0, "top_p": None, "top_k": -1}},
    {"sampling_params": {"stop": ["a", "b"], "stop_token_ids": [1, 2], "stop_regex": "a+"}},
    {"sampling_params": {"logit_bias": {"3": 1}, "custom_params": {"smc": {"mode": "exact"}}}},
    {"sampling_params": {"repetition_penalty": 0.01, "stop": ["a" * 512], "stop_regex": "a" * 256}},
    {"sampling_params": {"n": 3, "sampling_seed": -(2**63)}},
    {"input_ids": [[1], [2, 63]], "sampling_params": [{"n": 2}, {"n": 2}]},
    {"input_ids": None, "text": "t3 \u00e9"},
    {"input_ids": None, "text": ["t3", "t4"], "extra_key": ["a", "b"], "rid": ["x", "y"]},
    {"session_params": {"id": "a", "offset": 3}, "priority": 3, "extra_key": "a"},
    {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 64},
    {"multi_item_delimiter_indices": [1]},
    {"cache_salt": "a", "kv_hints": {"protocol_version": "1", "message_id": "a"}},
    {"input_ids": [[1], [2]], "cache_salt": ["a", "b"], "watermark": [None, None]},
)


def known(fields: dict[str, Any]) -> bool:
    return fields.keys() <= GenerateReqInput.__dataclass_fields__.keys()


@pytest.mark.parametrize("fields", [fields for fields in GOOD if known(fields)])
def test_requests_that_are_well_formed_pass(fields: dict[str, Any]) -> None:
    check(**fields)


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(10_000), 2**70)
ONE_OF_TWO: dict[str, Any] = {
    "sampling_params": [{}],
    "return_sampling_mask": [True],
    "multi_item_delimiter_indices": [[1]],
    "token_indices_to_pool": [[1]],
    "sampling_logprobs_mode": [None],
    "cache_salt": ["a"],
    "token_ids_logprob": [[5]],
    "bootstrap_host": ["a"],
}
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"sampling_params": {"max_new_tokens": True}}, "max_new_tokens"),
    ({"sampling_params": {"is_normalized": True}}, "unknown field `is_normalized`"),
    ({"sampling_params": {"stop_strs": ["a"]}}, "unknown field `stop_strs`"),
    ({"sampling_params": {"custom_params": {"smc": {"mode": {"a": 1}}}}}, "custom_params"),
    (
        {"sampling_params": {"sampling_seed": 2**63}},
        r"has 9223372036854775808; allowed: integers from -2\^63 to 2\^63 - 1",
    ),
    ({"priority": -(2**63) - 1}, "has -9223372036854775809; allowed: integers"),
    ({"sampling_params": {"temperature": 1e300}}, "1e\\+300; allowed: numbers up to 3.4e"),
    ({"sampling_params": {"top_k": 2**31}}, "top_k is 2147483648; allowed"),
    ({"sampling_params": {"n": 0}}, "n is 0; allowed: an integer from 1 to 4096"),
    ({"sampling_params": {"n": 4097}}, "n is 4097"),
    ({"sampling_params": {"n": None}}, "n is None"),
    ({"sampling_params": {"stop_regex": "(" * 250}}, "no regular expression"),
    ({"sampling_params": {"stop_regex": ["a", "a{2,1}"]}}, "no regular expression"),
    ({"sampling_params": {"stop_regex": "a" * 257}}, "a pattern of 257 bytes; allowed: 256"),
    ({"sampling_params": {"stop_regex": ["a{250}"] * 5}}, "1250 characters.*; allowed: 1024"),
    ({"sampling_params": {"stop_regex": ["a"] * 33}}, "stop_regex has 33 entries; allowed: 32"),
    ({"sampling_params": {"stop": ["a"] * 5000}}, "stop has 5000 entries; allowed: 32"),
    ({"sampling_params": {"stop": ["a", "b" * 513]}}, "of 513 characters; allowed: 512"),
    ({"sampling_params": {"repetition_penalty": 1e-40}}, "penalty is 1e-40; allowed: 0.01 to 2"),
    ({"sampling_params": {"stop": ["\ud800"]}}, "surrogate"),
    ({"sampling_params": [{}]}, "sampling_params has 1 entries; allowed: no list"),
    ({"input_ids": []}, "no prompt"),
    ({"input_ids": [[1], []]}, "at least one"),
    ({"input_ids": [3, VOCAB]}, "contains 64; allowed: token ids from 0 to 63"),
    ({"input_ids": [[3], [-1]]}, "contains -1"),
    ({"input_ids": [3, [4]]}, "a list of token ids"),
    ({"input_ids": ["a"]}, "A prompt is 'a'"),
    ({"input_ids": None, "text": "\ud800"}, "surrogate"),
    ({"input_ids": None, "text": ["a", 5]}, "text is 5"),
    ({"input_ids": None, "text": []}, "no prompt"),
    ({"rid": 5}, "rid"),
    ({"return_logprob": [True, False]}, "return_logprob has 2 entries"),
    ({"input_ids": [[1], [2]], "top_logprobs_num": [None, 3]}, "top_logprobs_num has null"),
    ({"logprob_start_len": -2}, "logprob_start_len is -2; allowed: an integer from -1"),
    ({"top_logprobs_num": VOCAB + 1}, "top_logprobs_num is 65"),
    ({"priority": 2**4000}, "priority has <an integer of 4001 bits>"),
    ({"session_params": {"nobody": 1}}, "session_params is malformed.*nobody"),
    ({"session_params": {"offset": "a"}}, "session_params is malformed.*offset"),
    ({"session_params": {"id": DEEP}}, str(2**70)),
    *(
        ({"input_ids": [[1], [2]], one: ONE_OF_TWO[one]}, "1 entries; allowed: 2")
        for one in ONE_OF_TWO
    ),
    ({"token_indices_to_pool": "a"}, "token_indices_to_pool"),
    ({"kv_hints": {"nobody": 1}}, "kv_hints"),
)


@pytest.mark.parametrize(("fields", "message"), [each for each in BAD if known(each[0])])
def test_what_would_fail_later_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": {HOSTILE: 1}},
        {"sampling_params": {"stop_regex": f"({HOSTILE}"}},
        {"sampling_params": {"stop_regex": f"(?P<{HOSTILE}>a)"}},
        {"session_params": {HOSTILE: 1}},
        {"rid": [HOSTILE]},
        {"preset": HOSTILE},
        {"preset": [HOSTILE]},
        {"sampling_params": {"custom_params": {"smc": {HOSTILE: 1}}}},
        {"sampling_params": {"custom_params": {"smc": {"mode": HOSTILE}}}},
        {"sampling_params": {"custom_params": {"smc": {"answer_pattern": HOSTILE}}}},
        {"sampling_params": {"custom_params": {"smc": {"potentials": [{"name": HOSTILE}]}}}},
    ],
)
def test_refusals_show_text_in_escapes(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as refused:
        presets.find(fields.pop("preset", "a"), {"a": {}}, ())
        check(**fields)
        request_config(SMCConfig(), fields["sampling_params"].get("custom_params"))
        raise AssertionError("not refused")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("allowed", "passes", "refused"),
    [
        (None, (None, {}), ({"user": "x"},)),
        (["a"], (None, {"a": "x"}), ({"a": "x", "b": "y"}, {"model_name": "x"}, "a", ["a"])),
    ],
)
def test_labels_of_metrics_that_there_are_not_are_refused(
    allowed: Any, passes: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    """Else SGLang's HTTP process ends with the first answer, and all requests with it."""
    for labels in passes:
        check_labels(GenerateReqInput(input_ids=[1], custom_labels=labels), allowed)
    told = f"custom_labels is .*; allowed: values of {', '.join(allowed or ['none'])}. Leave"
    for labels in refused:
        with pytest.raises(ValueError, match=told):
            check_labels(GenerateReqInput(input_ids=[1], custom_labels=labels), allowed)


LONG = "a" * 5_000
#: Of each kind that JSON or an engine's caller may send, the largest.
LARGE = st.sampled_from(
    (
        *(LONG, HOSTILE * 60, "{" * 5_000, 2**63, -(2**20_000), 1e300, float("nan"), True),
        *(DEEP, [LONG] * 50, list(range(5_000)), [[5] * 300] * 300, {LONG: LONG}),
        *({f"{LONG}{number}": number for number in range(50)}, {"a": {"b": {"c": DEEP}}}, [None]),
        *([{LONG: 1}] * 9, [{"name": LONG, "args": {LONG: LONG}}], [{"name": LONG, "when": LONG}]),
    )
)
PARAMS = st.sampled_from(
    [
        *("stop", "stop_regex", "logit_bias", "regex", "json_schema", "ebnf", "structural_tag"),
        *("n", "temperature", "top_k", "custom_params", "beam_width", "stop_token_ids", LONG),
    ]
)
FIELDS = st.sampled_from(
    [
        *("text", "input_ids", "sampling_params", "rid", "lora_path", "lora_id", "extra_key"),
        *("session_params", "custom_logit_processor", "image_data", "input_embeds", "priority"),
        *("return_logprob", "top_logprobs_num", "token_ids_logprob", "video_data"),
        "custom_labels",
    ]
)
MANY = 4


@settings(max_examples=150, deadline=None)
@given(
    fields=st.dictionaries(FIELDS, LARGE, max_size=MANY),
    params=st.none() | st.dictionaries(PARAMS, LARGE, max_size=MANY),
    smc=st.none() | st.dictionaries(st.sampled_from([*KEYS, LONG, HOSTILE]), LARGE),
)
def test_a_refusal_is_short_whatever_is_sent(
    fields: dict[str, Any], params: dict[str, Any] | None, smc: dict[str, Any] | None
) -> None:
    """Red where a value, a name or another library's message is told as long as it is."""
    if smc is not None:
        params = {**(params or {}), "custom_params": {"smc": smc}}
    if params is not None:
        fields = {**fields, "sampling_params": params}
    try:
        refuse(GenerateReqInput(**{"input_ids": [1, 2], **fields}), fields)
    except ValueError as error:
        assert len(str(error)) <= 700 and str(error).isprintable(), str(error)


def refuse(request: GenerateReqInput, fields: dict[str, Any]) -> None:
    """Look at a request as the server does, and at each part that other faults would hide."""
    check_labels(request, None)
    check_form(request, VOCAB)
    presets.put_in_place(request, {"a": {}}, (), SMCConfig())
    if fields.get("rid") is None and fields.get("text") is None:
        check_fields(request, VOCAB)
        check_request(request, SMCConfig())


@pytest.mark.parametrize(
    "value", ["a" * 40, 5, 2.5, None, [1, "b", {"c": (True, 2)}], {"b": 1, "a": 2}]
)
def test_a_short_value_is_shown_as_it_is(value: Any) -> None:
    assert shown(value) == repr(value)
    assert len(shown([value, LONG, DEEP])) <= MOST_SHOWN


def test_problems_that_are_not_told_are_counted() -> None:
    told = in_all([LONG[:400]] * 5)
    assert told.endswith(" There are 4 more of these.") and in_all(["a.", "b."]) == "a. b."
