"""The law of the output under top-k, top-p and min-p: filters act on p and on q alike.

Laws to hold runs against come from sorted logits. Seeds are fixed; error probabilities are those of
correct code, had they been drawn.
"""

import math
from typing import Any

import pytest
import torch
from sorted_law import rules, sorted_law
from toy_laws import EOS, LENGTH, NUM_RUNS, Text, languages, law, p_value, run
from toy_worker import Language

from sglang_smc.options.server import SMCConfig

FILTERS: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.7}, {"top_p": 0.9, "min_p": 0.4}]
GREEDY = {"top_k": 1, "top_p": 0.6}


def filtered_law(asked: dict[str, Any]) -> dict[Text, float]:
    logits = sorted_law(languages()[0].logits, rules(**asked))
    assert (logits == -torch.inf).any(), "the filters cut nothing here"
    return law([Language(logits)] * LENGTH)


@pytest.mark.parametrize("mode", ["exact", "mixed"])
@pytest.mark.parametrize("asked", FILTERS, ids=str)
def test_verified_rounds_follow_the_filtered_target(asked: dict[str, Any], mode: str) -> None:
    """Error probability 1e-4 each; evidence never suffices here."""
    chosen = {"mode": mode, **({"evidence_threshold": 1e9} if mode == "mixed" else {})}
    config = SMCConfig(num_particles=3, num_steps=2, evidence_threshold=0.0)
    outcome = run(config, languages(), chosen=(chosen,), asked=asked)
    assert p_value(outcome, filtered_law(asked)) > 1e-4


@pytest.mark.parametrize("asked", FILTERS, ids=str)
def test_a_draft_equal_to_the_target_is_exact(asked: dict[str, Any]) -> None:
    """p and q are cut alike in every column, or weights would leave 1."""
    target, _ = languages()
    equal = SMCConfig(num_particles=4, num_steps=2, ess_threshold=1.0, max_lag=LENGTH)
    outcome = run(equal, (target, target), asked=asked)
    assert p_value(outcome, filtered_law(asked)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-5


def test_a_power_of_the_filtered_target_has_its_normaliser_estimated() -> None:
    """Within 4 standard errors (error probability 6e-5).

    With a draft that keeps what the target keeps: what no draft proposes adds nothing to Z-hat.
    """
    target, _ = languages()
    expected = sum(mass**2 for mass in filtered_law(FILTERS[2]).values())
    config = SMCConfig(num_particles=8, num_steps=2, evidence_threshold=0.0, power=2.0)
    evidence = run(config, (target, target), asked=FILTERS[2]).log_evidence.exp()
    assert abs(evidence.mean() - expected) < 4 * evidence.std() / math.sqrt(NUM_RUNS)


@pytest.mark.parametrize("chosen", [{}, {"power": 2.0}, {"mode": "exact"}], ids=str)
def test_greedy_requests_get_the_likeliest_text(chosen: dict[str, Any]) -> None:
    target, draft = languages()
    text: list[int] = []
    while len(text) < LENGTH and EOS not in text:
        text.append(int(target.after(tuple(text)).argmax()))
    config = SMCConfig(num_particles=3, num_steps=2, evidence_threshold=0.0)
    outcome = run(config, (target, draft), num_runs=5, chosen=(chosen,), asked=GREEDY)
    assert outcome.outputs.tolist() == [text + [EOS] * (LENGTH - len(text))] * 5
    assert outcome.log_evidence.abs().max() < 1e-9
