"""The law of rounds whose drafts are mixed with n-gram matches, in every mode.

The corpus is a toy that proposes by the last tokens of a text; all else is the package's own.
Seeds are fixed, so a test passes always or never; error probabilities are those of correct code.
"""

from typing import Any, cast

import pytest
import torch
import toy_worker
from toy_corpus import children, corpus, with_matches
from toy_laws import (
    DRAFT,
    LENGTH,
    TARGET,
    VOCAB,
    P,
    Text,
    assert_properly_weighted,
    law_by,
    next_law,
    p_value,
    run,
    total_variation,
)
from toy_worker import Outcome

from sglang_smc.proposers.ngram import UniformDraft


def played(
    num_particles: int, num_steps: int, weight: float, *, alone: bool = False, **more: Any
) -> Outcome:
    settings = {"evidence_threshold": 0.0, "ngram_weight": weight, **more}
    sizes = {"num_particles": num_particles, "num_steps": num_steps}
    return run(**sizes, **settings, corpus=corpus(alone=alone))


def law_of_mixture(num_steps: int, weight: float) -> dict[Text, float]:
    """The law of one particle that keeps all: K tokens of q behind each of p's."""

    def mixed(text: Text) -> torch.Tensor:
        if (column := len(text) % (num_steps + 1)) == 0:
            return next_law(TARGET, text)
        proposed = children(text, len(text) - column + 1)
        return with_matches(next_law(DRAFT, text), proposed, weight)

    return law_by(mixed)


@pytest.mark.parametrize(
    ("num_steps", "weight", "max_lag"), [(1, 0.5, 1), (3, 0.3, LENGTH), (4, 0.8, 1)]
)
def test_one_particle_follows_the_mixture(num_steps: int, weight: float, max_lag: int) -> None:
    """Error probability 1e-4 each. Red for a tree behind another text, a node that is lost or
    followed too far, and a weight that is not w."""
    outcome = played(1, num_steps, weight, max_lag=max_lag)
    assert p_value(outcome, law_of_mixture(num_steps, weight)) > 1e-4
    assert p_value(outcome, law_of_mixture(num_steps, 0.0)) < 1e-9, "no test of matches"


@pytest.mark.parametrize(
    ("num_particles", "num_steps", "weight"), [(2, 1, 0.9), (4, 2, 0.3), (5, 4, 0.9)]
)
def test_texts_are_properly_weighted(num_particles: int, num_steps: int, weight: float) -> None:
    """Red where the weights' q is not the one that was drawn from."""
    outcome = played(num_particles, num_steps, weight, max_lag=LENGTH)
    assert_properly_weighted(outcome, P)


@pytest.mark.parametrize(
    ("num_particles", "num_steps", "weight", "mode"),
    [(1, 4, 0.3, "exact"), (3, 2, 1.0, "exact"), (8, 3, 0.3, "exact"), (4, 3, 1.0, "auto")],
)
def test_verification_follows_the_target(
    num_particles: int, num_steps: int, weight: float, mode: str
) -> None:
    """Error probability 1e-4 each; w = 1 has no mass on most tokens where something matches."""
    outcome = played(num_particles, num_steps, weight, mode=mode, evidence_threshold=1e9)
    assert p_value(outcome, P) > 1e-4


def test_matches_alone_leave_the_law_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error probability 1e-4: without a draft model what is drafted where nothing matches is
    nonsense, and rejected."""
    uniform: Any = UniformDraft(cast("Any", None), VOCAB)
    monkeypatch.setattr(toy_worker, "LanguageModel", lambda *_: uniform)
    outcome = played(3, 3, 1.0, mode="exact", alone=True)
    assert p_value(outcome, P) > 1e-4


def test_auto_leans_no_further_than_it_does_without_matches() -> None:
    """A TV of noise alone is about .06. Red where the evidence is of another q."""
    found = played(4, 3, 0.5, mode="auto", evidence_threshold=None)
    assert total_variation(found, P) < 0.11
