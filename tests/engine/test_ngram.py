"""N-gram matches as the draft, in a real engine.

What matches depends on what was answered before: requests come one by one, to the engine and to the
package's own rounds over transformers, and answers are equal (see test_golden.py).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_rounds import CheckpointRounds, check
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
#: `custom_params.smc` and sampling parameters.
ASKED: list[Asked] = [
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
    answers = []
    expected = []
    for prompt, sampling in one_by_one(asked):
        answers += running.generate(input_ids=[prompt], sampling_params=[sampling])
        expected += own.generate([prompt], [sampling])
    assert check(answers, expected) == len(answers)


def rounds_of_second(running: Any) -> int:
    """Rounds of an answer that was given before, and is all of matches."""
    asked = params(({}, {"temperature": 0}))
    running.flush_cache()
    for _ in range(2):
        answer = running.generate(input_ids=PROMPTS[0], sampling_params=asked)
    return answer["meta_info"]["spec_smc_rounds_ct"]


def rounds_of(target: str, **settings: Any) -> CheckpointRounds:
    config = {**SIZES, **settings}
    arguments = SimpleNamespace(
        speculative_ngram_min_bfs_breadth=1,
        speculative_ngram_max_bfs_breadth=10,
        speculative_ngram_match_type="BFS",
        **CORPUS,
    )
    corpus = open_corpus(arguments, SMCConfig(**config))  # type: ignore[arg-type]
    return CheckpointRounds(target, None, config, 100, corpus=corpus)


def test_matches_draft(
    engine: Callable[..., Any], tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is retracted is matched again from its start."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")  # of several requests at a time
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "9")
    target = tiny(seed=1, vocab_size=64)
    own = {"mode": "exact", "ngram_matches": True}
    arguments = smc_arguments(target, "", **SIZES, **own)
    running = engine(**{**arguments, "speculative_draft_model_path": None}, **CORPUS)
    compare(running, rounds_of(target, **own), ASKED)
    prompts = PROMPTS * 4
    asked = [params(({}, {}), seed=i) for i in range(len(prompts))]
    answers = running.generate(input_ids=prompts, sampling_params=asked)
    assert all(len(answer["output_ids"]) == TOKENS for answer in answers)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert rounds_of_second(running) < 0.5 * TOKENS
