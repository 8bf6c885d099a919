"""Validate requests: reject wrong types, values out of range, and unknown fields.

SGLang checks most of a request's values but not their types. A request that it cannot handle then
fails as HTTP 500, or in the scheduler, which takes the server down with all of its requests. So
types are compared with those that SGLang declares, as soon as a request comes in. SGLang turns the
ValueError into HTTP 400.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_smc.guard.pattern import num_places
from sglang_smc.printable import reason, shown

MAX_SAMPLES = 4096
"""The most parallel samples: SGLang makes a request of each, before it checks."""

MAX_STOPS = 32
"""The most stop strings, and stop patterns, of one request: the bound of later SGLang releases."""

MAX_STOP_LENGTH = 512
"""The longest stop string: so much text is searched again for each token of each particle."""

MAX_PATTERN_BYTES = 256  # the bound of later SGLang releases
MAX_ALL_PLACES = 1024
"""The most places of all patterns of a request (`guard.pattern`), the cost per character."""

LEAST_PENALTY = 0.01
"""The least repetition_penalty: logits are divided by it, and must not overflow float32 with a
logit_bias and the lowest temperature."""

_INT64 = range(-(2**63), 2**63)
_FLOAT32 = 3.4e38


def _like(struct: type, names: Iterable[str]) -> Any:
    """Return a type of some fields of a struct, each optional or null, that forbids all others."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    optional = [(name, Optional[types[name]], None) for name in names]  # noqa: UP045 -- at run time
    return msgspec.defstruct(struct.__name__, optional, forbid_unknown_fields=True, kw_only=True)


def _is_plain(kind: msgspec.inspect.Type) -> bool:
    """Return whether a type consists of JSON's types."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return all(map(_is_plain, kind.types))
    if isinstance(kind, msgspec.inspect.ListType):
        return _is_plain(kind.item_type)
    return not isinstance(kind, (msgspec.inspect.CustomType, msgspec.inspect.StructType))


# SGLang fills these in itself; from a client they would pass unchecked.
_INTERNAL = (
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
)
_Params = _like(
    SamplingParams, (name for name in SamplingParams.__struct_fields__ if name not in _INTERNAL)
)
_SessionParams = _like(SessionParams, SessionParams.__struct_fields__)
# Fields that go to the scheduler as the client sent them.
_FIELDS = [
    field.name
    for field in msgspec.structs.fields(TokenizedGenerateReqInput)
    if field.name in GenerateReqInput.__dataclass_fields__
    and _is_plain(msgspec.inspect.type_info(field.type))
]
# Fields that may be a list with a value for each request of a batch.
_BATCHED = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_hidden_states",
    "custom_logit_processor",
    "extra_key",
    "cache_salt",
    "lora_path",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)
_NESTED = ("multi_item_delimiter_indices", "token_indices_to_pool")  # lists of one prompt's, too
_Fields = _like(TokenizedGenerateReqInput, _FIELDS)


def check_form(request: GenerateReqInput, vocab_size: int) -> None:
    """Raise ValueError for a request that is not valid, in the form that its client has sent."""
    for name, value in vars(request).items():
        if name != "input_ids":
            _check_numbers(name, value)
    _check_batch(request)
    for text in _each(request.text):
        _check_text(text)
    for ids in _prompts(request.input_ids):
        check_ids(ids, vocab_size)
    for params in _each(request.sampling_params):
        _check_params(params)


def drop_foreign_stops(request: GenerateReqInput, vocab_size: int) -> None:
    """Leave stop tokens outside the vocabulary out of a valid request.

    They are never drawn, and SGLang indexes logits with them, unchecked. The caller's objects are
    not modified.
    """

    def known(params: dict[str, Any]) -> dict[str, Any]:
        stops = params.get("stop_token_ids") or ()
        return {**params, "stop_token_ids": [one for one in stops if one in range(vocab_size)]}

    change_params(request, lambda params: known(params or {}))


def change_params(request: GenerateReqInput, change: Callable[[Any], Any]) -> None:
    """Replace the sampling parameters of a request, or of each of a batch."""
    params: Any = request.sampling_params
    request.sampling_params = [*map(change, params)] if isinstance(params, list) else change(params)


def check_fields(request: GenerateReqInput, vocab_size: int) -> None:
    """Raise ValueError where a single request has values that the scheduler cannot handle.

    A request of a batch is checked after SGLang has split the batch.
    """
    _convert("the request", {name: getattr(request, name) for name in _FIELDS}, _Fields)
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
        if getattr(request, name) is None:  # in a list of a batch; SGLang fills in what is left out
            raise ValueError(f"{name} has null for a request; allowed: a value for each.")
    if not isinstance(request.rid, str):
        raise ValueError(f"rid is {shown(request.rid)}; allowed: a string for each request.")
    ranges = {"logprob_start_len": range(-1, 2**31), "top_logprobs_num": range(vocab_size + 1)}
    _check_ranges(vars(request), ranges)
    if request.session_params is not None:
        _convert("session_params", request.session_params, _SessionParams)


def check_labels(request: GenerateReqInput, allowed: Iterable[str] | None) -> None:
    """Raise ValueError for labels of metrics that this server does not have.

    SGLang counts responses under them: an unknown label ends its HTTP process, and one of its own,
    like `model_name`, would take any value that a client sends.

    Args:
        request: as its client has sent it.
        allowed: --tokenizer-metrics-allowed-custom-labels.
    """
    labels = request.custom_labels
    known = sorted(allowed or ())
    if labels is not None and not (isinstance(labels, dict) and labels.keys() <= set(known)):
        raise ValueError(
            f"custom_labels is {shown(labels)}; allowed: values of {', '.join(known) or 'none'}. "
            "Leave it out, or start the server with --tokenizer-metrics-allowed-custom-labels."
        )


def check_ids(ids: Any, vocab_size: int) -> None:
    """Raise ValueError for a prompt that is not a list of tokens, at least one."""
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not len(ids):
        raise ValueError(f"A prompt is {shown(ids)}; allowed: token ids, at least one.")
    try:
        beyond = [token for token in (min(ids), max(ids)) if not 0 <= token < vocab_size]
    except TypeError:
        raise ValueError(f"A prompt is {shown(ids)}; allowed: a list of token ids.") from None
    if beyond:
        raise ValueError(
            f"input_ids contains {shown(beyond[0])}; allowed: token ids from 0 to {vocab_size - 1}."
        )


def _check_batch(request: GenerateReqInput) -> None:
    """Raise ValueError unless lists have one value for each prompt, and none for a single one."""
    prompts = request.text if request.text is not None else request.input_ids
    if prompts == []:
        raise ValueError("There is no prompt in text or input_ids; send at least one.")
    number: int | str = "no list, for one prompt"
    names = _BATCHED
    if isinstance(prompts, list) and not isinstance(prompts[0], int):
        number = len(prompts)
        names = _BATCHED + _NESTED
    if any(isinstance(ids, list) for ids in _each(request.token_ids_logprob)):
        names = (*names, "token_ids_logprob")
    for name in names:
        value = getattr(request, name, None)  # some releases lack some of these
        if isinstance(value, list) and len(value) != number:
            raise ValueError(f"{name} has {len(value)} entries; allowed: {number}.")


def _each(value: Any) -> Iterable[Any]:
    """Return the values of a batch's requests, or the value of a single request as one."""
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)


def _prompts(input_ids: Any) -> Iterable[Any]:
    if input_ids is None:
        return ()
    return (input_ids,) if not len(input_ids) or isinstance(input_ids[0], int) else input_ids


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text is {shown(text)}; allowed: a string, or a list of strings.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "text is no valid Unicode: it contains one half of a surrogate pair. Send the whole "
            "character."
        ) from None


def _check_params(params: Any) -> None:
    if not isinstance(params, dict):
        raise ValueError(f"sampling_params is {shown(params)}; allowed: an object.")
    _convert("sampling_params", params, _Params)
    if params.get("n", 1) is None:  # SGLang compares it
        raise ValueError(f"n is None; allowed: 1 to {MAX_SAMPLES}. Leave it out.")
    _check_ranges(params, {"n": range(1, MAX_SAMPLES + 1), "top_k": range(-1, 2**31)})
    penalty = params.get("repetition_penalty")
    if penalty is not None and 0 < penalty < LEAST_PENALTY:  # SGLang checks the rest
        raise ValueError(
            f"repetition_penalty is {penalty}; allowed: {LEAST_PENALTY} to 2, and 1 is none. With "
            "less, logits are no numbers any more."
        )
    for name in ("stop", "stop_regex"):
        number = len(list(_each(params.get(name))))
        if number > MAX_STOPS:
            raise ValueError(f"{name} has {number} entries; allowed: {MAX_STOPS}. Leave some out.")
    for text in _each(params.get("stop")):
        _check_text(text)
        if len(text) > MAX_STOP_LENGTH:
            raise ValueError(
                f"stop has a string of {len(text)} characters; allowed: {MAX_STOP_LENGTH}. A "
                "shorter beginning of it stops the text as well."
            )
    places = sum(map(_check_pattern, _each(params.get("stop_regex"))))
    if places > MAX_ALL_PLACES:
        raise ValueError(
            f"stop_regex has {places} characters and classes in all, with repetitions written out; "
            f"allowed: {MAX_ALL_PLACES}. Send fewer or shorter patterns."
        )


def _convert(name: str, value: Any, expected: type) -> None:
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{name} is malformed: {reason(error)}. Send what SGLang documents."
        ) from None


def _check_ranges(values: dict[str, Any], ranges: dict[str, range]) -> None:
    """Raise ValueError for a number out of range that SGLang's own checks accept."""
    for name, allowed in ranges.items():
        value = values.get(name)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{name} is {value}; allowed: an integer from {allowed[0]} to {allowed[-1]}."
            )


def _check_pattern(pattern: str) -> int:
    """Return the places of a pattern; raise ValueError for one that needs backtracking."""
    length = len(pattern.encode(errors="replace"))
    if length > MAX_PATTERN_BYTES:
        raise ValueError(
            f"stop_regex has a pattern of {length} bytes; allowed: {MAX_PATTERN_BYTES}. Shorten it."
        )
    try:
        return num_places(pattern)
    except ValueError as error:
        raise ValueError(f"stop_regex is {shown(pattern)}, which {reason(error)}.") from None


def _check_numbers(name: str, value: Any) -> None:
    """Raise ValueError for numbers that no tensor or message between processes can hold."""
    pending = [value]
    while pending:  # no recursion: a client may nest values arbitrarily deep
        inner = pending.pop()
        if isinstance(inner, dict):
            pending += inner.values()
        elif isinstance(inner, (list, set, tuple)):
            pending += inner
        elif isinstance(inner, int) and inner not in _INT64:
            raise ValueError(
                f"{name} has {shown(inner)}; allowed: integers from -2^63 to 2^63 - 1, which are "
                f"{_INT64[0]} to {_INT64[-1]}."
            )
        elif isinstance(inner, float) and _FLOAT32 < abs(inner) < math.inf:
            raise ValueError(f"{name} has {inner}; allowed: numbers up to {_FLOAT32:.3g}.")
