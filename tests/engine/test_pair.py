"""The shipped model pair loads in a real engine and is as good as it is said to be."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pair.task import check, held_out, messages
from tiny_models import smc_arguments
from transformers import AutoTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
SIZE = 250
ROOM = {"max_total_tokens": 100_000, "max_running_requests": 32, "context_length": 1024}


def accuracy(engine: Any) -> float:
    """Share of held-out problems solved at the temperature of the stated numbers."""
    items = [held_out(i) for i in range(SIZE)]
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [
        tokenizer.apply_chat_template(messages(item), tokenize=False, add_generation_prompt=True)
        for item in items
    ]
    params = [{"temperature": 0.7, "max_new_tokens": 200, "sampling_seed": i} for i in range(SIZE)]
    answers = engine.generate(prompts, params)
    right = (check(a["text"], item) for a, item in zip(answers, items, strict=True))
    return sum(right) / SIZE


def stated(name: str) -> float:
    return json.loads((PAIR / "measurements.json").read_text())[name]["mean"]


def test_target_draft_and_smc_between_them(engine: Callable[..., Any]) -> None:
    # Four standard errors: fails by chance 6e-5 of the time, for these seeds never.
    slack = 4 * math.sqrt(0.25 / SIZE)
    target = accuracy(engine(model_path=TARGET, **ROOM))
    draft = accuracy(engine(model_path=DRAFT, **ROOM))
    running = engine(**smc_arguments(TARGET, DRAFT, num_particles=8, num_steps=4, **ROOM))
    smc = accuracy(running)
    assert abs(target - stated("target accuracy")) < slack
    assert abs(draft - stated("draft accuracy")) < slack
    assert smc > draft + 0.2  # eight particles make most of the way from draft to target
