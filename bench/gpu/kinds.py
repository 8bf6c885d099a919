"""Define kinds of chat requests, and the invariants of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_smc.options.server import MODES, RESAMPLING_METHODS

NEW_TOKENS = 48
PLAIN: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": NEW_TOKENS}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)  # beside `PLAIN`
    asks: Mapping[str, Any] = field(default_factory=dict)  # of `Engine.generate`
    smc: Mapping[str, Any] = field(default_factory=dict)  # of custom_params
    replays: bool = True  # whether a captured graph supports all of it

    @property
    def sampling_params(self) -> dict[str, Any]:
        custom = {"custom_params": {"smc": dict(self.smc)}} if self.smc else {}
        return {**PLAIN, **self.params, **custom}


STOCK = (
    Kind("plain"),
    Kind("greedy", {"temperature": 0.0}),
    Kind("seed", {"sampling_seed": 5}),
    Kind("top-p", {"top_p": 0.9}),
    Kind("top-k", {"top_k": 20}),
    Kind("min-p", {"min_p": 0.05}),
    Kind("top-p and top-k", {"top_p": 0.95, "top_k": 20}),
    Kind(
        "penalties",
        {"frequency_penalty": 0.2, "presence_penalty": 0.2, "repetition_penalty": 1.05},
    ),
    Kind("bias", {"logit_bias": {"7": 0.5}}),
    Kind("min-tokens", {"min_new_tokens": 8}),
    Kind("log-probabilities", asks=LOGPROBS),
    Kind("stop string", {"stop": ["####"]}, replays=False),
    Kind("grammar", {"regex": "[0-9]{2,4}"}, replays=False),
)
OURS = (
    *(Kind(f"mode {mode}", smc={"mode": mode}) for mode in MODES),
    *(
        Kind(f"{method} resampling", smc={"mode": "smc", "resampling_method": method})
        for method in RESAMPLING_METHODS
    ),
    Kind("resampling at tokens", smc={"mode": "smc", "resample_at": "token"}),
    Kind("fewer particles", smc={"num_particles": 4, "num_steps": 4}),
    Kind("power", smc={"mode": "smc", "power": 2.0}),
    Kind("particles", smc={"mode": "smc", "return_particles": True}, replays=False),
)


def question(kinds: Sequence[Kind], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return `Engine.generate` keywords for one request of each kind, in one batch."""
    asks = {
        key: [kind.asks.get(key, type(value)()) for kind in kinds]
        for key, value in LOGPROBS.items()
    }
    return {
        "input_ids": [list(prompts[place % len(prompts)]) for place in range(len(kinds))],
        "sampling_params": [kind.sampling_params for kind in kinds],
        **asks,
    }


def judged(kind: Kind, answer: Mapping[str, Any], *, graphs: bool) -> dict[str, Any]:
    """Return an answer's counters, and its faults."""
    info = answer["meta_info"]
    found = {
        "tokens": info["completion_tokens"],
        "rounds": info.get("spec_smc_rounds_ct"),
        "replayed": info.get("spec_smc_replayed_ct"),
    }
    return {**found, "wrong": faults(kind, answer, found, graphs=graphs)}


def faults(
    kind: Kind, answer: Mapping[str, Any], found: Mapping[str, Any], *, graphs: bool
) -> list[str]:
    """Return the faults as sentences, if any."""
    info = answer["meta_info"]
    wrong = []
    if (info["finish_reason"] or {}).get("type") not in ("stop", "length"):
        wrong.append(f"it ended with {info['finish_reason']}")
    if not 0 < found["tokens"] <= kind.sampling_params["max_new_tokens"]:
        wrong.append(f"it has {found['tokens']} tokens")
    if info.get("spec_smc_nan_ct"):
        wrong.append("its logits were not numbers")
    if kind.asks and len(info["output_token_logprobs"]) != found["tokens"]:
        wrong.append(f"{len(info['output_token_logprobs'])} log-probabilities")
    if graphs and kind.replays and found["replayed"] != found["rounds"]:
        wrong.append(f"{found['replayed']} of {found['rounds']} rounds were replayed")
    return wrong
