"""The law of rounds with potentials, on models that read their KV through the ledger.

For any N and any values in between, E[Z-hat f(x)] is the sum of p(x) phi(x) f(x): the one statement
that a wrong weight, a value that does not follow its particle, or an end that is not judged breaks.
It is held for f that picks one text, for each of the likeliest, and for f = 1.
"""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from toy_grammar import maker, potential
from toy_laws import EOS, LENGTH, frequencies, languages, law, run, total_variation
from toy_potentials import Letters, callers, log_phi, read, times_phi
from toy_worker import Outcome

from sglang_smc.options.server import SMCConfig
from sglang_smc.requests import votes

NUM_RUNS = 1200
TARGET, DRAFT = languages()
SCHEDULES: list[Any] = [
    "round",
    "end",
    {"tokens": 2},
    {"delimiter": "a"},
    {"delimiter": 1},
    {"delimiter": EOS},
]


def named(when: Any = "round", **more: Any) -> dict[str, Any]:
    return {"potentials": [{"name": "letters", "when": when, **more}]}


def asked(chosen: dict[str, Any], num_particles: int, num_steps: int, **more: Any) -> Outcome:
    return asked_of((chosen,), num_particles, num_steps, **more)


def asked_of(
    chosen: tuple[dict[str, Any], ...], num_particles: int = 4, num_steps: int = 2, **more: Any
) -> Outcome:
    config = SMCConfig(num_particles=num_particles, num_steps=num_steps, max_lag=LENGTH)
    own = {"chosen": chosen, "callers": callers(letters=Letters()), "num_runs": NUM_RUNS}
    given = {**own, **more}
    return run(config, (TARGET, DRAFT), **given)


def assert_properly_weighted(outcome: Outcome, masses: dict[tuple[int, ...], float]) -> None:
    """Z-hat and each of the twelve texts that come out most, within 4.5 standard errors: together
    an error probability of 1e-4."""
    evidence = outcome.log_evidence.exp()
    assert evidence.std() > 0
    texts = [tuple(text) for text in outcome.outputs.tolist()]
    assert all(masses[text] > 0 for text, z in zip(texts, evidence, strict=True) if z > 0)
    likely = [text for text in texts if masses[text] > 0]
    often = [text for text, _ in Counter(likely).most_common(12)]
    picked = [evidence * torch.tensor([text == one for text in texts]) for one in often]
    wanted = [masses[one] for one in often]
    for found, mass in zip([evidence, *picked], [sum(masses.values()), *wanted], strict=True):
        error = found.std() / math.sqrt(len(found))
        assert abs(found.mean() - mass) < 4.5 * error, (float(found.mean()), mass, float(error))


@pytest.mark.parametrize("when", SCHEDULES, ids=str)
@pytest.mark.parametrize(("num_particles", "num_steps"), [(1, 2), (2, 1), (4, 2), (5, 4)])
def test_weighted_texts_follow_p_times_phi(num_particles: int, num_steps: int, when: Any) -> None:
    masses = times_phi(law([TARGET] * LENGTH), log_phi)
    assert_properly_weighted(asked(named(when), num_particles, num_steps), masses)


@pytest.mark.parametrize(
    "more", [{"max_lag": 1}, {"max_lag": 2}, {"resample_at": "token"}], ids=str
)
def test_whatever_a_round_does(more: dict[str, Any]) -> None:
    masses = times_phi(law([TARGET] * LENGTH), log_phi)
    assert_properly_weighted(asked({**named(), **more}, 4, 2), masses)


def test_the_error_falls_with_particles() -> None:
    masses = times_phi(law([TARGET] * LENGTH), log_phi)
    total = sum(masses.values())
    wanted = {text: mass / total for text, mass in masses.items()}
    distance = [total_variation(asked(named(), n, 2), wanted) for n in (1, 4, 32)]
    assert distance[1] < 0.7 * distance[0]
    assert distance[2] < 0.5 * distance[1]


def test_exponents_and_arguments() -> None:
    masses = times_phi(law([TARGET] * LENGTH), lambda text: 0.5 * log_phi(text, -1.0))
    chosen = named(exponent=0.5, args={"weight": -1.0})
    assert_properly_weighted(asked(chosen, 4, 2), masses)
    plain = asked(named(exponent=0), 4, 2)
    assert_properly_weighted(plain, law([TARGET] * LENGTH))


def test_two_potentials_multiply() -> None:
    two = [{"name": "letters", "when": "end"}, {"name": "letters", "args": {"weight": 0.4}}]
    masses = times_phi(law([TARGET] * LENGTH), lambda text: 1.5 * log_phi(text))
    assert_properly_weighted(asked({"potentials": two}, 4, 2), masses)


def test_beside_a_power() -> None:
    powered = {text: mass**1.5 for text, mass in law([TARGET] * LENGTH).items()}
    masses = times_phi(powered, log_phi)
    assert_properly_weighted(asked({**named(), "power": 1.5}, 4, 2), masses)


def test_beside_a_grammar() -> None:
    masses = times_phi(potential(TARGET, "(ab|b)*a?"), log_phi)
    outcome = asked(named(), 6, 2, grammar=maker("(ab|b)*a?"), num_runs=300)
    assert_properly_weighted(outcome, masses)


def test_plain_neighbours_do_not_notice() -> None:
    """Row by row: potentials, nothing, a power; those without have the very texts as alone."""
    mixed = ({**named()}, {"evidence_threshold": 0.0}, {"power": 1.5})
    together = asked_of(mixed)
    for place in range(3):
        rows = list(range(1, NUM_RUNS + 1))[place::3]
        alone = asked_of(mixed, rows=rows)
        assert torch.equal(together.outputs[place::3], alone.outputs)
        assert torch.equal(together.log_evidence[place::3], alone.log_evidence)


@pytest.mark.parametrize("row", range(1, 5))
@pytest.mark.parametrize("max_lag", [LENGTH, 1])
def test_no_text_is_asked_about_twice_and_none_is_left_out(row: int, max_lag: int) -> None:
    """Also where a short lag draws a text that has ended: its last token waits for the value."""
    letters = Letters()
    chosen = {**named(), "max_lag": max_lag}
    outcome = asked(chosen, 4, 2, rows=[row], callers=callers(letters=letters))
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

    outcome = asked(named(), 4, 2, rows=[1, 2, 3], callers=callers(letters=Never()))
    assert torch.equal(outcome.log_evidence, torch.full((3,), -math.inf, dtype=torch.float64))


def test_a_vote_takes_the_answer_that_weighs_most() -> None:
    """The last letter but the end is the answer. With many particles the vote is for the likelier
    one under the target, nearly always; draws by weight follow their shares."""
    masses = law([TARGET] * LENGTH)
    shares: dict[str, float] = {}
    for text, mass in masses.items():
        last = read(text).rstrip(".")[-1:]
        shares[last] = shares.get(last, 0.0) + mass
    likeliest = max((share, letter) for letter, share in shares.items() if letter)[1]
    vote = {"selection": "vote", "answer_pattern": r"([ab])\.*$", "evidence_threshold": 0.0}
    outcome = asked(vote, 32, 2, num_runs=400)
    found = [read(tuple(text)).rstrip(".")[-1:] for text in outcome.outputs.tolist()]
    voted = sum(letter == likeliest for letter in found) / len(found)
    drawn = asked({"evidence_threshold": 0.0}, 32, 2, num_runs=400)
    share = sum(read(t).rstrip(".")[-1:] == likeliest for t in map(tuple, drawn.outputs.tolist()))
    print("share of the likeliest:", shares, "voted:", voted, "drawn:", share / 400)
    assert voted > share / 400 + 0.1
    assert frequencies(outcome)
    assert EOS in itertools.chain(*outcome.outputs.tolist())


def test_votes_that_wait_for_later_rounds_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All particles have ended, and stand still until the last text has been read."""
    vote = {"selection": "vote", "answer_pattern": "[ab]", "evidence_threshold": 0.0}
    at_once = asked(vote, 4, 2, num_runs=6)
    monkeypatch.setattr(votes, "MOST_STEPS", (LENGTH + 1) * 20)  # about one text a round
    later = asked(vote, 4, 2, num_runs=6)
    assert later.num_rounds > at_once.num_rounds + 5
    assert torch.equal(later.outputs, at_once.outputs)
    assert torch.equal(later.log_evidence, at_once.log_evidence)
