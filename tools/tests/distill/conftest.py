"""A target and a draft so small that a step of training takes milliseconds, and texts of theirs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_smc_tools.distill.teacher import Example, Sampling, Teacher, load_model, sample_answers

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def target(tiny: Callable[..., str]) -> Path:
    """Four layers; its laws are neither flat nor sure."""
    return Path(tiny(vocab_size=24, layers=4, seed=1, scale=0.25))


@pytest.fixture(scope="session")
def draft(tiny: Callable[..., str]) -> Path:
    return Path(tiny(vocab_size=24, layers=1, seed=2, scale=0.1))


@pytest.fixture(scope="session")
def teacher(target: Path) -> Teacher:
    return Teacher(load_model(target, torch.float32, CPU), 1.0)


@pytest.fixture(scope="session")
def texts(teacher: Teacher) -> list[Example]:
    """Sixty answers of the target to prompts of 1 to 4 tokens."""
    prompts = [[2 + i % 20] * (1 + i % 4) for i in range(60)]
    torch.manual_seed(0)
    how = Sampling(1.0, max_new_tokens=20, batch=30, ends=frozenset([1]))
    return sample_answers(teacher.model, prompts, how)
