"""The law of rounds whose drafts are mixed with n-gram matches, in every mode.

The corpus is a toy that proposes by the last tokens of a text; all else is the package's own.
Seeds are fixed, so a test passes always or never; error probabilities are those of correct code.
"""

import itertools
import math
from typing import Any

import pytest
from toy_corpus import children, corpus, with_matches
from toy_laws import EOS, LENGTH, VOCAB, Text, languages, law, p_value, run, total_variation
from toy_worker import Outcome

from sglang_smc.options.server import SMCConfig


def played(num_particles: int, num_steps: int, weight: float, **more: Any) -> Outcome:
    config = SMCConfig(
        num_particles=num_particles, num_steps=num_steps, ngram_weight=weight, **more
    )
    return run(config, languages(), corpus=corpus())


def law_of_mixture(num_steps: int, weight: float) -> dict[Text, float]:
    """The law of one particle that keeps all: K tokens of q behind each of p's."""
    target, draft = languages()
    found: dict[Text, float] = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        mass = 1.0
        for place, token in enumerate(text):
            before, column = text[:place], place % (num_steps + 1)
            if place and text[place - 1] == EOS:
                mass *= token == EOS
            elif mass and column == 0:
                mass *= float(target.after(before).double().softmax(-1)[token])
            elif mass:
                q = draft.after(before).double().softmax(-1)
                proposed = children(before, place - column + 1)
                mass *= float(with_matches(q, proposed, weight)[token])
        found[text] = mass
    return found


@pytest.mark.parametrize("max_lag", [1, LENGTH])
@pytest.mark.parametrize(("num_steps", "weight"), [(1, 0.5), (3, 0.3), (4, 0.8)])
def test_one_particle_follows_the_mixture_where_it_drafts(
    num_steps: int, weight: float, max_lag: int
) -> None:
    """Error probability 1e-4 each. Red for a tree behind another text, a node that is lost or
    followed too far, and a weight that is not w."""
    outcome = played(1, num_steps, weight, evidence_threshold=0.0, max_lag=max_lag)
    assert p_value(outcome, law_of_mixture(num_steps, weight)) > 1e-4
    assert p_value(outcome, law_of_mixture(num_steps, 0.0)) < 1e-9, "no test of matches"


@pytest.mark.parametrize("weight", [0.3, 0.9])
@pytest.mark.parametrize(("num_particles", "num_steps"), [(2, 1), (4, 2), (5, 4)])
def test_evidence_is_unbiased(num_particles: int, num_steps: int, weight: float) -> None:
    """E[Z-hat] = 1 within 4 standard errors (6e-5). Red where the weights' q is not the one that
    was drawn from."""
    outcome = played(num_particles, num_steps, weight, evidence_threshold=0.0, max_lag=LENGTH)
    evidence = outcome.log_evidence.exp()
    assert evidence.std() > 0
    assert abs(evidence.mean() - 1) < 4 * evidence.std() / math.sqrt(len(evidence))


def test_many_particles_come_near_the_target() -> None:
    """Noise alone makes a TV of about .04 here; the mixture's own law is far off."""
    outcome = played(24, 2, 0.3, evidence_threshold=0.0, max_lag=LENGTH)
    target = law([languages()[0]] * LENGTH)
    assert total_variation(outcome, target) < 0.06


@pytest.mark.parametrize("weight", [0.3, 1.0])
@pytest.mark.parametrize(("num_particles", "num_steps"), [(1, 4), (3, 2), (8, 3)])
def test_exact_verification_follows_the_target(
    num_particles: int, num_steps: int, weight: float
) -> None:
    """Error probability 1e-4 each; w = 1 has no mass on most tokens where something matches."""
    outcome = played(num_particles, num_steps, weight, mode="exact")
    assert p_value(outcome, law([languages()[0]] * LENGTH)) > 1e-4


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_mixed_with_a_high_threshold_is_exact(weight: float) -> None:
    """Error probability 1e-4 each."""
    outcome = played(4, 3, weight, mode="mixed", evidence_threshold=1e9)
    assert p_value(outcome, law([languages()[0]] * LENGTH)) > 1e-4


def test_auto_leans_no_further_than_it_does_without_matches() -> None:
    """A TV of noise alone is about .04. Red where the evidence is of another q."""
    target = law([languages()[0]] * LENGTH)
    assert total_variation(played(4, 3, 0.5, mode="auto"), target) < 0.09


def test_requests_that_want_none_keep_their_texts_beside_those_that_do() -> None:
    """Matches of one request must not reach another, nor its random numbers."""
    config = SMCConfig(num_particles=4, num_steps=3, ngram_weight=0.5, max_lag=3)
    mine, theirs = {"ngram_weight": 0.0}, {"ngram_weight": 0.9}
    together = run(config, languages(), corpus=corpus(), chosen=(mine, theirs)).outputs
    alone = run(SMCConfig(num_particles=4, num_steps=3, max_lag=3), languages()).outputs
    assert (together[::2] == alone[::2]).all()
    assert (together[1::2] != alone[1::2]).any()
