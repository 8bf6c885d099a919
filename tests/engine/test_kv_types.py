"""Keys and values in 8 bits: the text that plain decoding has over the same cache."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

MODEL = {"vocab_size": 64, "scale": 0.3}


@pytest.mark.parametrize("kind", ["fp8_e5m2", pytest.param("fp8_e4m3", marks=pytest.mark.nightly)])
def test_the_text_is_that_of_plain_decoding(
    engine: Callable[..., Any], tiny: Callable[..., str], kind: str
) -> None:
    """In every mode; over keys of 32 bits some texts are others, so that the cache is in use."""
    draw = random.Random(0)
    prompts = [[draw.randrange(2, 64) for _ in range(length)] for length in range(1, 80, 7)]
    target, draft = tiny(seed=1, **MODEL), tiny(seed=2, **MODEL)

    def texts(running: Any, **params: Any) -> list[list[int]]:
        params = {"temperature": 0, "max_new_tokens": 24, **params}
        answers = running.generate(input_ids=prompts, sampling_params=params)
        return [answer["output_ids"] for answer in answers]

    exact = texts(engine(model_path=target))
    plain = texts(engine(model_path=target, kv_cache_dtype=kind))
    assert exact != plain
    running = engine(**smc_arguments(target, draft, num_particles=3), kv_cache_dtype=kind)
    for mode in ("smc", "exact", "mixed", "auto"):
        assert texts(running, custom_params={"smc": {"mode": mode}}) == plain, mode
