"""Requests of every kind that a server takes, by name."""

from collections.abc import Iterator
from typing import Any

from routed import PRESETS as OF_ROUTES
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor as NoRepeat,
)
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor as Disallowed
from spelling import GRAMMARS

EOS = 1
PROMPT = [40, 70, 80]
MODES = ("smc", "exact", "auto")
PLAIN = {"mode": "exact", "num_particles": 1, "num_steps": 0}
# A tilt above 0 has a threshold that the server learns from what it has answered: none here.
CHOICES: list[dict[str, Any]] = [
    {},
    {"num_particles": 1},
    {"num_particles": 3, "num_steps": 1, "evidence_threshold": 0},
    {"num_particles": 2, "resample_at": "token", "ess_threshold": 1.0},
    {"resampling_method": "stratified", "selection": "argmax"},
    {"mode": "exact"},
    {"mode": "exact", "num_particles": 1, "num_steps": 2},
    {"mode": "auto", "evidence_threshold": 0.1},
    {"mode": "auto", "num_particles": 2, "tilt": 0},
    {"power": 2.0},
    {"draft_temperature": 1.5, "num_steps": 3},
    {"max_lag": 1},
    PLAIN,
    {"return_particles": True},
]
PRESETS = {**OF_ROUTES, **{f"choice-{index}": choice for index, choice in enumerate(CHOICES)}}
BIAS = {str(token): -100.0 if token % 3 else 2.0 for token in range(2, 300)}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [3, 9]}
BANNED = list(range(5, 300))
# What changes logits: sampling parameters, and a processor where there is one.
EDITS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.7},
    "rewards": {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    "bias": {"logit_bias": BIAS},
    "several": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": BIAS},
    "no early end": {"min_new_tokens": 20, "presence_penalty": 1.5, "ignore_eos": False},
    "disallowed": {"custom_params": {"token_ids": BANNED}},
    "no repeats": {
        "custom_params": {"ngram_size": 2, "window_size": 200},
        **{"frequency_penalty": -2.0, "presence_penalty": -2.0},
    },
}
PROCESSORS = {"disallowed": Disallowed, "no repeats": NoRepeat}
POTENTIALS: dict[str, dict[str, Any]] = {
    "each round": {"name": "count", "args": {"token": 271}},
    "at a delimiter": {"name": "offset", "args": {"token": 271}, "when": {"delimiter": "t"}},
    "at the end": {"name": "count", "args": {"token": 271}, "when": "end"},
}


def asked(
    smc: dict[str, Any] | None = None, fields: dict[str, Any] | None = None, **params: Any
) -> dict[str, Any]:
    """A request; ``fields`` are beside its sampling parameters."""
    own: dict[str, Any] = {"max_new_tokens": 24, "sampling_seed": 5, "temperature": 0.8}
    custom = {"smc": smc or {}, **params.pop("custom_params", {})}
    params = {**own, "ignore_eos": True, **params, "custom_params": custom}
    return {"input_ids": PROMPT, "sampling_params": params, **(fields or {})}


def edited(name: str, smc: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    """A request whose logits are changed."""
    fields = {"custom_logit_processor": PROCESSORS[name].to_str()} if name in PROCESSORS else {}
    return asked(smc, fields, **{**EDITS[name], **params})


def constrained(kind: str, smc: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    """A request with a grammar."""
    return asked(smc, **{**GRAMMARS[kind], "max_new_tokens": 200, "ignore_eos": False, **params})


def kinds() -> Iterator[tuple[str, dict[str, Any]]]:
    for index, choice in enumerate(CHOICES):
        yield f"choice {index}", asked(choice)
        yield f"trace {index}", asked({**choice, "trace": True})
        yield f"logprobs {index}", asked(choice, LOGPROBS)
    for index, name in enumerate(EDITS):
        mode = MODES[index % 3]
        yield f"edits {name}", edited(name, {"mode": mode})
        yield f"scored {name}", edited(name, {"mode": mode}, top_p=0.8) | LOGPROBS
    for kind in GRAMMARS:
        for seed, mode in enumerate(MODES):
            smc = {"mode": mode} | ({"evidence_threshold": 0.5} if mode == "auto" else {})
            hot = {"temperature": 1.5, "top_p": 0.95} if seed % 2 else {}
            yield f"{kind} in mode {mode}", constrained(kind, smc, sampling_seed=seed, **hot)
    for name, potential in POTENTIALS.items():
        smc = {"potentials": [potential], "trace": True}
        yield f"potential {name}", asked(smc, max_new_tokens=8)


KINDS = dict(kinds())
