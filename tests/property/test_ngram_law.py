"""The law of rounds that draft from n-gram matches, in every mode that verifies.

The corpus is a toy that proposes by the last tokens of a text; all else is the package's own.
Seeds are fixed, so a test passes always or never; error probabilities are those of correct code.
"""

from typing import Any, cast

import pytest
import torch
import toy_worker
from toy_corpus import children, corpus, law_of_matches
from toy_laws import (
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
)
from toy_worker import Outcome

from sglang_smc.proposers.ngram import UniformDraft


@pytest.fixture(autouse=True)
def no_model_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform: Any = UniformDraft(cast("Any", None), VOCAB)
    monkeypatch.setattr(toy_worker, "ToyDraft", lambda *_: uniform)


def played(num_particles: int, num_steps: int, **more: Any) -> Outcome:
    sizes = {"num_particles": num_particles, "num_steps": num_steps}
    return run(**sizes, **more, ngram_matches=True, corpus=corpus())


def law_of_drafts(num_steps: int) -> dict[Text, float]:
    """The law of one particle that keeps all: K tokens of q behind each of p's."""

    def drafted(text: Text) -> torch.Tensor:
        if (column := len(text) % (num_steps + 1)) == 0:
            return next_law(TARGET, text)
        return law_of_matches(children(text, len(text) - column + 1), VOCAB)

    return law_by(drafted)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_one_particle_that_keeps_all_follows_the_matches(num_steps: int) -> None:
    """Error probability 1e-4 each. Red for a tree behind another text, and a node that is lost or
    followed too far."""
    outcome = played(1, num_steps, mode="auto", evidence_threshold=0.0)
    assert p_value(outcome, law_of_drafts(num_steps)) > 1e-4


@pytest.mark.parametrize(
    ("num_particles", "num_steps", "mode"), [(1, 4, "exact"), (8, 3, "exact"), (4, 3, "auto")]
)
def test_verification_leaves_the_law_to_the_target(
    num_particles: int, num_steps: int, mode: str
) -> None:
    """Error probability 1e-4 each: q has no mass on most tokens where something matches, and what
    is drafted where nothing does is nonsense, and rejected."""
    threshold = {"evidence_threshold": 1e9} if mode == "auto" else {}
    assert p_value(played(num_particles, num_steps, mode=mode, **threshold), P) > 1e-4


def test_verified_texts_are_weighed_by_the_power_of_p() -> None:
    outcome = played(4, 2, power=2.0, max_lag=LENGTH)
    assert_properly_weighted(outcome, P, 2.0)
