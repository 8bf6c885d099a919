"""Models whose layers see a window, or cap their scores: the text is the target's own."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laws import enumerate_law, next_probs, p_value
from model_families import EOS, greedy, make_family
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

MODES = ("smc", "exact", "mixed", "auto")
LENGTHS = [1, 5, 9, 24, 45]  # of prompts: shorter than a window, as long, longer
ALPHA = 1e-4  # each law is held red by chance once in ten thousand seeds


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, 64) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("gemma2", "gemma3_text"),
        pytest.param("gemma3_text", "gemma2", marks=pytest.mark.nightly),
        pytest.param("llama", "cohere2", marks=pytest.mark.nightly),
    ],
)
def test_the_text_is_the_targets_own(
    engine: Callable[..., Any],
    tmp_path: Path,
    prompts: list[list[int]],
    target: str,
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every mode, with prompts in pieces, cached and retracted; no slot is lost."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "12")
    paths = [
        make_family(tmp_path / family, family, seed=seed)
        for seed, family in enumerate((target, draft))
    ]
    expected = greedy(paths[0], prompts, 24)
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    settings = {"num_particles": 3, "num_steps": 3, "max_lag": 16, "chunked_prefill_size": 16}
    running = engine(**smc_arguments(*paths, **settings))
    for mode in MODES:
        params = {"temperature": 0, "max_new_tokens": 24, "custom_params": {"smc": {"mode": mode}}}
        found = running.generate(input_ids=prompts, sampling_params=params)
        assert [answer["output_ids"] for answer in found] == expected, mode


def test_laws(engine: Callable[..., Any], tmp_path: Path) -> None:
    """Of Gemma 2 with a window of three keys and a cap: a draft's text, and an exact one."""
    paths = [
        make_family(
            tmp_path / str(seed), "gemma2", seed=seed, vocab=4, scale=0.15, sliding_window=3
        )
        for seed in (1, 2)
    ]
    prompt = [3, 2, 3, 3, 2, 2]
    running = engine(
        **smc_arguments(*paths, num_particles=4, num_steps=2, max_lag=16),
        max_running_requests=64,
        max_total_tokens=30_000,
    )
    p, q = (next_probs(path, prompt) for path in paths)
    law_of = {
        "exact": enumerate_law(5, EOS, lambda position: p),
        "smc": enumerate_law(5, EOS, lambda position: p if position % 3 == 0 else q),
    }
    for mode, law in law_of.items():
        smc = {"mode": mode} if mode == "exact" else {"num_particles": 1, "evidence_threshold": 0}
        answers = running.generate(
            input_ids=[prompt] * 2000,
            sampling_params=[
                {"max_new_tokens": 5, "sampling_seed": seed, "custom_params": {"smc": smc}}
                for seed in range(2000)
            ],
        )
        assert p_value([tuple(a["output_ids"]) for a in answers], law) > ALPHA, mode
