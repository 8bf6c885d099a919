"""The law of rounds with potentials, on models that read their KV through the ledger.

For any N and any values in between, E[Z-hat f(x)] is the sum of p(x) phi(x) f(x): the one statement
that a wrong weight, a value that does not follow its particle, or an end that is not judged breaks.
It is held for f that picks one text, for each of the likeliest, and for f = 1.
"""

import math
from typing import Any

import pytest
import torch
from toy_grammar import Letters, log_phi, maker, potential, read, runners, times_phi
from toy_laws import EOS, LENGTH, TARGET, P, assert_properly_weighted, run
from toy_worker import Outcome

WEIGHED = {"proposal": "draft"}
RESAMPLED = {"ess_threshold": 1.0}


def named(when: Any = "round", **more: Any) -> dict[str, Any]:
    return {"potentials": [{"name": "letters", "when": when, **more}]}


def asked(chosen: dict[str, Any], num_particles: int, num_steps: int, **more: Any) -> Outcome:
    own = {"num_runs": 800, "max_lag": LENGTH, "runners": runners(letters=Letters()), **more}
    return run(num_particles=num_particles, num_steps=num_steps, chosen=(chosen,), **own)


@pytest.mark.parametrize(
    ("num_particles", "num_steps", "when", "more"),
    [
        (1, 2, "round", {}),
        (2, 1, "end", {}),
        (4, 2, {"tokens": 2}, {}),
        (5, 4, {"delimiter": "a"}, {}),
        (2, 1, {"delimiter": 1}, {}),
        (1, 2, {"delimiter": EOS}, {}),
        (5, 4, "round", {"max_lag": 1}),
        (4, 2, "round", {"max_lag": 2}),
        (4, 2, {"tokens": 2}, {"resample_at": "token"}),
        (4, 2, "end", {"resample_at": "token"}),
        (4, 2, "round", RESAMPLED),
        (6, 1, {"delimiter": "a"}, {**RESAMPLED, "max_lag": 2}),
        (1, 2, "round", WEIGHED),
        (4, 2, "round", {**WEIGHED, "ess_threshold": 1.0}),
        (5, 4, {"delimiter": "a"}, WEIGHED),
        (4, 2, {"tokens": 2}, {**WEIGHED, "max_lag": 1}),
        (3, 3, "end", {**WEIGHED, "max_lag": 2}),
    ],
)
def test_weighted_texts_follow_p_times_phi(
    num_particles: int, num_steps: int, when: Any, more: dict[str, Any]
) -> None:
    outcome = asked({**named(when), **more}, num_particles, num_steps)
    assert_properly_weighted(outcome, times_phi(P, log_phi))


def test_exponents_arguments_two_potentials_and_a_power() -> None:
    halved = times_phi(P, lambda text: 0.5 * log_phi(text, -1.0))
    chosen = named(exponent=0.5, args={"weight": -1.0})
    assert_properly_weighted(asked(chosen, 4, 2), halved)
    assert_properly_weighted(asked(named(exponent=0), 4, 2), P)
    two = [{"name": "letters", "when": "end"}, {"name": "letters", "args": {"weight": 0.4}}]
    both = times_phi(P, lambda text: 1.5 * log_phi(text))
    assert_properly_weighted(asked({"potentials": two}, 4, 2), both)
    powered = times_phi({text: mass**1.5 for text, mass in P.items()}, log_phi)
    for more in ({}, WEIGHED):
        assert_properly_weighted(asked({**named(), "power": 1.5, **more}, 4, 2), powered)


def test_beside_a_grammar() -> None:
    masses = times_phi(potential(TARGET, "(ab|b)*a?"), log_phi)
    for chosen in (named(), {**named(), **WEIGHED}):
        outcome = asked(chosen, 6, 2, grammar=maker("(ab|b)*a?"))
        assert_properly_weighted(outcome, masses)


@pytest.mark.parametrize(("row", "max_lag"), [(1, LENGTH), (2, 1), (3, LENGTH), (4, 1)])
def test_no_text_is_asked_about_twice_and_none_is_left_out(row: int, max_lag: int) -> None:
    """Also where a short lag draws a text that has ended: its last token waits for the value."""
    letters = Letters()
    chosen = {**named(), "max_lag": max_lag}
    outcome = asked(chosen, 4, 2, rows=[row], runners=runners(letters=letters))
    whole = [text for is_whole, texts in letters.asked if is_whole for text in texts]
    begun = [text for is_whole, texts in letters.asked if not is_whole for text in texts]
    assert len(set(whole)) == len(whole) and len(set(begun)) == len(begun)
    assert all(text.endswith(".") or len(text) == LENGTH for text in whole)
    assert read(tuple(outcome.outputs[0].tolist())) in whole


def test_who_is_forbidden_altogether_ends() -> None:
    class Never(Letters):
        def prefix(self, texts: Any) -> list[float]:
            return [-math.inf] * len(texts)

        complete = prefix

    outcome = asked(named(), 4, 2, rows=[1, 2, 3], runners=runners(letters=Never()))
    assert torch.equal(outcome.log_evidence, torch.full((3,), -math.inf, dtype=torch.float64))
