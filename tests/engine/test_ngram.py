"""N-gram matches in real engines, beside a draft model and alone.

What matches depends on what was answered before: requests come one by one, to the engine and to the
package's own rounds over transformers, and answers are equal (see test_golden.py).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_rounds import Answer, CheckpointRounds, check
from tiny_models import smc_arguments

from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.ngram import open_corpus

pytestmark = pytest.mark.engine

LOOP = [7, 30, 12, 45, 9, 22]
PROMPTS = [[3, 2, 3], LOOP * 4, [5, 9, 5, 9, 5], [40]]
TOKENS = 24
CORPUS = {"speculative_ngram_capacity": 100_000, "speculative_ngram_max_trie_depth": 6}
SIZES = {"num_particles": 8, "num_steps": 3, "max_lag": 16}
Asked = tuple[dict[str, Any], dict[str, Any]]
EXACT = {"mode": "exact"}
#: `custom_params.smc` and sampling parameters.
BESIDE: list[Asked] = [
    ({"ngram_weight": 0.5, "evidence_threshold": 0}, {"temperature": 0.5}),
    ({"ngram_weight": 0.9, "mode": "auto"}, {"temperature": 0}),
    ({"ngram_weight": 1, **EXACT}, {"temperature": 0.1}),
    ({"ngram_weight": 0.9, "num_particles": 1}, {"logit_bias": {"9": 3.0}}),
    ({"ngram_weight": 0.7, "mode": "auto"}, {"top_k": 9, "stop": ["t63 t63"]}),
]
ALONE: list[Asked] = [
    ({}, {"temperature": 0.1}),
    ({"mode": "auto"}, {"temperature": 0}),
    ({"mode": "auto", "num_steps": 2}, {"top_k": 9, "stop": ["t63 t63"]}),
]


def params(asked: Asked, seed: int = 0) -> dict[str, Any]:
    own = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": seed}
    return {**own, **asked[1], "custom_params": {"smc": asked[0]}}


def one_by_one(asked: list[Asked]) -> list[tuple[list[int], dict[str, Any]]]:
    """Each twice, for two of the prompts: the second time matches are all of the first answer."""
    return [
        (PROMPTS[seed % len(PROMPTS)], params(asked[seed // 2], seed))
        for seed in range(2 * len(asked))
        for _ in range(2)
    ]


def compare(running: Any, own: CheckpointRounds, asked: list[Asked]) -> None:
    answers, expected = [], []
    for prompt, sampling in one_by_one(asked):
        answers += running.generate(input_ids=[prompt], sampling_params=[sampling])
        expected += own.generate([prompt], [sampling])
    assert check(answers, expected) == len(answers)


def rounds_of_second(running: Any, weight: float) -> int:
    """Rounds of an answer that was given before, within matches of this weight."""
    running.flush_cache()
    asked = params(({**EXACT, "ngram_weight": weight}, {"temperature": 0.02}))
    for _ in range(2):
        answer = running.generate(input_ids=PROMPTS[0], sampling_params=asked)
    return answer["meta_info"]["spec_smc_rounds_ct"]


def rounds_of(target: str, draft: str | None, **settings: Any) -> CheckpointRounds:
    config = {**SIZES, **settings}
    arguments = SimpleNamespace(
        speculative_ngram_min_bfs_breadth=1,
        speculative_ngram_max_bfs_breadth=10,
        speculative_ngram_match_type="BFS",
        **CORPUS,
    )
    corpus = open_corpus(arguments, SMCConfig(**config))  # type: ignore[arg-type]
    return CheckpointRounds(target, draft, config, 100, corpus=corpus)


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(seed=1, vocab_size=64), tiny(seed=2, vocab_size=64)


def test_beside_a_draft_model(
    engine: Callable[..., Any], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who wants no matches keeps his text in a batch with those who do."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")  # of several requests at a time
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "9")
    running = engine(**smc_arguments(*pair, **SIZES, ngram_weight=0.3), **CORPUS)
    own = rounds_of(*pair, ngram_weight=0.3)
    compare(running, own, BESIDE)
    prompts = PROMPTS * 4
    none, some = ({"ngram_weight": weight} for weight in (0.0, 0.5))
    kinds: list[Asked] = [(none, {}), (some, {})]
    asked = [params(kinds[i % 2], seed=i) for i in range(len(prompts))]
    answers = running.generate(input_ids=prompts, sampling_params=asked)
    expected: list[Answer] = own.generate(prompts[::2], asked[::2])
    assert check(answers[::2], expected)
    assert all(len(answer["output_ids"]) == TOKENS for answer in answers)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert rounds_of_second(running, 0.9) < 0.5 * rounds_of_second(running, 0.0)


def test_alone(engine: Callable[..., Any], pair: tuple[str, str]) -> None:
    arguments = smc_arguments(pair[0], "", **SIZES, mode="exact", ngram_weight=1)
    running = engine(**{**arguments, "speculative_draft_model_path": None}, **CORPUS)
    compare(running, rounds_of(pair[0], None, mode="exact", ngram_weight=1), ALONE)
