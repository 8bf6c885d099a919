"""A target with linear attention: each particle has a recurrent state of its own.

The reference is the model in transformers, which keeps no state here and reads each text anew. One
server hears of each round one round late, as on a GPU; the other one in turn.
"""

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import enumerate_law, next_probs, p_value, total_variation
from model_families import make_family
from tiny_models import smc_arguments
from transformers import AutoModelForCausalLM

from sglang_smc import upstream
from sglang_smc.options.server import CPU_OVERLAP_ENV

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not upstream.IS_NEWEST, reason="older releases are refused"),
]

EOS, ALPHA = 1, 1e-4
CHUNK = 16
WITHOUT_CACHE = {"disable_radix_cache": True, "max_lag": 16}
CHOICES: dict[str, dict[str, Any]] = {
    "smc": {},
    "exact": {"mode": "exact"},
    "mixed": {"mode": "mixed"},
    "auto": {"mode": "auto"},
    "token by token": {"resample_at": "token", "ess_threshold": 1.0},
    "fewer": {"num_particles": 2, "num_steps": 1},
    "one": {"num_particles": 1},
    "a power": {"power": 2.0},
}


@functools.cache
def prompts() -> list[list[int]]:
    """Some of them longer than a chunk, or than two."""
    draw = random.Random(0)
    return [[draw.randrange(2, 64) for _ in range(length)] for length in (1, 2, 7, 16, 30, 45)]


def pair_of(path: Path, draft: Callable[..., str], vocab_size: int, scale: float) -> list[str]:
    target = make_family(path, "qwen3_5_text", seed=3, scale=scale, vocab=vocab_size)
    return [target, draft(seed=2, vocab_size=vocab_size, scale=scale)]


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return pair_of(tmp_path_factory.mktemp("recurrent"), tiny, 64, 0.3)


@pytest.fixture(scope="module")
def model(pair: list[str]) -> Any:
    return AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)


@pytest.fixture
def late(engine: Callable[..., Any], pair: list[str]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CPU_OVERLAP_ENV, "1")
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
        sizes = {"num_particles": 4, "num_steps": 3, "chunked_prefill_size": CHUNK}
        yield engine(**smc_arguments(*pair, **sizes, **WITHOUT_CACHE))


@functools.cache
@torch.no_grad()
def greedy(model: Any) -> list[list[int]]:
    """24 tokens behind each prompt, ends among them."""
    texts = [list(prompt) for prompt in prompts()]
    for text in texts * 24:
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return [text[-24:] for text in texts]


@pytest.mark.parametrize("choice", CHOICES)
def test_texts_at_temperature_0_are_the_targets_own(late: Any, model: Any, choice: str) -> None:
    """A token that a state misses, has twice or has from another particle changes the text.

    Some are retracted, and read anew.
    """
    expected = greedy(model)
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    answers = late.generate(
        input_ids=prompts(),
        sampling_params={**params, "custom_params": {"smc": CHOICES[choice]}},
    )
    assert [answer["output_ids"] for answer in answers] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize("choice", CHOICES)
def test_log_probabilities_are_those_of_the_text(late: Any, model: Any, choice: str) -> None:
    """Hot texts, whose particles part and die: each must go on from the state of its own text."""
    answers = late.generate(
        input_ids=prompts(),
        sampling_params=[
            {
                "max_new_tokens": 40,
                "sampling_seed": seed,
                "ignore_eos": True,
                "custom_params": {"smc": CHOICES[choice]},
            }
            for seed in range(len(prompts()))
        ],
        return_logprob=True,
    )
    for prompt, answer in zip(prompts(), answers, strict=True):
        text = answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text]), use_cache=False).logits[0]
        expected = logits.log_softmax(1)[len(prompt) - 1 : -1].gather(1, torch.tensor([text]).T)
        found = [number for number, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(expected.flatten().tolist(), abs=2e-3)
    if choice == "smc":
        resampled = sum(answer["meta_info"]["spec_smc_resample_ct"] for answer in answers)
        assert resampled > len(answers)


SMALL = 4
PROMPT = [3, 2, 3]
ROOM = {"max_running_requests": 64, "max_total_tokens": 40_000}


@pytest.fixture(scope="module")
def small_pair(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return pair_of(tmp_path_factory.mktemp("small"), tiny, SMALL, 0.5)


@pytest.fixture
def small(engine: Callable[..., Any], small_pair: list[str]) -> Any:
    """More particles than columns: their states do not find room among those of columns."""
    sizes = {"num_particles": 8, "num_steps": 2}
    return engine(**smc_arguments(*small_pair, **sizes, **ROOM, **WITHOUT_CACHE))


def draw(
    running: Any, size: int, smc: dict[str, Any], temperature: float = 1.0
) -> list[tuple[int, ...]]:
    params = {"max_new_tokens": 6, "temperature": temperature, "custom_params": {"smc": smc}}
    sampling = [{**params, "sampling_seed": seed} for seed in range(size)]
    answers = running.generate(input_ids=[PROMPT] * size, sampling_params=sampling)
    return [tuple(answer["output_ids"]) for answer in answers]


def test_mode_exact_follows_the_target(small: Any, small_pair: list[str]) -> None:
    p = next_probs(small_pair[0], PROMPT)
    law = enumerate_law(6, EOS, lambda _: p)
    assert p_value(draw(small, 2000, {"mode": "exact", "num_particles": 3}), law) > ALPHA


def test_particles_bring_mode_smc_nearer_to_the_target(small: Any, small_pair: list[str]) -> None:
    p = next_probs(small_pair[0], PROMPT, temperature=2.0)
    law = enumerate_law(6, EOS, lambda _: p)
    distance = {}
    for number in (1, 8):
        smc = {"num_particles": number, "evidence_threshold": 0}
        distance[number] = total_variation(draw(small, 3000, smc, temperature=2.0), law)
    assert distance[8] < 0.75 * distance[1]


@pytest.mark.parametrize("mode", ["smc", "exact", "mixed", "auto"])
def test_a_seeded_text_is_the_same_alone_and_in_a_batch(small: Any, mode: str) -> None:
    """Requests come to other rows, whose particles have had other states."""
    texts = [[2 + (i * j) % 2 for j in range(i + 1)] for i in range(6)]
    sampling: list[dict[str, Any]] = [
        {
            "max_new_tokens": 16 + i,
            "sampling_seed": i,
            "ignore_eos": True,
            "custom_params": {"smc": {"mode": mode}},
        }
        for i in range(6)
    ]
    together = small.generate(input_ids=texts, sampling_params=sampling)
    alone = [
        small.generate(input_ids=text, sampling_params=params)
        for text, params in reversed(list(zip(texts, sampling, strict=True)))
    ]
    found = [answer["output_ids"] for answer in together]
    assert found == [answer["output_ids"] for answer in reversed(alone)]
