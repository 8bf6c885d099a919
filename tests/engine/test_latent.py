"""Models of latent attention (MLA) through a real engine, on either side, in every mode.

The reference is the model in transformers, which makes keys and values of each head, where the
engine attends to latents.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laws import enumerate_law, next_probs, p_value
from model_families import EOS, greedy, make_family
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODES: list[dict[str, Any]] = [{"mode": mode} for mode in ("smc", "exact", "mixed", "auto")]
TOKENS = 24
LENGTHS = [1, 2, 7, 16, 30, 45]

ALPHA, SIZE = 1e-4, 2000  # as in test_law, which says why
PROMPT = [3, 2, 3]
ROOM = {"max_running_requests": 128, "max_total_tokens": 60_000, "max_lag": 16}


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("deepseek_v3", "llama"),
        ("llama", "deepseek_v2"),
        ("glm4_moe_lite", "deepseek_v2"),
        pytest.param("deepseek_v2", "minicpm3", marks=pytest.mark.nightly),
        pytest.param("minicpm3", "llama", marks=pytest.mark.nightly),
    ],
)
def test_the_text_is_the_targets_own(
    engine: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    draft: str,
) -> None:
    """With prompts in pieces, behind a cache hit, and where a request loses its latents midway."""
    choose = random.Random(0)
    prompts = [[choose.randrange(2, 64) for _ in range(length)] for length in LENGTHS]
    paths = [
        make_family(tmp_path / family, family, seed=seed)
        for seed, family in enumerate((target, draft))
    ]
    expected = greedy(paths[0], prompts, TOKENS)
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
    sizes = {"num_particles": 3, "num_steps": 3, "max_lag": 16, "chunked_prefill_size": 16}
    running = engine(**smc_arguments(*paths, **sizes))
    retractions = cached = 0
    for _ in range(2):
        found = running.generate(
            input_ids=prompts * len(MODES),
            sampling_params=[
                {"temperature": 0, "max_new_tokens": TOKENS, "custom_params": {"smc": smc}}
                for smc in MODES
                for _ in prompts
            ],
        )
        assert [answer["output_ids"] for answer in found] == expected * len(MODES)
        infos = [answer["meta_info"] for answer in found]
        retractions += sum(info["num_retractions"] for info in infos)
        cached += sum(info["cached_tokens"] for info in infos)
    assert retractions and cached
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)


def test_laws(engine: Callable[..., Any], tmp_path: Path) -> None:
    """One particle follows the draft where it drafts, and mode exact the target everywhere."""
    pair = [
        make_family(tmp_path / family, family, seed=seed, scale=0.5, vocab=4)
        for seed, family in enumerate(("deepseek_v3", "deepseek_v2"))
    ]
    running = engine(**smc_arguments(*pair, num_particles=4, num_steps=3, **ROOM))
    p, q = (next_probs(model, PROMPT) for model in pair)

    def outputs(smc: dict[str, Any]) -> list[tuple[int, ...]]:
        params = {"max_new_tokens": 5, "custom_params": {"smc": smc}}
        answers = running.generate(
            input_ids=[PROMPT] * SIZE,
            sampling_params=[{**params, "sampling_seed": seed} for seed in range(SIZE)],
        )
        return [tuple(answer["output_ids"]) for answer in answers]

    drafting = {"evidence_threshold": 0, "num_particles": 1, "num_steps": 2}
    # Prefill draws position 0 from the target; then K drafts and a bonus, again and again.
    law = enumerate_law(5, EOS, lambda position: p if position % 3 == 0 else q)
    assert p_value(outputs(drafting), law) > ALPHA
    law = enumerate_law(5, EOS, lambda _: p)
    assert p_value(outputs({"mode": "exact"}), law) > ALPHA
