"""Models that SGLang, given them as a draft, would load as extra layers of their own target.

With one checkpoint on both sides every drafted token is the target's own: what is drafted by other
weights, or by fewer layers, is told by what verification keeps.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_families import greedy, make_family
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = [[5], [7, 3], [40, 41, 42, 43, 44, 45, 46], list(range(2, 32))]
NUM_STEPS = 3


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_model_drafts_its_own_text(
    engine: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    path = make_family(tmp_path, family)
    expected = greedy(path, PROMPTS, 25)
    running = engine(
        **smc_arguments(path, path, num_particles=2, num_steps=NUM_STEPS, mode="exact")
    )
    found = running.generate(
        input_ids=PROMPTS, sampling_params={"temperature": 0, "max_new_tokens": 25}
    )
    assert [answer["output_ids"] for answer in found] == expected
    assert min(answer["meta_info"]["spec_accept_rate"] for answer in found) == 1.0
