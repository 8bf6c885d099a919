"""What clients ask for, and how some of them leave: all drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

VOCAB = 512  # of the shipped pair
NUM_PARTICLES, NUM_STEPS, MAX_LAG = 4, 3, 12
WAYS = ("abort", "disconnect")
SMC: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 2},
    {"num_particles": 3, "num_steps": 1},
    {"num_particles": 1, "evidence_threshold": 0},
    {"mode": "exact"},
    {"mode": "mixed", "num_particles": 3},
    {"mode": "auto"},
    {"power": 2.0},
    {"resample_at": "token", "ess_threshold": 1.0},
    {"resampling_method": "ssp", "selection": "argmax"},
    {"ess_threshold": 0.0, "evidence_threshold": 0.0},
    {"return_particles": True, "draft_temperature": 1.3},
)
FILTERS: tuple[dict[str, Any], ...] = ({}, {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05})
STOPS: tuple[dict[str, Any], ...] = (
    *({} for _ in range(6)),
    {"stop": ["7", ". "]},
    {"stop_regex": r"\d\d"},
    {"stop_token_ids": [17, 30, 99]},
)


@dataclass(frozen=True)
class Request:
    """One request, and what its client does to it."""

    rid: str
    prompt: list[int]
    params: dict[str, Any]
    stream: bool
    leaves: str | None = None  # a way, or None to wait for the answer
    after: float = 0.0  # leaves so many seconds after sending, if it does not stream,
    at_chunk: int = 0  # else at this chunk
    pause: float = field(default=0.0, compare=False)  # seconds before the next client comes

    @property
    def body(self) -> dict[str, Any]:
        """For /generate."""
        return {"rid": self.rid, "input_ids": self.prompt, "sampling_params": self.params}


def requests(seed: int, share_leaving: float, mean_pause: float) -> Any:
    """Requests without end: the i-th is the same in every run."""
    index = 0
    while True:
        yield _request(random.Random(f"{seed}-{index}"), index, share_leaving, mean_pause)
        index += 1


def _request(draw: random.Random, index: int, share_leaving: float, mean_pause: float) -> Request:
    leaves = draw.random() < share_leaving
    return Request(
        rid=f"soak-{index:06}",  # none a prefix of another: SGLang aborts by prefix
        prompt=[draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 4, 12, 40, 150]))],
        params=_params(draw, index),
        stream=draw.random() < 0.5,
        leaves=draw.choice(WAYS) if leaves else None,
        after=draw.expovariate(1.0),
        at_chunk=draw.choice([1, 1, 2, 4, 8, 16]),
        pause=draw.expovariate(1.0 / mean_pause),
    )


def _params(draw: random.Random, index: int) -> dict[str, Any]:
    return {
        "max_new_tokens": draw.choice([1, 2, 5, 16, 40, 80, 120]),
        "temperature": draw.choice([0.0, 0.6, 1.0, 1.4]),
        "sampling_seed": index,
        "ignore_eos": draw.random() < 0.7,
        "custom_params": {"smc": draw.choice(SMC)},
        **draw.choice(FILTERS),
        **draw.choice(STOPS),
    }
