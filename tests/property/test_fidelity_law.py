"""What rounds watch of their own texts, against the plain models' words on the same texts.

Seeds are fixed, so a test passes always or never; 4.5 standard errors are missed by 7 in a million
draws of correct code.
"""

from functools import cache
from typing import Any

import pytest
import torch
from toy_laws import DRAFT, EOS, LENGTH, TARGET, languages, run
from toy_worker import Outcome

from sglang_smc.smc import steps
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.fidelity import moments

NUM_STEPS = 3
FILTERED = {"top_k": 2}
MODES: dict[str, dict[str, Any]] = {
    "exact": {"mode": "exact"},
    "auto": {"mode": "auto", "evidence_threshold": 0.5},
    "smc": {},
    "smc, the paper's": {"evidence_threshold": 0.0},
    "smc, token": {"resample_at": "token"},
}


def play(num_particles: int = 3, **more: Any) -> Outcome:
    return run(num_particles=num_particles, num_steps=NUM_STEPS, num_runs=2000, **more)


def offline(outcome: Outcome, asked: dict[str, Any] | None = None) -> torch.Tensor:
    """The same sums of all tokens behind the first, ``[G, 4]``, from the models themselves."""

    def law(logits: torch.Tensor) -> torch.Tensor:
        one = torch.ones(1)
        top_k = torch.tensor([(asked or {}).get("top_k", len(logits))])
        filters = None if asked is None else (top_k, one, torch.zeros(1))
        return TokenDistribution.of(logits.view(1, 1, -1), one, None, filters).log_probs()

    @cache
    def of_token(before: tuple[int, ...], token: int) -> torch.Tensor:
        both = law(TARGET.after(before)), law(DRAFT.after(before))
        terms = moments(*both, torch.tensor([token]))
        return torch.stack([*(term[0] for term in terms), torch.ones(()).double()])

    def of_text(text: list[int]) -> torch.Tensor:
        end = text.index(EOS) + 1 if EOS in text else LENGTH
        tokens = [of_token(tuple(text[:at]), text[at]) for at in range(1, end)]
        return sum(tokens, torch.zeros(4).double())

    return torch.stack([of_text(text) for text in outcome.outputs.tolist()])


def errors(values: torch.Tensor) -> torch.Tensor:
    """Means in their standard errors."""
    return values.mean(0) / (values.std(0) / len(values) ** 0.5)


@pytest.mark.parametrize(("num_particles", "asked"), [(1, None), (3, None), (3, FILTERED)])
def test_exact_texts_have_no_tilt_and_no_innovation(
    num_particles: int, asked: dict[str, Any] | None
) -> None:
    """Who watched accepted drafts alone, or drafts of one chain, would find some of both."""
    found = play(num_particles, asked=asked, mode="exact").fidelity
    assert found[:, 3].sum() > 400
    assert (errors(found[:, [0, 2]]).abs() < 4.5).all()
    # The information is the variance that the sum has, and would have in the columns K.
    assert 0.6 < found[:, 0].var() / found[:, 1].mean() < 1.1


@pytest.mark.parametrize(
    ("mode", "asked"), [*((mode, None) for mode in MODES), ("exact", FILTERED), ("smc", FILTERED)]
)
def test_each_mode_watches_what_models_say(mode: str, asked: dict[str, Any] | None) -> None:
    """One column of K + 1 a round: that often its sums are those of the whole texts."""
    outcome = play(asked=asked, **MODES[mode])
    found = outcome.fidelity * (NUM_STEPS + 1)
    expected = offline(outcome, asked)
    assert (errors(found - expected)[[0, 2, 3]].abs() < 4.5).all()
    tilts = found[:, 0] - expected[:, 0].sum() / expected[:, 1].sum() * found[:, 1]
    assert errors(tilts[:, None]).abs() < 4.5


def test_the_draft_itself_has_tilt_one_where_it_is_near() -> None:
    """A single chain that nobody corrects, of a draft close by: the score estimate is right."""
    alone = {"num_particles": 1, "num_steps": 7, "evidence_threshold": 0.0}
    outcome = run(languages(difference=0.5), **alone, num_runs=3000)
    numerator, information, _, _ = outcome.fidelity.sum(0).tolist()
    assert numerator / information == pytest.approx(1.0, abs=4.5 * information**-0.5)
    assert numerator / information > 4.5 * information**-0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"power": 2.0, "evidence_threshold": 0.0},
        {"asked": {"top_k": 1}},
        {"asked": {"top_k": 1}, "mode": "exact"},
    ],
    ids=str,
)
def test_what_has_no_such_law_is_not_watched(settings: dict[str, Any]) -> None:
    assert not play(**settings).fidelity.any()


def test_no_text_depends_on_being_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that choose columns decide nothing else."""
    watched = play()
    monkeypatch.setattr(steps, "measure", lambda batch, before, after, *_: after)
    alone = play()
    assert not alone.fidelity.any()
    assert torch.equal(watched.outputs, alone.outputs)
