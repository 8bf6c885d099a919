"""The law of rounds over tiny checkpoints whose requests choose temperatures, filters and biases.

Seeds are fixed, so a test passes always or never; the error probability is 1e-4 for each law.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_rounds import CheckpointRounds
from laws import NextProbs, Sequence, enumerate_law, next_probs, p_value
from toy_corpus import DEPTH, NUM_NODES, ToyTrie

from sglang_smc.proposers.ngram import Corpus

PROMPT, EOS, LENGTH, SIZE = [3, 2, 3], 1, 4, 800
MODEL = {"vocab_size": 4, "scale": 0.5}
EXACT = {"mode": "exact"}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 3},
    {"temperature": 1.7, "top_p": 0.9},
]


def outputs(server: CheckpointRounds, asked: list[dict[str, Any]]) -> list[list[Sequence]]:
    """Texts of each kind of request, all in one batch."""
    own = {"temperature": 1.0, "max_new_tokens": LENGTH}
    params = [{**own, **each, "sampling_seed": i} for i in range(SIZE) for each in asked]
    answers = server.generate([PROMPT] * len(params), params)
    server.check_owned()
    texts = [tuple(answer.output_ids) for answer in answers]
    return [texts[kind :: len(asked)] for kind in range(len(asked))]


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(seed=1, **MODEL), tiny(seed=2, **MODEL)


def test_verified_texts_follow_the_target_and_drafts_the_draft_at_its_own_temperature(
    pair: tuple[str, str],
) -> None:
    one = {"num_particles": 1, "evidence_threshold": 0, "draft_temperature": 2.0}
    asked = [{"custom_params": {"smc": EXACT}, **params} for params in SAMPLED]
    settings = {"num_particles": 3, "num_steps": 2}
    server = CheckpointRounds(*pair, settings, SIZE * (1 + len(asked)))
    found = outputs(server, [*asked, {"custom_params": {"smc": one}}])
    for texts, params in zip(found, SAMPLED, strict=False):
        p = next_probs(pair[0], PROMPT, **params)
        assert p_value(texts, enumerate_law(LENGTH, EOS, lambda _, p=p: p)) > 1e-4
    p, q = next_probs(pair[0], PROMPT), next_probs(pair[1], PROMPT, temperature=2.0)
    drawn_by = enumerate_law(LENGTH, EOS, lambda place: p if place % 3 == 0 else q)
    assert p_value(found[-1], drawn_by) > 1e-4


@pytest.mark.parametrize("padding", [3, 0])
def test_padding_of_either_model_comes_out_as_often_as_the_target_has_it(
    tiny: Callable[..., str], padding: int
) -> None:
    """Ids that the draft has no embedding for, and others that the target has no logits for."""
    target = tiny(seed=1, padding=padding, **MODEL)
    draft = tiny(seed=2, padding=3 - padding, **MODEL)
    server = CheckpointRounds(target, draft, {"num_particles": 4, "num_steps": 2, **EXACT}, SIZE)
    (found,) = outputs(server, [{}])
    p = next_probs(target, PROMPT)
    assert p_value(found, enumerate_law(LENGTH, EOS, lambda _: p)) > 1e-4
    assert any(token >= 4 for text in found for token in text) == bool(padding)


def test_matches_alone_leave_the_law_to_the_target(pair: tuple[str, str]) -> None:
    """Without a draft model drafts are nonsense where nothing matches, and are rejected."""
    settings = {"num_particles": 3, "num_steps": 3, "ngram_weight": 1, **EXACT}
    corpus = Corpus(ToyTrie(), DEPTH, NUM_NODES, alone=True)
    server = CheckpointRounds(pair[0], None, settings, 2 * SIZE, corpus=corpus)
    plain, biased = outputs(server, [{}, {"logit_bias": {"2": -100.0}}])
    p = next_probs(pair[0], PROMPT)
    assert p_value(plain, enumerate_law(LENGTH, EOS, lambda _: p)) > 1e-4
    assert p_value(biased, enumerate_law(LENGTH, EOS, lambda _: without(p, 2))) > 1e-4


def without(p: NextProbs, token: int) -> NextProbs:
    def probs(output: Sequence) -> torch.Tensor:
        left = p(output).clone()
        left[token] = 0.0  # e^-100 of what it was
        return left / left.sum()

    return probs
