"""The shipped model pair loads in a real engine and is as good as it is said to be."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pair.task import check, held_out, messages
from tiny_models import smc_arguments
from transformers import AutoTokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

PAIR = Path(__file__).parents[2] / "bench" / "pair"
PLAIN = Path(__file__).with_name("plain_smc.json")
TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")
SIZE = 250
SAMPLING = {"temperature": 0.7, "max_new_tokens": 160}
ROOM = {"max_total_tokens": 100_000, "max_running_requests": 32, "context_length": 1024}


def ask(engine: Any, size: int, **smc: Any) -> tuple[list[bool], list[dict[str, Any]]]:
    """Which held-out problems are solved at the stated temperature, and their meta_info."""
    items = [held_out(i) for i in range(size)]
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [
        tokenizer.apply_chat_template(messages(item), tokenize=False, add_generation_prompt=True)
        for item in items
    ]
    own = {"custom_params": {"smc": smc}} if smc else {}
    params = [{**SAMPLING, "sampling_seed": i, **own} for i in range(size)]
    answers = engine.generate(prompts, params)
    right = [check(a["text"], item) for a, item in zip(answers, items, strict=True)]
    return right, [answer["meta_info"] for answer in answers]


def accuracy(engine: Any) -> float:
    return sum(ask(engine, SIZE)[0]) / SIZE


def smc_engine(engine: Callable[..., Any]) -> Any:
    return engine(**smc_arguments(TARGET, DRAFT, num_particles=8, num_steps=8, **ROOM))


def stated(name: str) -> float:
    return json.loads((PAIR / "measurements.json").read_text())[name]["mean"]


def test_target_draft_and_smc_between_them(engine: Callable[..., Any]) -> None:
    # Four standard errors: fails by chance 6e-5 of the time, for these seeds never.
    slack = 4 * math.sqrt(0.25 / SIZE)
    target = accuracy(engine(model_path=TARGET, **ROOM))
    draft = accuracy(engine(model_path=DRAFT, **ROOM))
    smc = accuracy(smc_engine(engine))
    assert abs(target - stated("target accuracy")) < slack
    assert abs(draft - stated("draft accuracy")) < slack
    assert smc > draft + 0.2  # eight particles make most of the way from draft to target


def test_exact_keeps_the_accuracy_and_more_chains_yield_more_tokens(
    engine: Callable[..., Any],
) -> None:
    slack = 4 * math.sqrt(0.25 / SIZE)
    tokens_a_pass = []
    for num_particles in (1, 8):
        right, infos = ask(smc_engine(engine), SIZE, mode="exact", num_particles=num_particles)
        assert abs(sum(right) / SIZE - stated("target accuracy")) < slack
        tokens = sum(info["completion_tokens"] - 1 for info in infos)
        tokens_a_pass.append(tokens / sum(info["spec_smc_rounds_ct"] for info in infos))
    one, eight = tokens_a_pass
    assert eight > one + 0.5  # 4.9 and 6.4, each known to about 0.1


def test_smc_is_at_least_as_good_as_the_plain_algorithm(engine: Callable[..., Any]) -> None:
    """Against a recorded run without tricks, at equal N and K: in accuracy and in E[log Z-hat].

    Fails by chance 3e-5 of the time each, were both alike; a wrong weight, or a particle that reads
    another's KV, costs nats.
    """
    plain = json.loads(PLAIN.read_text())
    size = len(plain["right"])
    right, infos = ask(smc_engine(engine), size, num_steps=4, evidence_threshold=0)
    assert_not_worse([float(x) for x in right], [float(x) for x in plain["right"]])
    evidence = [info["spec_smc_log_evidence"] for info in infos]
    assert_not_worse(evidence, plain["log_evidence"])


def assert_not_worse(ours: list[float], theirs: list[float]) -> None:
    """Paired by problem: not below by more than four standard errors."""
    gains = torch.tensor(ours) - torch.tensor(theirs)
    assert gains.mean() > -4 * gains.std() / math.sqrt(len(gains))
