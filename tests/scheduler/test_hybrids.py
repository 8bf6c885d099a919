"""Greedy texts of a hybrid, whose target has recurrent states, are those of plain SGLang.

N-grams draft. Short prompts are those of states whose convolution has yet to fill, and of fewer
tokens than a round has columns, or slots. Requests come one by one, then in pairs, whose answers
are longer: matches follow the answer that was given before, and end with it.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import Reply, Server
from model_families import make_family
from tiny_models import smc_arguments

N = 3
K = 3
EDGES = (K, K + 1, K + 2, N * (K + 1) - 1, N * (K + 1), N * (K + 1) + 1)
BEFORE = 8  # new tokens of answers one by one
TOKENS = 12
HYBRID = {"disable_radix_cache": True, "chunked_prefill_size": 64}


def prompt_of(length: int) -> list[int]:
    """Return a prompt, every other one of which repeats itself, so that matches begin at once."""
    draw = random.Random(length)
    period = 3 if length % 2 else length
    loop = [draw.randrange(2, 64) for _ in range(period)]
    return [loop[i % period] for i in range(length)]


def answered(server: Server, lengths: tuple[int, ...], tokens: int) -> list[Reply]:
    own = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    sent = [server.send(input_ids=prompt_of(one), sampling_params=own) for one in lengths]
    server.finish()
    return sent


@pytest.mark.parametrize(
    "lengths",
    [(1, *EDGES, 80), pytest.param(tuple(range(1, 81)), marks=pytest.mark.nightly)],
    ids=["edges", "all"],
)
def test_greedy_texts_are_those_of_plain_decoding(
    start: Callable[..., Server], tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    target = make_family(tmp_path / "target", "qwen3_5_text")
    plain = start(model_path=target, **HYBRID)
    expected: dict[int, list[int]] = {}
    for first in range(0, len(lengths), 16):
        some = lengths[first : first + 16]
        found = answered(plain, some, TOKENS)
        expected |= {one: reply.output_ids for one, reply in zip(some, found, strict=True)}
    own = {"num_particles": N, "num_steps": K, "mode": "exact", "ngram_matches": True}
    asked: dict[str, Any] = smc_arguments(target, "", **own, **HYBRID)
    server = start(**{**asked, "speculative_draft_model_path": None})
    alone = [reply for one in lengths for reply in answered(server, (one,), BEFORE)]
    pairs = list(zip(lengths, reversed(lengths), strict=True))
    paired = [reply for pair in pairs for reply in answered(server, pair, TOKENS)]
    assert [reply.output_ids for reply in alone] == [expected[one][:BEFORE] for one in lengths]
    told = [expected[one] for pair in pairs for one in pair]
    assert [reply.output_ids for reply in paired] == told
    assert any(reply.meta["spec_num_correct_drafts"] for reply in alone), "what repeats itself"
    kept = sum(reply.meta["spec_num_correct_drafts"] for reply in paired)
    tried = sum(K * reply.meta["spec_verify_ct"] for reply in paired)
    assert 0.2 < kept / tried < 0.9, "some match, and some do not"
