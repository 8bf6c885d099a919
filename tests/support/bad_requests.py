"""Requests that no server can answer, as bytes on the wire: three hundred of them, by a fixed seed.

What SGLang itself takes for a request, or answers otherwise than by an error of the client, on any
server, is left out:

- a field that nobody knows, beside those of a request: pydantic ignores it by default;
- ``"stream": true`` on /generate: the status is sent before the request is looked at, and the error
  follows as a chunk;
- JSON that is no object on /v1/chat/completions, and a response_format that is none: SGLang's own
  reading of such a body fails with a TypeError, as HTTP 500, before anything is made of it;
- strings in place of numbers and numbers in place of flags on the OpenAI routes: pydantic reads
  "5" as 5, and 1 as true.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import GenerateReqInput

VOCAB = 64
NATIVE = "/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HUGE = 10**40
ENDLESS = 2**63
HOSTILE = ("' OR 1=1 --", "../../etc/passwd", "__import__('os').system('id')", "\x00\x01")
HOSTILE += ("\u202e", "{{7*7}}")
NOT_A_NUMBER: tuple[Any, ...] = ("many", [], {}, [1], {"a": 1}, *HOSTILE)
NOT_A_COUNT = (*NOT_A_NUMBER, 1.5, -1, -(10**12), float("nan"), float("inf"))
NOT_POSITIVE = (*NOT_A_NUMBER, -1.0, -HUGE, float("nan"), float("-inf"))

# Values that no route takes, by the name of the sampling parameter.
PARAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (*NOT_POSITIVE, float("inf")),
    "top_p": (*NOT_POSITIVE, 0.0, 1.0001, 5),
    "top_k": (*NOT_A_NUMBER, 0, -2, 2.5, HUGE, 2**62),
    "min_p": (*NOT_POSITIVE, 1.5),
    "n": (*NOT_A_NUMBER, 1.5, 10**9, HUGE, float("nan")),
    "seed": (*NOT_A_NUMBER, 1.5, HUGE, ENDLESS, -ENDLESS - 1),
    "min_tokens": (*NOT_A_COUNT, 10**6, HUGE),
    "stop": (5, {"a": 1}, [5], [["a"]], [None], ["\ud800"]),
    "stop_token_ids": ("5", [1.5], ["a"], [[1]], [HUGE], {"a": 1}, 7),
    "stop_regex": (5, "(", "[", "*", ["a", "(?P<x"], "(" * 3000, {"a": "b"}, "a{2,1}"),
    "repetition_penalty": (*NOT_POSITIVE, 0.0, 100.0),
    "frequency_penalty": (*NOT_A_NUMBER, 50, float("nan")),
    "presence_penalty": (*NOT_A_NUMBER, -50, float("inf")),
    "logit_bias": (5, "a", {"a": 1}, {"-1": 1.0}, {str(VOCAB): 1.0}, {"5": "x"}, {"5": {}}),
    "ignore_eos": ("maybe", 2, [], {}),
    "custom_params": (5, "smc", [1], {"smc": 5}, {"smc": [1]}, {"smc": "exact"}),
}
DEEP = "[" * 100_000
LONG = "t3 " * 100_000
NO_IDS = (5, {}, [], [[]], [-1], [VOCAB], [HUGE])
PROMPTS: dict[str, tuple[Any, ...]] = {
    "input_ids": (
        *(*NO_IDS, "abc", [1, [2]], [[1], 2], ["a"], [1.5], [[3], []], [None], [2] * 100_000),
        [[3], [VOCAB]],
    ),
    "text": ("", 5, [], {}, [5], [["t3"]], "\ud800", ["t3", ""], ["t3", None], LONG),
    "prompt": (*NO_IDS, "", ["t3", ""], [["t3"]], "\udc00", LONG),
    "messages": (
        *("t3", 5, {}, [], [{}], [5], [{"role": "user"}], [{"content": "t3"}]),
        [{"role": "nobody", "content": "t3"}],
        *([{"role": "user", "content": content}] for content in (5, "\ud800", LONG)),
    ),
}
FIELDS: dict[str, tuple[Any, ...]] = {
    "return_logprob": ("maybe", 5, {}),
    "logprob_start_len": ("a", {}, HUGE, 1.5, -50),
    "top_logprobs_num": ("a", {}, HUGE, [[]], -3, 10**6, [1]),
    "extra_key": (5, {}, ["x"], ["x", "y"]),
    "rid": (5, {}, [5]),
    "priority": ("high", HUGE, {}, 1.5),
    "session_params": (5, "a", [1], {"nobody": 1}, {"id": 5}, {"id": "x", "offset": "a"}),
    "sampling_params": (
        *(5, "a", [5], [[]], [], [{"n": 1}, {}], {"nobody_knows": 1}, {"is_normalized": True}),
        *({"stop_strs": 5}, {"beam_width": 4}, {"beam_width": "wide"}),
        *({"watermark": {"enabled": True}}, {"ebnf_full_assistant": "all of it"}),
    ),
    "lora_path": ("../adapter", 5),
    "image_data": ("file:///etc/passwd", "http://127.0.0.1:1/"),
    "custom_logit_processor": ("gASVAAAAAAAAAA==", 5),
    "stream": ("perhaps", 5, []),
}
# Of those that only some releases of SGLang have: the others ignore them, as any unknown field.
_SOME: dict[str, tuple[Any, ...]] = {
    "multi_item_delimiter_indices": ([0], ["a"], 5, {}),
    "token_indices_to_pool": ([0], [10**6], [-1], [1.5], "a", 5),
    "cache_salt": (5, {}, ["x"], ["x", "y"]),
    "kv_hints": (5, "a", [5], {"protocol_version": "1", "message_id": "a"}, {"nobody": 1}),
    "sampling_logprobs_mode": ("selected", "nobody", 5, {}),
    "watermark": ({"enabled": True}, {"key": "5ec7e7"}, {"nobody": 1}, 5, [], "a"),
}
FIELDS |= {name: _SOME[name] for name in _SOME if name in GenerateReqInput.__dataclass_fields__}
OPENAI_FIELDS: dict[str, tuple[Any, ...]] = {
    "model": (5, [], {}),
    "max_tokens": (*NOT_A_NUMBER, 1.5, HUGE),
    "stream": ("perhaps", 5, []),
    "response_format": ({"type": "nobody"}, {"type": "json_schema"}),
    "user": (5, []),
}
OPENAI_FIELDS |= {name: FIELDS[name] for name in ("watermark",) if name in FIELDS}
NOT_JSON = (b"", b"{", b"\xff\xfe\x00", b"{'input_ids': [3]}", b'{"input_ids": [3]', b"\x00" * 64)
NOT_JSON += ("{}".encode("utf-16"), b'{"a": 1}' * 3, DEEP.encode())
NO_OBJECT = (b"[]", b"null", b"5", b'"text"')


class BadRequest(NamedTuple):
    name: str  # what is wrong with it
    route: str
    body: bytes
    content_type: str = "application/json"


def bad_requests(number: int) -> list[BadRequest]:
    """So many of all that there are, on all routes."""
    every = sorted(_every(), key=lambda bad: (bad.name, bad.route))
    return random.Random(0).sample(every, number)


def _every() -> Iterator[BadRequest]:
    for route in (NATIVE, COMPLETIONS, CHAT):
        for i, body in enumerate(NOT_JSON if route == CHAT else NOT_JSON + NO_OBJECT):
            yield BadRequest(f"not JSON {i}", route, body)
        good = json.dumps(_good(route)).encode()
        yield BadRequest("text/plain", route, good, "text/plain")
        yield BadRequest("form", route, good, "application/x-www-form-urlencoded")
        for name, value, which in _each(_fields(route)):
            own = {"input_ids": None} if name == "text" else {}
            yield _json(f"{name} {which}", route, {**_good(route), **own, name: value})
        for name, value, which in _each(PARAMS):
            yield _json(f"{name} {which}", route, _with_param(route, name, value))


def _each(table: dict[str, tuple[Any, ...]]) -> Iterator[tuple[str, Any, int]]:
    for name, values in table.items():
        yield from ((name, value, which) for which, value in enumerate(values))


def _good(route: str) -> dict[str, Any]:
    if route == NATIVE:
        return {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}}
    asked = {"messages": [{"role": "user", "content": "t3"}]} if route == CHAT else {"prompt": "t3"}
    return {"model": "m", "max_tokens": 2, **asked}


def _fields(route: str) -> dict[str, tuple[Any, ...]]:
    if route == NATIVE:
        return {**FIELDS, "input_ids": PROMPTS["input_ids"], "text": PROMPTS["text"]}
    name = "messages" if route == CHAT else "prompt"
    return {**OPENAI_FIELDS, name: PROMPTS[name]}


_NATIVE_NAMES = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}


def _with_param(route: str, name: str, value: Any) -> dict[str, Any]:
    body = _good(route)
    if route == NATIVE:
        body["sampling_params"][_NATIVE_NAMES.get(name, name)] = value
        return body
    return {**body, name: value}


def _json(name: str, route: str, body: dict[str, Any]) -> BadRequest:
    # As Python writes it: NaN and Infinity as words, lone surrogates as escapes.
    return BadRequest(name, route, json.dumps(body).encode())
