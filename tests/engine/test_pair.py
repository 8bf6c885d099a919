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

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
SIZE = 250
SAMPLING = {"temperature": 0.7, "max_new_tokens": 160}
ROOM = {"max_total_tokens": 100_000, "max_running_requests": 32, "context_length": 1024}


def accuracy(engine: Any) -> float:
    """Return the share of held-out problems that are solved at the stated temperature."""
    items = [held_out(i) for i in range(SIZE)]
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    shown = {"tokenize": False, "add_generation_prompt": True}
    prompts = [tokenizer.apply_chat_template(messages(item), **shown) for item in items]
    answers = engine.generate(prompts, [{**SAMPLING, "sampling_seed": i} for i in range(SIZE)])
    return sum(check(a["text"], item) for a, item in zip(answers, items, strict=True)) / SIZE


def stated(name: str) -> float:
    return json.loads((PAIR / "measurements.json").read_text())[name]["mean"]


def test_target_draft_and_smc_between_them(engine: Callable[..., Any]) -> None:
    # Four standard errors: fails by chance 6e-5 of the time, for these seeds never.
    slack = 4 * math.sqrt(0.25 / SIZE)
    target = accuracy(engine(model_path=TARGET, **ROOM))
    draft = accuracy(engine(model_path=DRAFT, **ROOM))
    smc = accuracy(engine(**smc_arguments(TARGET, DRAFT, num_particles=8, num_steps=8, **ROOM)))
    assert abs(target - stated("target accuracy")) < slack
    assert abs(draft - stated("draft accuracy")) < slack
    assert smc > draft + 0.2  # eight particles make most of the way from draft to target
