"""Define what both studies ask of an engine over a tiny model, and how it is started."""

from __future__ import annotations

import random
from typing import Any

from support.families import VOCAB

LENGTHS = (1, 7, 16, 45)
NEW_TOKENS = 25  # one from prefill, and rounds of K + 1
PATIENCE = 300.0  # seconds per engine
ENGINE: dict[str, Any] = {
    "random_seed": 0,
    "device": "cpu",
    "dtype": "float32",
    "skip_server_warmup": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "context_length": 256,
    "log_level": "error",
}


def prompts() -> list[list[int]]:
    """Return a random prompt of each length."""
    draw = random.Random(0)
    return [[draw.randrange(2, VOCAB - 8) for _ in range(length)] for length in LENGTHS]
