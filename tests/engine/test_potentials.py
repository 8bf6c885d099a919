"""Potentials with two ranks: the first asks, and all hear what it was told."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_all_ranks_hear_what_the_first_was_told(
    engine: Callable[..., Any], tiny: Callable[..., str]
) -> None:
    """With other values ranks would part, and SGLang's checks find their KV."""
    pair = [tiny(seed=seed, vocab_size=4, scale=0.5) for seed in (1, 2)]
    smc = {"potentials": [{"name": "count"}]}
    params = [
        {
            **{"max_new_tokens": 12, "sampling_seed": seed, "temperature": 2.0},
            "custom_params": {"smc": smc},
        }
        for seed in range(6)
    ]
    found = []
    for ranks in (1, 2):
        running = engine(
            **smc_arguments(*pair, potential=["count=steered:Count"], max_lag=8), tp_size=ranks
        )
        answers = running.generate(input_ids=[[3, 2, 3]] * 6, sampling_params=params)
        found.append([answer["output_ids"] for answer in answers])
        running.shutdown()
    assert found[0] == found[1]
