"""Each check passes what is right, and turns red on what is wrong in its own way.

Seeds are fixed. With others a right sampler would fail a check with probability ``ALPHA``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from steered import text

from sglang_smc.potentials import Potential, Text
from sglang_smc.tools.testing import (
    Model,
    Verdict,
    check_draft_law,
    check_equal_models,
    check_evidence,
    check_exact_answers,
    check_mode,
    check_potential,
)
from sglang_smc.tools.testing.checks import ALPHA, short_law
from sglang_smc.tools.testing.report import Result
from tests.testing.conftest import Tables, warmed

PROMPTS = ("one", "two")
MakeModel = Callable[..., Model]


def test_right_samplers_pass_everything(model: MakeModel, draft: Model) -> None:
    right = model()
    found = [
        check_evidence(right, PROMPTS),
        check_exact_answers(right, PROMPTS),
        check_mode(right, "exact", PROMPTS, num_answers=600),
        check_mode(right, "exact", PROMPTS, draft=draft, num_answers=600),
        check_draft_law(right, PROMPTS),
        check_draft_law(right, PROMPTS, draft=draft),
    ]
    assert [result.verdict for result in found] == [Verdict.PASS] * len(found)
    assert all(result.alpha == ALPHA for result in found)


#: What draws texts or drafts wrongly: a check, what it is asked, what is wrong; by whose laws.
WRONG: list[tuple[Callable[..., Result], dict[str, Any], dict[str, Any]]] = [
    (check_exact_answers, {}, {"drawn": 0.1}),
    (check_mode, {"mode": "exact", "num_answers": 600}, {"drawn": 0.2}),
    (check_mode, {"mode": "exact", "num_answers": 600, "draft": True}, {"drawn": 0.2}),
    (check_evidence, {"num_answers": 4000}, {"factor": 0.9}),
    (check_evidence, {"num_answers": 4000}, {"factor": 1.1}),
    (check_evidence, {"num_answers": 8000}, {"drafted": 0.4}),
    (check_draft_law, {}, {"drafted": 0.3}),
    (check_draft_law, {"draft": True}, {"drafted": 0.3}),
]


@pytest.mark.parametrize(("check", "asked", "wrong"), WRONG)
def test_a_check_turns_red_where_a_share_is_the_other_models(
    model: MakeModel, draft: Model, check: Callable[..., Result], asked: dict, wrong: dict
) -> None:
    """Or where weights are a tenth off."""
    asked = {**asked, "draft": draft} if "draft" in asked else asked
    result = check(model(**wrong), prompts=PROMPTS, **asked)
    assert result.failed
    assert check is not check_exact_answers or "--speculative-smc-kernels torch" in result.note


def test_log_probabilities_turn_red_on_a_sharp_target(model: MakeModel, tables: Tables) -> None:
    sharp = warmed(tables[0], 1 / 1.15)
    result = check_mode(model(drawn=sharp), "exact", PROMPTS, num_answers=600)
    assert result.failed
    assert "sharper" in result.note


def test_evidence_that_never_varies_is_no_evidence(model: MakeModel) -> None:
    silent = model(weighs=False)
    assert check_evidence(silent, PROMPTS).verdict is Verdict.NOT_ENOUGH_DATA
    assert check_draft_law(silent, PROMPTS).failed  # p is not what they were drawn with


def test_evidence_of_a_draft_that_misses_is_not_enough(model: MakeModel) -> None:
    hopeless = [[1e-12 if token else 1.0 for token in range(8)] for _ in range(8)]
    found = check_evidence(model(q=hopeless), PROMPTS, num_answers=64)
    assert found.verdict is Verdict.NOT_ENOUGH_DATA


def test_an_approximate_mode_is_measured_towards_the_draft(model: MakeModel, draft: Model) -> None:
    """The toy's mode smc is importance sampling with few particles: between p and q."""
    result = check_mode(model(), "smc", PROMPTS, draft=draft, num_answers=600)
    assert result.verdict is Verdict.MEASURED
    assert result.estimate is not None and result.standard_error is not None
    assert result.estimate > 4 * result.standard_error
    assert "nearer to the draft" in result.note


def test_equal_models_need_equal_weights(model: MakeModel, tables: Tables) -> None:
    assert check_equal_models(model(), PROMPTS).verdict is Verdict.NOT_APPLICABLE
    target = tables[0]
    for factor, verdict in ((1.0, Verdict.PASS), (1.01, Verdict.FAIL)):
        twins = model(q=target, factor=factor, same_models=True)
        assert check_equal_models(twins, PROMPTS).verdict is verdict


def test_adaptive_servers_are_not_judged_by_their_weights(model: MakeModel) -> None:
    adaptive = model(settings={"adaptive": True})
    assert check_evidence(adaptive, PROMPTS).verdict is Verdict.NOT_APPLICABLE
    assert check_draft_law(adaptive, PROMPTS).verdict is Verdict.NOT_APPLICABLE


def test_short_law_is_a_product(model: MakeModel, draft: Model, tables: Tables) -> None:
    """Of its models: whole without a smallest mass, and with one the rest stays with the prefix."""
    p, q = tables
    whole = short_law([model(), draft], (1, 2), 0.0)
    for first, second in itertools.product(range(8), repeat=2):
        assert whole[first, second] == pytest.approx(p[2][first] * q[first][second])
    cut = short_law([model(), draft], (1, 2), 0.02)
    assert math.fsum(cut.values()) == pytest.approx(1.0)
    assert all(mass >= 0.02 for text, mass in cut.items() if len(text) == 2)
    assert 0 < cut[()] == pytest.approx(math.fsum(mass for mass in p[2] if mass < 0.02))


def test_false_alarms_of_log_probabilities_are_rare(model: MakeModel, draft: Model) -> None:
    """Of 200 right samplers 10 fail at 5 %; more than 22 would, with probability 1e-4."""
    few = {"draft": draft, "num_answers": 60, "length": 6, "alpha": 0.05}
    alarms = sum(
        check_mode(model(), "exact", PROMPTS, **few, seed=1000 * repeat).failed
        for repeat in range(200)
    )
    assert alarms <= 22


# --- Potentials: each kind of inconsistency is found, and none where there is none

Values = Callable[[Sequence[Text]], Sequence[float]]
CHECKS = ("values", "batched", "repeated", "forbidden", "whole")
TEXTS = [text("abca"), text("bb"), text("")]


class Made(Potential):
    """Of functions; log phi is minus the output's length if nothing else is said."""

    def __init__(self, prefix: Values, complete: Values, claims: bool = True) -> None:
        self.prefix, self.complete = prefix, complete  # type: ignore[method-assign]
        self.prefix_is_complete = claims  # type: ignore[misc]

    def complete(self, texts: Sequence[Text]) -> Sequence[float]:
        raise NotImplementedError


def lengths(texts: Sequence[Text]) -> list[float]:
    return [-float(len(text.output_ids)) for text in texts]


def each(value: Callable[[str], float]) -> Values:
    return lambda texts: [value(text.output) for text in texts]


def rounded(texts: Sequence[Text]) -> list[float]:
    return [value * (1 + 1e-6 * len(texts)) for value in lengths(texts)]


zeros = each(lambda output: 0.0)
only_b = each(lambda output: -math.inf if output == "ab" else 0.0)
nothing_whole = each(lambda output: -math.inf if "b" in output else 0.0)
calls = count()
#: A potential, and the checks that fail of it.
FOUND: dict[str, tuple[Potential, set[str]]] = {
    "sound": (Made(lengths, lengths), set()),
    "too few": (Made(lambda texts: lengths(texts)[1:], lengths), {"values"}),
    "too many": (Made(lambda texts: [*lengths(texts), 0.0], lengths), {"values"}),
    "NaN": (
        Made(each(lambda output: math.nan if output.endswith("c") else 0.0), lengths),
        {"values"},
    ),
    "infinite": (Made(each(lambda o: math.inf if o == "bb" else 0.0), lengths), {"values"}),
    "depends on the others": (
        Made(lengths, lambda texts: [value / len(texts) for value in lengths(texts)], claims=False),
        {"batched"},
    ),
    "changes": (
        Made(lambda texts: [float(next(calls))] * len(texts), lengths, claims=False),
        {"batched", "repeated"},
    ),
    "goes on behind a forbidden beginning": (Made(only_b, zeros, claims=False), {"forbidden"}),
    "ends behind one": (Made(nothing_whole, zeros, claims=False), {"forbidden"}),
    "forbids to its end": (Made(nothing_whole, nothing_whole), set()),
    "claims what does not hold": (Made(zeros, lengths), {"whole"}),
    # As a model's values are, which differ with the batch.
    "rounded": (Made(rounded, rounded), set()),
}


@pytest.mark.parametrize(("potential", "expected"), FOUND.values(), ids=FOUND.keys())
def test_each_inconsistency_is_found(potential: Potential, expected: set[str]) -> None:
    """Without values or a claim the checks of these cannot say a thing."""
    results = check_potential(potential, TEXTS)
    found = {result.check.removeprefix("potential-"): result for result in results}
    assert tuple(found) == CHECKS
    assert {name for name, result in found.items() if result.failed} == expected
    silent = {name for name, one in found.items() if one.verdict is Verdict.NOT_APPLICABLE}
    without_claim = set() if potential.prefix_is_complete else {"whole"}
    assert silent == (found.keys() - expected if expected == {"values"} else without_claim)


def test_few_beginnings_of_a_long_text() -> None:
    """Red where the first or the whole is left out: the last token alone is forbidden again."""
    asked: list[int] = []

    def spy(texts: Sequence[Text]) -> list[float]:
        asked.extend(len(text.output_ids) for text in texts)
        return lengths(texts)

    check_potential(Made(spy, lengths), [text("a" * 100)], most_beginnings=5)
    assert sorted(set(asked)) == [0, 25, 50, 75, 100]


def test_no_texts_are_refused() -> None:
    """Red where nothing looked at is a pass."""
    with pytest.raises(ValueError, match="no texts"):
        check_potential(Made(lengths, lengths), [])
