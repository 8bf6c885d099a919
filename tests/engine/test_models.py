"""Families of models, as target and as draft: at temperature 0 the text is the target's own.

The reference is the model in transformers, which shares no code with the layers served here. What
has been tried beside these stands in the README; tests/model_families.py makes all of them.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_families import greedy, make_family
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = [1, 2, 7, 16, 30, 45]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, 64) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize(
    ("target", "draft"), [("mixtral", "qwen3"), ("gpt2", "mixtral"), ("phi3", "gpt2")]
)
def test_the_text_is_the_targets_own(
    engine: Callable[..., Any],
    tmp_path: Path,
    prompts: list[list[int]],
    target: str,
    draft: str,
) -> None:
    """Experts, normalised queries, learned positions and fused projections, on either side."""
    paths = [
        make_family(tmp_path / family, family, seed=seed)
        for seed, family in enumerate((target, draft))
    ]
    expected = greedy(paths[0], prompts, 24)
    running = engine(**smc_arguments(*paths, num_particles=3, num_steps=3, max_lag=16))
    found = running.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 24}
    )
    assert [answer["output_ids"] for answer in found] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
