"""The law of the output where requests change logits or filter tokens: p's and q's alike.

Laws to hold runs against come from SGLang's own penalties (`edit_cases.stock_edit`) and from sorted
logits. Seeds are fixed; error probabilities are those of correct code, had they been drawn.
"""

from typing import Any, NamedTuple

import pytest
import torch
from edit_cases import Echo, stock_edit
from laws import rules, sorted_law
from toy_laws import DRAFT, EOS, LENGTH, PAIR, TARGET, Text, assert_properly_weighted, law, p_value
from toy_laws import run as serve
from toy_worker import PROMPT, Language, Outcome

PENALTIES: dict[str, Any] = {
    "frequency_penalty": 1.2,
    "presence_penalty": -0.6,
    "repetition_penalty": 1.8,
    "logit_bias": {"1": 0.8, "2": -0.5},
}
PROCESSOR: dict[str, Any] = {"custom_logit_processor": Echo.to_str()}
EDITS: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES,
    "processor too": {**PENALTIES, **PROCESSOR},
    "a least length": {"min_new_tokens": 3},
}
FILTERS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 2, "temperature": 1.7},
    "top-p": {"top_p": 0.7},
    "top-p and min-p": {"top_p": 0.9, "min_p": 0.4, "temperature": 0.4},
}
ASKED = EDITS | FILTERS | {"greedy": {"top_k": 1, "top_p": 0.6}}


class Edited(NamedTuple):
    """A language as SGLang's sampler would edit it."""

    language: Language
    asked: dict[str, Any]

    def after(self, output: tuple[int, ...]) -> torch.Tensor:
        own = {name: value for name, value in self.asked.items() if name not in PROCESSOR}
        logits = stock_edit(self.language.after(output), list(output), own, frozenset({EOS}))
        if "custom_logit_processor" in self.asked:
            logits[[*PROMPT, *output][-2]] += 1.5
        return logits


def run(num_particles: int, name: str, pair: Any = PAIR, **more: Any) -> Outcome:
    settings = {"num_steps": 2, "evidence_threshold": 0.0, "asked": ASKED[name], **more}
    return serve(pair, num_particles=num_particles, **settings)


def edited(name: str, language: Language) -> Any:
    if name in EDITS:
        return Edited(language, ASKED[name])
    logits = sorted_law(language.logits, rules(**ASKED[name]))
    assert (logits == -torch.inf).any(), "the filters cut nothing here"
    return Language(logits)


def edited_law(name: str) -> dict[Text, float]:
    return law(edited(name, TARGET))


@pytest.mark.parametrize("name", list(EDITS))
def test_one_particle_follows_the_edited_q_where_drafted_and_p_where_bonus(name: str) -> None:
    """Error probability 1e-4 each; with either model unedited the law is another."""
    drawn_by = [edited(name, PAIR[t % 3 != 0]) for t in range(3)]
    outcome = run(1, name)
    assert p_value(outcome, law(*drawn_by)) > 1e-4
    for forgotten in (0, 1):
        others = [one.language if t % 3 != forgotten else one for t, one in enumerate(drawn_by)]
        assert p_value(outcome, law(*others)) < 1e-6


@pytest.mark.parametrize(
    ("name", "resample_at"), zip(EDITS | FILTERS, ["block", "token"] * 3, strict=True), ids=str
)
def test_a_draft_equal_to_the_target_is_exact(name: str, resample_at: str) -> None:
    """p and q are edited alike in every column, or weights would leave 1; tails part and stay."""
    own = {"ess_threshold": 1.0, "resample_at": resample_at, "max_lag": LENGTH}
    outcome = run(4, name, (TARGET, TARGET), **own)
    assert p_value(outcome, edited_law(name)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-5


@pytest.mark.parametrize("max_lag", [2, LENGTH])
def test_texts_are_properly_weighted(max_lag: int) -> None:
    outcome = run(5, "penalties", max_lag=max_lag)
    assert_properly_weighted(outcome, edited_law("penalties"))


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "exact") for name in EDITS | FILTERS), ("processor too", "auto"), ("top-p", "auto")],
)
def test_verified_rounds_follow_the_edited_target(name: str, mode: str) -> None:
    """Error probability 1e-4 each; evidence never suffices; at T = 0.4 q is that of 0.53."""
    chosen = {"mode": mode, **({"evidence_threshold": 1e9} if mode == "auto" else {})}
    outcome = run(3, name, chosen=(chosen,))
    assert p_value(outcome, edited_law(name)) > 1e-4


@pytest.mark.parametrize("name", ["penalties", "top-p and min-p"])
def test_a_power_of_the_edited_target_is_what_texts_are_weighed_by(name: str) -> None:
    """What no draft proposes adds nothing to Z-hat: filters need one that keeps what p does."""
    outcome = run(8, name, (TARGET, DRAFT if name in EDITS else TARGET), power=2.0)
    assert_properly_weighted(outcome, edited_law(name), power=2.0)


def likeliest_text(target: Any, limit: int) -> list[int]:
    text: list[int] = []
    while len(text) < limit and EOS not in text:
        text.append(int(target.after(tuple(text)).argmax()))
    return text


@pytest.mark.parametrize("chosen", [{}, {"power": 2.0}, {"mode": "exact"}], ids=str)
def test_greedy_requests_get_the_likeliest_text(chosen: dict[str, Any]) -> None:
    """Alone; and beside a sampled one, where the target follows some of the pruned drafts."""
    text = likeliest_text(TARGET, LENGTH)
    outcome = run(3, "greedy", num_runs=5, chosen=(chosen,))
    assert outcome.outputs.tolist() == [text + [EOS] * (LENGTH - len(text))] * 5
    assert outcome.log_evidence.abs().max() < 1e-9
    target = Language(TARGET.logits - torch.tensor([0.0, 0.0, 3.0]))  # seldom ends
    pair = target, Language(0.1 * TARGET.logits.roll(1, 0))  # four tokens have less than 2 %
    text = likeliest_text(target, 200)
    more = {"num_steps": 6, "limit": len(text), "asked": (ASKED["greedy"], {})}
    outcome = run(16, "greedy", pair, num_runs=2, chosen=(chosen,), **more)
    assert outcome.outputs[0].tolist() == text
    assert abs(outcome.log_evidence[0]) < 1e-9
