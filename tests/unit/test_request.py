"""What SMC cannot honour is refused by name; everything else passes."""

import re
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_smc.options.server import SMCConfig
from sglang_smc.server import refusals

SERVER = SMCConfig(num_particles=4, num_steps=3)
SECRET = {"key": "0x5ec7e7"}
REFUSED_FIELDS: dict[str, Any] = {
    **{name: name.partition("_")[0] for name in ("image_data", "video_data", "audio_data")},
    **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_indexer_topk"), True),
    **dict.fromkeys(("return_sampling_mask", "return_entropy"), True),
    **{name: [1] for name in ("multi_item_delimiter_indices", "token_indices_to_pool")},
    "max_thinking_tokens": 10,
    "input_embeds": [[0.1]],
    "positional_embed_overrides": {"0": [0.1]},
    "kv_hints": {"protocol_version": "1", "message_id": "a"},
    "watermark": SECRET,
}
REFUSED_PARAMS: dict[str, Any] = {"beam_width": 4, "watermark": SECRET}


def check(params: dict[str, Any] | None = None, **fields: Any) -> None:
    refusals.check_request(request(params, **fields), SERVER)


def request(params: dict[str, Any] | None = None, **fields: Any) -> GenerateReqInput:
    return GenerateReqInput(input_ids=[1, 2], sampling_params=params, **fields)


def test_what_is_refused_is_named_with_its_value() -> None:
    """Of parameters whatever the release: older ones refuse them before."""
    here = GenerateReqInput.__dataclass_fields__
    fields = {name: value for name, value in REFUSED_FIELDS.items() if name in here}
    hidden = ("watermark", "image_data", "video_data", "audio_data")  # long, or nobody's business
    each = [({}, {name: value}) for name, value in fields.items()]
    each += [({name: value}, {}) for name, value in REFUSED_PARAMS.items()]
    for params, field in each:
        ((name, value),) = {**params, **field}.items()
        with pytest.raises(ValueError, match=f"^SMC .* does not support {name}=") as raised:
            check(params, **field)
        assert f"{name}={'...' if name in hidden else repr(value)}. " in str(raised.value)
        assert "5ec7e7" not in str(raised.value), "a secret"
    with pytest.raises(ValueError, match=r"There are \d+ more of these\.$"):
        check(REFUSED_PARAMS, **fields)
    seen = request({}, image_data="image")
    refusals.check_request(seen, SERVER, served=["image_data"])
    for processed in ({"format": "processor_output"}, [[{"format": "precomputed_embedding"}]]):
        seen.image_data = processed
        with pytest.raises(ValueError, match="image_data has what is processed already"):
            refusals.check_request(seen, SERVER, served=["image_data"])
    seen.video_data = "video"
    with pytest.raises(ValueError, match="does not support video_data="):
        refusals.check_request(seen, SERVER, served=["image_data"])


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


HONOURED: list[dict[str, Any] | None] = [
    None,
    {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.2},
    dict.fromkeys(("frequency_penalty", "logit_bias", "regex", "beam_width", "watermark")),
    {"logit_bias": {"5": 1, "6": -1e9, "7": 0.5}, "beam_width": 1},
    {"logit_bias": {}, "temperature": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"max_new_tokens": 9, "min_new_tokens": 3, "ignore_eos": True, "n": 4, "sampling_seed": 7},
    {"stop": ["\n"], "stop_token_ids": [5], "stop_regex": "a+"},
    *({"custom_params": own} for own in (None, {"other": 1}, {"smc": None}, {"smc": {}, "o": 1})),
    {"custom_params": {"smc": {"num_particles": 4, "mode": "exact"}}},
    *({"json_schema": it} for it in (nested(99), "$$ANY$$", '{"const": "\\ud83d\\ude00"}')),
    *({"regex": it} for it in ("\n\t\\x00", "(")),
]


def test_what_smc_honours_passes() -> None:
    for params in HONOURED:
        check(params)
        check(params, max_thinking_tokens=-1)
        check(params, custom_logit_processor=DisallowedTokensLogitsProcessor.to_str())


NAN = float("nan")
HUGE = 1e39
BIAS = r"logit_bias=.*allowed: an object of token ids"
PROCESSOR = r"custom_logit_processor=.*allowed: what `to_str\(\)`"
SERIALIZED = ("code", "{}", "5", '{"callable": "xyz"}', '{"callable": 5}', "[" * 9999, 7, {"a": 1})
SMC_5 = {"num_particles": 5}
PARTICLES = {"particles": 2}
# Each of the first grammars would end the server, or be cut short.
GRAMMARS: list[tuple[str, Any, str]] = [
    *(("regex", text, "NUL") for text in ("\0", "a\0b")),
    ("ebnf", 'root ::= "a\0"', "NUL"),
    *(("json_schema", f"{{{it}}}", "NUL") for it in (r'"pattern": "\u0000"', r'"a\u0000": {}')),
    ("structural_tag", '{"format": {"type": "regex", "pattern": "\\u0000"}}', "NUL"),
    ("regex", "\ud800", "surrogate"),
    ("json_schema", '{"const": "\\ud800"}', "surrogate"),
    ("json_schema", "[" * 100_000, "too deeply"),
    ("structural_tag", nested(101), "too deeply"),
    ("regex", "a" * 100_001, "has 100001 characters; allowed: 100000"),
    ("json_schema", "{", "no JSON"),
    ("regex", 5, "a string"),
]


@pytest.mark.parametrize(
    ("params", "fields", "message"),
    [
        *(({"logit_bias": bias}, {}, BIAS) for bias in ([5], "5")),
        *(({"logit_bias": {"5": it}}, {}, BIAS) for it in ("much", None, NAN, HUGE, [1.0], True)),
        *(({}, {"custom_logit_processor": given}, PROCESSOR) for given in SERIALIZED),
        ({"custom_params": {"smc": SMC_5}}, {}, r"\['smc'\] has num_particles=5; allowed"),
        ({"max_new_tokens": 0, "custom_params": {"smc": PARTICLES}}, {}, "unknown key 'particles'"),
        *(({name: text}, {}, f"{name}.*{message}") for name, text, message in GRAMMARS),
    ],
)
def test_what_is_malformed_is_refused(params: dict, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(params, **fields)


@pytest.mark.parametrize("grammar", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_a_grammar_is_weighed_with_all_columns_or_verified(grammar: str) -> None:
    """The evidence of p within a grammar has no known mean; verification renormalises it."""

    def ask(**smc: Any) -> None:
        check({grammar: "{}", "custom_params": {"smc": smc}})

    for chosen in ({}, {"evidence_threshold": 0}, {"mode": "exact"}, {"power": 2.0}):
        ask(**chosen)
    ask(mode="auto", evidence_threshold=0.5)
    with pytest.raises(ValueError, match=r"evidence_threshold=0.5 beside a grammar; allowed: "):
        ask(evidence_threshold=0.5)


VOCAB_SIZE = 1000
SCORES = {"max_new_tokens": 0, "top_logprobs_num": VOCAB_SIZE}


def ask_logprobs(max_new_tokens: int = 4, vocab_size: int = VOCAB_SIZE, **fields: Any) -> None:
    given = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0, **fields}
    refusals.check_logprobs(request({"max_new_tokens": max_new_tokens}, **given), vocab_size)


def test_log_probabilities_within_bounds_pass() -> None:
    ask_logprobs()
    ask_logprobs(top_logprobs_num=128, token_ids_logprob=[5] * 128, logprob_start_len=0)
    ask_logprobs(**SCORES, token_ids_logprob=list(range(VOCAB_SIZE)))
    ask_logprobs(return_logprob=False, top_logprobs_num=10**9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs_num": 129}, "top_logprobs_num is 129; allowed: a whole number, 0 to 128"),
        ({"token_ids_logprob": [5] * 129}, "the length of token_ids_logprob is 129"),
        ({**SCORES, "top_logprobs_num": 1001}, "is 1001; allowed: a whole number, 0 to 1000"),
        ({"top_logprobs_num": 65, "vocab_size": 64}, "0 to 64"),
    ],
)
def test_log_probabilities_out_of_bounds_are_refused(fields: dict, message: str) -> None:
    """SGLang's scheduler would die of them, or hold more than there is memory for."""
    with pytest.raises(ValueError, match=re.escape(message)):
        ask_logprobs(**fields)


def traced(params: dict[str, Any], room: int = 10**6, **preferred: Any) -> None:
    """Check that a request with these parameters may have a trace, on N = 4 and K = 7."""
    server = SMCConfig(num_particles=4, num_steps=7)
    asked = request({"custom_params": {"smc": {"trace": True}}, **params})
    refusals.check_trace(asked, refusals.check_request(asked, server), room, preferred)


FITS = refusals.MOST_TRACED // 32


def test_a_trace_within_bounds_passes() -> None:
    """Red if the bound is of the server's N and K, or of more than the context leaves."""
    shorter, none = ({"smc": smc} for smc in ({"trace": True, "num_steps": 3}, {"trace": False}))
    traced({})  # SGLang's own 128
    traced({"max_new_tokens": 0})
    traced({"max_new_tokens": FITS})
    traced({"max_new_tokens": 2 * FITS, "custom_params": shorter})
    traced({"max_new_tokens": 9 * FITS, "custom_params": none})
    for asked in (None, 10**6):
        traced({"max_new_tokens": asked}, room=FITS)


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
    with pytest.raises(ValueError) as error:
        traced(params, **preferred)
    most = f"<= {refusals.MOST_TRACED}"
    for part in (given, f"num_steps=7 and {given};", most, f"at most {FITS} new"):
        assert part in str(error.value)
