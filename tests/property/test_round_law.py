"""The law of the package's own rounds, with models that read their KV through the ledger.

Seeds are fixed, so a test passes always or never; error probabilities are those of correct code,
had they been drawn.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_laws import (
    DRAFT,
    EOS,
    LENGTH,
    NUM_CONTEXTS,
    NUM_RUNS,
    PLAIN,
    SCRIPTS,
    TARGET,
    VOCAB,
    P,
    assert_properly_weighted,
    frequencies,
    languages,
    law,
    p_value,
    pairwise,
    run,
    total_variation,
    unstratified,
)
from toy_worker import Language, Outcome

from sglang_smc.ops import TORCH
from sglang_smc.options.request import OFF, Budget
from sglang_smc.options.server import MODES, PROPOSALS, RESAMPLING_METHODS

EQUAL = (TARGET, TARGET)


def draft_of(kind: str) -> Language:
    """A draft that is near, one that ends texts at another rate, or one far off."""
    if kind == "hasty":
        return Language(TARGET.logits + 1.5 * torch.eye(3)[EOS])
    return languages(difference=0.7 if kind == "near" else 1.2)[1]


@pytest.mark.parametrize(
    ("num_steps", "max_lag"), [(1, 1), (2, LENGTH), (2, 1), (4, LENGTH)], ids=str
)
def test_one_particle_follows_q_and_p_where_bonus(num_steps: int, max_lag: int) -> None:
    """Error probability 1e-4 each; the slightest misreading of KV changes every context."""
    sizes = {"num_particles": 1, "num_steps": num_steps, "max_lag": max_lag}
    outcome = run(**PLAIN | sizes)
    assert p_value(outcome, law(TARGET, *[DRAFT] * num_steps)) > 1e-4
    assert p_value(outcome, P) < 1e-9, "the test could not tell them apart"


@pytest.mark.parametrize("max_lag", [1, 3, LENGTH])
@pytest.mark.parametrize("resample_at", ["block", "token"])
def test_draft_equal_to_target_is_exact(max_lag: int, resample_at: str) -> None:
    """Error probability 1e-4 each; exact evidence, since no mean weight ever leaves 1."""
    own = {"ess_threshold": 1.0, "resample_at": resample_at, "max_lag": max_lag}
    outcome = run(EQUAL, num_particles=4, num_steps=2, **PLAIN | own)
    assert_exact(outcome)
    # What lags is split in unequal parts.
    assert outcome.num_resampled == 0 or max_lag < LENGTH


def assert_exact(outcome: Outcome) -> None:
    assert p_value(outcome, P) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("num_particles", "method", "ess_threshold", "num_steps", "max_lag", "kind_and_place"),
    pairwise(
        (1, 2, 3, 5, 8),
        RESAMPLING_METHODS,
        (0.0, 0.5, 0.9, 1.0),
        (1, 2, 3, 4),
        (1, 2, LENGTH),
        ("near block", "near token", "hasty block", "hasty token", "tempered block"),
    ),
)
def test_texts_are_properly_weighted(
    num_particles: int,
    method: str,
    ess_threshold: float,
    num_steps: int,
    max_lag: int,
    kind_and_place: str,
) -> None:
    """Red for a weight that is lost or counted twice, of a draft, a bonus token or an end; for a
    bonus token behind another particle than its own; for ancestors that do not follow weights.
    """
    kind, place = kind_and_place.split()
    outcome = run(
        (TARGET, TARGET if kind == "tempered" else draft_of(kind)),
        num_particles=num_particles,
        num_steps=num_steps,
        evidence_threshold=0.0,
        resampling_method=method,
        ess_threshold=ess_threshold,
        max_lag=max_lag,
        resample_at=place,
        draft_temperature=1.6 if kind == "tempered" else None,
    )
    assert outcome.log_evidence.exp().std() > 0
    assert_properly_weighted(outcome, P)
    if num_particles > 1 and ess_threshold == 1:
        assert outcome.num_resampled > NUM_RUNS / 2
    if num_particles > 1 and num_steps < 3:  # else a round or two are all there is
        assert (outcome.num_narrowed > 0) == (max_lag < LENGTH)
        assert outcome.num_emitted_early > 0 or max_lag == LENGTH


def test_siblings_that_share_their_noise_lower_the_variance_of_z_hat() -> None:
    """The same runs with and without; a variance has a relative error of about 5 % here."""
    spread, apart = (
        run(ops=ops, num_runs=3000, num_particles=4, num_steps=2, **PLAIN)
        for ops in (TORCH, unstratified(TORCH))
    )
    assert_properly_weighted(spread, P)
    assert spread.log_evidence.exp().var() < 0.93 * apart.log_evidence.exp().var()


@pytest.mark.parametrize(
    ("num_particles", "resample_at"), [(1, "token"), (2, "block"), (16, "token")]
)
def test_what_the_target_never_says_never_comes_out(num_particles: int, resample_at: str) -> None:
    """They weigh nothing. With 16 particles noise makes a TV of .07; one's law is .26 away."""
    least = TARGET.logits.argmin(1, keepdim=True)
    cut = Language(TARGET.logits.scatter(1, least, -torch.inf))
    expected = law(cut)
    own = {"num_particles": num_particles, "ess_threshold": 0.9, "resample_at": resample_at}
    outcome = run((cut, DRAFT), num_runs=800, num_steps=3, **PLAIN, **own)
    assert all(expected[text] > 0 for text in frequencies(outcome))
    assert not outcome.log_evidence.isnan().any()
    assert outcome.num_all_zero > 0 or num_particles > 2
    if num_particles == 16:
        assert total_variation(outcome, expected) < 0.12


def test_a_group_that_dies_entirely_takes_exact_target_steps() -> None:
    """Disjoint supports: every draft is refused, and the output follows p exactly (error 1e-4)."""
    endless = TARGET.logits.clone()
    over = TARGET.logits.clone()
    endless[:, EOS] = -torch.inf
    over[:, :EOS] = -torch.inf
    pair = Language(endless), Language(over)
    outcome = run(pair, num_particles=4, num_steps=3, **PLAIN)
    assert outcome.num_all_zero == outcome.num_rounds == (LENGTH - 1) * NUM_RUNS
    assert p_value(outcome, law(pair[0])) > 1e-4


# --- Rounds of changing N and K: a population is resized by weight and banks what it weighed; one
# chain is verified; without drafts the target decodes alone.

#: The plain algorithm, seldom resampled, so that weights differ.
SELDOM = {"evidence_threshold": 0.0, "ess_threshold": 0.2, "num_steps": 2}


@pytest.mark.parametrize(("script", "method"), zip(SCRIPTS, RESAMPLING_METHODS * 2, strict=False))
def test_resized_populations_stay_properly_weighted(script: str, method: str) -> None:
    """A mean weight that is not banked has mean 1: only functions of the text miss it."""
    own = {"budgets": SCRIPTS[script], "resampling_method": method, "num_runs": 2500}
    outcome = run(languages(difference=1.2), num_particles=4, **SELDOM, **own)
    assert_properly_weighted(outcome, P)


@pytest.mark.parametrize("max_lag", [pytest.param(1, marks=pytest.mark.nightly), LENGTH])
@pytest.mark.parametrize("script", list(SCRIPTS))
def test_resized_with_a_draft_equal_to_the_target_stays_exact(script: str, max_lag: int) -> None:
    """Error probability 1e-4 each; a tail or a slot of another particle would change contexts."""
    own = {"budgets": SCRIPTS[script], "num_particles": 4, "max_lag": max_lag}
    assert_exact(run(EQUAL, **SELDOM, **own))


@pytest.mark.parametrize(
    ("mode", "budgets"),
    [
        ("smc", (OFF,)),
        ("smc", (Budget(1, 2),)),
        ("smc", (OFF, Budget(1, 2), Budget(1, 1))),
        ("auto", (OFF,)),
        ("auto", (Budget(1, 2),)),
        ("exact", (OFF, Budget(1, 2), Budget(1, 1))),
        *(("exact", SCRIPTS[script]) for script in SCRIPTS),
    ],
)
def test_one_chain_none_and_verified_ones_follow_p(mode: str, budgets: tuple[Budget, ...]) -> None:
    """Error probability 1e-4 each; weighed, one chain would follow q where it is drafted."""
    assert_exact(run(num_particles=4, mode=mode, budgets=budgets))


@pytest.mark.parametrize("others", [(), ({},), ({"mode": "exact"}, {"power": 2.0})], ids=str)
def test_requests_without_drafts_follow_p_beside_any_others(others: tuple[Any, ...]) -> None:
    """Error probability 1e-4 each, in any mode; alone no draft runs, and tokens come one by one."""
    off = tuple({"num_steps": 0, "mode": mode} for mode in MODES)
    outcome = run(num_particles=4, num_steps=2, chosen=(*off, *others))
    which = torch.arange(len(outcome.outputs)) % (len(off) + len(others)) < len(off)
    evidence = outcome.log_evidence[which]
    assert_exact(outcome._replace(outputs=outcome.outputs[which], log_evidence=evidence))
    if not others:
        assert outcome.num_tokens == outcome.num_rounds


# --- A power of p: whole texts follow p(x)^alpha over its sum, and Z-hat estimates that sum. So
# particles draw their first tokens apart: one for all would follow the power of its own law,
# whatever N is, since no weight tells it from another.

PAGE = Path(__file__).parents[2] / "docs" / "whole-texts.md"


@pytest.mark.parametrize(
    ("power", "num_particles", "distance", "advance"),
    [
        (2.0, 8, 0.07, {}),
        (4.0, 8, 0.59, {}),
        (4.0, 8, 0.62, {"proposal": "draft"}),
        pytest.param(4.0, 64, 0.05, {}, marks=pytest.mark.nightly),
        pytest.param(4.0, 64, 0.18, {"proposal": "draft"}, marks=pytest.mark.nightly),
    ],
)
def test_docs_say_how_far_from_a_power_texts_are(
    power: float, num_particles: int, distance: float, advance: dict[str, Any]
) -> None:
    """Noise alone makes a TV of about .05 and .03."""
    sizes = {"num_particles": num_particles, "num_steps": 2, "num_runs": 600}
    outcome = run(**sizes, power=power, **advance)
    assert total_variation(outcome, P, power) == pytest.approx(distance, abs=0.04)
    assert f" {distance:.2f}" in PAGE.read_text()


VERIFIED: dict[str, Any] = {"proposal": "verified"}
RESAMPLED = VERIFIED | {"ess_threshold": 1.0}
CHOPPED: dict[str, Any] = {"resampling_method": "chopthin"}


@pytest.mark.parametrize(
    ("sizes", "power", "advance"),
    [
        *pairwise(
            [(1, 2, 256), (4, 1, 1), (8, 5, 256)],
            [0.5, 2.0, 4.0],
            [{"proposal": "draft"}, {"resample_at": "token"}, {}],
        ),
        ((6, 2, 2), 2.0, RESAMPLED),
        ((6, 2, 256), 2.0, RESAMPLED | CHOPPED),
        ((5, 3, 256), 4.0, {"proposal": "draft", "ess_threshold": 1.0} | CHOPPED),
        ((4, 3, 256), 4.0, RESAMPLED | {"budgets": (Budget(4, 3), Budget(1, 0))}),
    ],
    ids=str,
)
def test_texts_are_weighed_by_the_power_of_p(
    sizes: tuple[int, int, int], power: float, advance: dict[str, Any]
) -> None:
    """Red without the sums at a first token, a bonus or an end."""
    names = "num_particles", "num_steps", "max_lag"
    outcome = run(**dict(zip(names, sizes, strict=True)), power=power, **advance)
    assert_properly_weighted(outcome, P, power)


ENDLESS = (
    Language(TARGET.logits.index_fill(1, torch.tensor(EOS), -torch.inf)),
    Language(DRAFT.logits.index_fill(1, torch.tensor(EOS), -torch.inf)),
)


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_texts_that_never_end_are_weighed_by_the_power_of_p(proposal: str) -> None:
    """Verified texts differ in length as they are resampled; every other round has no drafts."""
    own: dict[str, Any] = {"power": 4.0, "proposal": proposal, "ess_threshold": 1.0}
    budgets = Budget(8, 2), Budget(8, 0)
    outcome = run(ENDLESS, num_particles=8, num_steps=2, budgets=budgets, **own)
    assert_properly_weighted(outcome, law(ENDLESS[0]), 4.0)


def test_verified_texts_are_not_resampled_for_their_lengths() -> None:
    """All tokens have one normaliser here, so that weights differ as lengths do and only so."""
    a, b, end = ENDLESS[0].logits.unbind(1)
    flat = Language(torch.stack([(a - b).sign(), (b - a).sign(), end], 1))
    own: dict[str, Any] = {"power": 2.0, "proposal": "verified", "ess_threshold": 0.99}
    outcome = run((flat, ENDLESS[1]), num_particles=8, num_steps=3, **own)
    assert outcome.num_resampled == 0
    assert_properly_weighted(outcome, law(flat), 2.0)


# --- What the evidence threshold trades, on models that hardly agree; margins are several times
# the noise.

NOISE = 0.08  # TV of texts that follow p, at this many runs, is about .055


def hard_pair() -> tuple[Language, Language]:
    """After every third text or so the draft likes least what the target likes most.

    No text ends before its limit.
    """
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(NUM_CONTEXTS, VOCAB, generator=generator) * 1.2
    nearly = logits + torch.randn(NUM_CONTEXTS, VOCAB, generator=generator) * 0.3
    is_hard = torch.rand(NUM_CONTEXTS, 1, generator=generator) < 0.35
    draft = torch.where(is_hard, -1.5 * logits, nearly)
    logits[:, EOS] = draft[:, EOS] = -torch.inf
    return Language(logits), Language(draft)


def distance(outcome: Outcome) -> float:
    return total_variation(outcome, law(hard_pair()[0]))


@pytest.mark.parametrize("num_particles", [1, 4])
def test_a_higher_threshold_is_nearer_to_p_and_slower(num_particles: int) -> None:
    """A coin on the wrong side, or a threshold that divides where it multiplies, turns it round."""
    choices: list[dict[str, Any]] = [
        *({"mode": "auto", "evidence_threshold": threshold} for threshold in (0.0, 0.25, 1.0)),
        {"mode": "exact"},
    ]
    sizes = {"num_particles": num_particles, "num_steps": LENGTH - 2}
    found = [run(hard_pair(), **sizes, **chosen) for chosen in choices]
    distances = [distance(outcome) for outcome in found]
    speeds = [outcome.num_tokens / outcome.num_rounds for outcome in found]
    assert all(later < earlier - 0.1 for earlier, later in itertools.pairwise(distances))
    assert all(later < earlier - 0.1 for earlier, later in itertools.pairwise(speeds))
    assert speeds[0] == LENGTH - 1, "0 keeps every whole block"
    assert distances[2] < 0.5 * distances[0], "1 is much nearer than SMC with one lineage"
    assert distances[3] < NOISE


@pytest.mark.parametrize("num_particles", [1, 4])
def test_texts_that_end_early_are_neither_lost_nor_preferred(num_particles: int) -> None:
    """At 5 standard errors where all is verified: red if the result with more tokens is taken."""
    sooner = torch.eye(VOCAB)[EOS]
    pair = Language(TARGET.logits + sooner), Language(DRAFT.logits + sooner)
    expected = sum(mass for text, mass in law(pair[0]).items() if EOS in text[1:4])
    sizes = {"num_particles": num_particles, "num_steps": LENGTH - 1, "num_runs": 3000}
    error = math.sqrt(expected * (1 - expected) / 3000)
    for mode, margin in (("exact", 5 * error), ("auto", 0.045)):
        outcome = run(pair, **sizes, mode=mode, evidence_threshold=1.0)
        found = (outcome.outputs[:, 1:4] == EOS).any(1).double().mean()
        assert abs(float(found) - expected) < margin


@pytest.mark.parametrize(("num_particles", "resample_at"), [(1, "token"), (4, "block")])
def test_smc_is_nearer_to_p_with_a_threshold(num_particles: int, resample_at: str) -> None:
    """Where q misses the mass of p, equal weights of equally wrong drafts say nothing of it."""
    own = {"num_particles": num_particles, "num_steps": LENGTH - 2, "resample_at": resample_at}
    plain, covered = (
        run(hard_pair(), **own, evidence_threshold=threshold) for threshold in (0.0, 1.0)
    )
    assert distance(covered) < 0.75 * distance(plain)
    assert covered.num_rounds > plain.num_rounds
