"""Models that take images, served for text alone: as target and as draft, by their own checkpoints.

They have neither image processor nor images here. Positions of text have three equal rows (M-RoPE):
with one checkpoint on both sides every draft is kept if they agree in prefill, drafts and scores.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_families import make_image_family
from model_families import greedy
from tiny_models import smc_arguments
from transformers import AutoModelForImageTextToText

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = [[5], [7, 3], [40, 41, 42, 43, 44, 45, 46], [*range(2, 40)]]
GREEDY = {"temperature": 0, "max_new_tokens": 25}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_a_model_of_images_writes_and_drafts_its_own_text(
    engine: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    path = make_image_family(tmp_path, family)
    expected = greedy(path, PROMPTS, 25, AutoModelForImageTextToText)
    running = engine(**smc_arguments(path, path, num_particles=2, num_steps=3, mode="exact"))
    with pytest.raises(ValueError, match=r"image_data=.*Send text only"):
        running.generate(
            input_ids=PROMPTS[0], image_data="data:image/png;base64,AA==", sampling_params=GREEDY
        )
    for sampling in (GREEDY, GREEDY | {"custom_params": {"smc": {"mode": "smc"}}}):
        found = running.generate(input_ids=PROMPTS, sampling_params=sampling)
        assert [answer["output_ids"] for answer in found] == expected
    exact = running.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    infos = [answer["meta_info"] for answer in exact]
    # What ends early drops the drafts behind its end.
    rates = [i["spec_accept_rate"] for i in infos if i["finish_reason"]["type"] == "length"]
    assert rates and set(rates) == {1.0}
