"""A grammar as a potential: whole texts follow p given that they are legal.

Not the law of a local mask, which renormalises p token by token. All rounds are the package's own,
through `toy_worker`; grammars are xgrammar's. Error probabilities are those of correct code, had
the seeds been drawn.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_grammar import local_law, maker, potential
from toy_laws import LENGTH, TARGET, assert_properly_weighted, frequencies, p_value, total_variation
from toy_laws import run as serve
from toy_worker import Outcome

from sglang_smc.options.request import Budget

# Behind an a only bb may come, behind a b anything: a local mask takes a far too often.
UNEVEN = "abb|b(a|b)*"
# Legal so far, and yet without an end: nobody has the letter c.
BLIND = "a(a|b)c|b(a|b)*"
WEIGHED = {"proposal": "draft"}
BUDGETS = {"budgets": (Budget(4, 2), Budget(4, 0), Budget(1, 1))}
PAGE = Path(__file__).parents[2] / "docs" / "whole-texts.md"


def run(regex: str, *, size: int = 1000, **settings: Any) -> Outcome:
    return serve(**{"num_steps": 2, **settings}, num_runs=size, grammar=maker(regex))


def test_docs_say_how_far_from_p_in_a_grammar_texts_are() -> None:
    """Noise alone makes a TV of about .03; the local mask's law is far off."""
    outcome = run(UNEVEN, num_particles=8, size=1200)
    found = total_variation(outcome, potential(TARGET, UNEVEN))
    assert found == pytest.approx(0.04, abs=0.03)
    assert total_variation(outcome, local_law(TARGET, UNEVEN)) > 0.15
    assert " 0.04 in total variation" in PAGE.read_text()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_particles": 1},
        {"num_particles": 3, "num_steps": 1},
        {"num_steps": 4},
        {"resample_at": "token", "ess_threshold": 0.9},
        {"max_lag": 1},
        BUDGETS,
        {"power": 2.0},
        {"regex": BLIND},
        {"regex": BLIND, "num_steps": 3, "ess_threshold": 0.9},
        {"num_particles": 1, **WEIGHED},
        {"num_steps": 4, **WEIGHED},
        {"max_lag": 1, **WEIGHED},
        BUDGETS | WEIGHED,
        {"power": 2.0, **WEIGHED},
        {"power": 2.0, "regex": BLIND, **WEIGHED},
    ],
    ids=str,
)
def test_texts_are_weighed_by_p_where_they_are_legal(settings: dict[str, Any]) -> None:
    """At the first token, at drafts, at every bonus; particles in a dead end weigh nothing."""
    settings = {"regex": UNEVEN, "power": 1.0, "num_particles": 4, **settings}
    regex = settings.pop("regex")
    legal = potential(TARGET, UNEVEN if regex == UNEVEN else "b(a|b)*")
    # A text with weight 0 may be any.
    assert_properly_weighted(run(regex, **settings), legal, settings["power"])


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_verification_follows_the_local_masks_law(mode: str) -> None:
    """p-value above 1e-4; auto is near it. Every text is legal."""
    outcome = run(UNEVEN, mode=mode, num_particles=3)
    legal = potential(TARGET, UNEVEN)
    assert all(legal[text] > 0 for text in frequencies(outcome))
    if mode == "exact":
        assert p_value(outcome, local_law(TARGET, UNEVEN)) > 1e-4
    else:
        assert total_variation(outcome, local_law(TARGET, UNEVEN)) < 0.12
    assert not outcome.log_evidence.any()


@pytest.mark.parametrize("mode", ["smc", "weighed", "exact", "auto"])
def test_who_has_no_way_out_is_told_by_a_weight_of_zero(mode: str) -> None:
    """One particle that begins with an a, or a verified text: the request is stuck."""
    own = {"smc": {"num_particles": 1}, "weighed": {"num_particles": 1, **WEIGHED}}
    outcome = run(BLIND, size=400, **own.get(mode, {"mode": mode, "num_particles": 3}))
    stuck = outcome.log_evidence == -math.inf
    assert stuck.any() and not stuck.all()
    assert torch.equal(stuck, outcome.outputs[:, 0] == 0), "those that begin with an a"


def test_the_length_limit_cuts_legal_texts() -> None:
    """A text that must go on at the limit is legal, as far as it goes."""
    outcome = run("(ab){4}", num_particles=2, size=50)
    assert outcome.outputs.tolist() == [[0, 1, 0, 1, 0]] * 50
    assert LENGTH == 5
