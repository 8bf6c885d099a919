"""Requests that lose their KV in the midst: what they keep, and what is drawn anew."""

from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import smc_arguments

from in_process import Server

SERVER = {"num_particles": 4, "num_steps": 3, "max_lag": 4, "max_running_requests": 9}
TOKENS = 40


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    model = {"vocab_size": 64, "scale": 0.3}
    return tiny(seed=1, **model), tiny(seed=2, **model)


def asked(index: int = 0, smc: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    own = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8}
    own |= {"sampling_seed": 100 + index, "custom_params": {"smc": smc or {}}}
    return {"input_ids": [5 + index, *range(20, 31)], "sampling_params": {**own, **params}}


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "one round late"])
def test_a_text_is_its_seeds_up_to_the_retraction(
    start: Callable[..., Server], pair: tuple[str, str], overlap: bool
) -> None:
    server = start(**smc_arguments(*pair, **SERVER), overlap=overlap)
    alone = server.generate(**asked())
    first, second = server.send(**asked()), server.send(**asked(1))
    server.step(5)
    server.retract(first)
    server.finish()
    assert (first.num_retractions, second.num_retractions) == (1, 0)
    said = first.said_before_retraction
    assert 0 < said < TOKENS
    assert first.output_ids[:said] == alone.output_ids[:said]
    assert first.output_ids != alone.output_ids
    server.flush()
    assert second.output_ids == server.generate(**asked(1)).output_ids
    server.flush()
