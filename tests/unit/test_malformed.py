"""What SGLang lets pass, and then fails on: refused with the name of what is wrong."""

import functools
from typing import Any

import pytest
from hostile import HOSTILE
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_smc.guard.validation import check_fields, check_form, check_labels
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.server import presets

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
    ({"sampling_params": {"sampling_seed": 2**63}}, "integer of 64 bits; allowed"),
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
    ({"priority": 2**64}, "priority has an integer of 65 bits"),
    ({"session_params": {"nobody": 1}}, "session_params is malformed.*nobody"),
    ({"session_params": {"offset": "a"}}, "session_params is malformed.*offset"),
    ({"session_params": {"id": DEEP}}, "71 bits"),
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
