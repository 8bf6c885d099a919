"""Generate requests, and the ways in which clients leave, from one seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jsonschema

VOCAB = 512  # of the shipped pair
NUM_PARTICLES = 4
NUM_STEPS = 3
MAX_LAG = 8
# Abort; disconnect in the middle of the answer, or unheard, before it; or after half of the
# request.
WAYS = ("abort", "disconnect", "unheard", "half")
# Above SGLang's preemption threshold, so that it takes the pool from others.
URGENT = 100
SMC: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 2},
    {"num_particles": 3, "num_steps": 1},
    {"num_particles": 1, "evidence_threshold": 0},
    {"mode": "exact"},
    {"mode": "auto", "num_particles": 3},
    {"mode": "auto"},
    {"power": 2.0},
    {"power": 4.0, "num_particles": 2},
    {"resample_at": "token", "ess_threshold": 1.0},
    {"resampling_method": "stratified", "selection": "argmax"},
    {"ess_threshold": 0.0, "evidence_threshold": 0.0},
    {"return_particles": True, "draft_temperature": 1.3},
)
FILTERS: tuple[dict[str, Any], ...] = ({}, {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05})
EDITS: tuple[dict[str, Any], ...] = (
    *({} for _ in range(6)),
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"logit_bias": {"17": 3.0, "30": -100.0}},
)
STOPS: tuple[dict[str, Any], ...] = (
    *({} for _ in range(6)),
    {"stop": ["7", ". "]},
    {"stop_regex": r"\d\d"},
    {"stop_token_ids": [17, 30, 99]},
    {"min_new_tokens": 5},
)
LOGPROBS: tuple[dict[str, Any], ...] = (
    *({} for _ in range(5)),
    {"return_logprob": True},
    {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 17]},
    {"return_logprob": True, "logprob_start_len": 0},
)


# --- Grammars that xgrammar compiles at once for the shipped pair, and checks of their texts


class GrammarParams(NamedTuple):
    """Request parameters of a grammar, and the check of a complete text."""

    params: dict[str, Any]
    is_legal: Callable[[str], bool]


def _regex(pattern: str) -> GrammarParams:
    return GrammarParams({"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None)


_SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "unit": {"enum": ["stamps", "coins"]}},
    "required": ["count", "unit"],
    "additionalProperties": False,
}


def _obeys_schema(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), _SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


GRAMMARS = (
    _regex(r"#### [0-9]{1,4}"),
    _regex(r"(yes|no|maybe)(, (yes|no|maybe)){2,9}\."),
    GrammarParams({"json_schema": json.dumps(_SCHEMA)}, _obeys_schema),
)


@dataclass(frozen=True)
class SoakRequest:
    """One request, and its client's behaviour."""

    rid: str
    prompt: list[int]
    params: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # of /generate, besides the params
    grammar: GrammarParams | None = None
    n: int = 1
    stream: bool = False
    leaves: str | None = None  # one of `WAYS`, or None to wait for the answer
    after: float = 0.0  # seconds after sending, if it does not stream or leaves unheard,
    at_chunk: int = 0  # else at this chunk, or at the last one before the stream's end
    pause: float = field(default=0.0, compare=False)  # seconds before the next client

    @property
    def body(self) -> dict[str, Any]:
        """Return the body for /generate."""
        params = {**self.params, "n": self.n}
        given = {"rid": self.rid, "input_ids": self.prompt, "sampling_params": params}
        return {**given, **self.options, "stream": self.stream}

    def alone(self, index: int) -> SoakRequest:
        """Return a request for only the ``index``-th of its n answers, which waits for it."""
        params = {**self.params, "sampling_seed": self.params["sampling_seed"] + index}
        return replace(self, params=params, n=1, stream=False, leaves=None)


def requests(seed: int, share_leaving: float, mean_pause: float) -> Iterator[SoakRequest]:
    """Yield endless requests; the i-th is the same in every run."""
    index = 0
    while True:
        yield _request(random.Random(f"{seed}-{index}"), index, share_leaving, mean_pause)
        index += 1


def _request(
    draw: random.Random, index: int, share_leaving: float, mean_pause: float
) -> SoakRequest:
    leaves = draw.random() < share_leaving
    grammar = draw.choice(GRAMMARS) if draw.random() < 0.15 else None
    return SoakRequest(
        rid=f"soak-{index:06}",  # no id is a prefix of another: SGLang aborts by prefix
        prompt=[draw.randrange(4, VOCAB) for _ in range(draw.choice([1, 4, 12, 40, 150]))],
        params=_params(draw, index, grammar),
        options={**draw.choice(LOGPROBS), "priority": draw.choice([0] * 9 + [URGENT])},
        grammar=grammar,
        n=draw.choice([1] * 9 + [2]),
        stream=draw.random() < 0.5,
        leaves=draw.choice(WAYS) if leaves else None,
        after=draw.expovariate(0.5),
        at_chunk=draw.choice([1, 1, 2, 3, 5, 8]),
        pause=mean_pause * draw.expovariate(1.0),
    )


def _params(draw: random.Random, index: int, grammar: GrammarParams | None) -> dict[str, Any]:
    # A stop string would cut a grammar's text, and a minimum length would forbid its end.
    ends = draw.choice(STOPS) if grammar is None else grammar.params
    params = {
        "max_new_tokens": draw.choice([1, 2, 8, 40, 80, 120, 160]),
        "temperature": draw.choice([0.0, 0.6, 1.0, 1.4]),
        "sampling_seed": 10 * index,  # the i-th of n answers uses the seed plus i
        "ignore_eos": draw.random() < 0.7,
        "custom_params": {"smc": draw.choice(SMC)},
        **draw.choice(FILTERS),
        **draw.choice(EDITS),
        **ends,
    }
    params["min_new_tokens"] = min(params.get("min_new_tokens", 0), params["max_new_tokens"])
    return params
