"""Each check passes what is right, and turns red on what is wrong in its own way.

Seeds are fixed. With others a right sampler would fail a check with probability ``ALPHA``.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from steered import text

from sglang_smc.potentials import Potential, Text
from sglang_smc_tools.testing import (
    Model,
    Verdict,
    check_draft_law,
    check_equal_models,
    check_evidence,
    check_exact_answers,
    check_mode,
    check_potential,
)
from sglang_smc_tools.testing.checks import ALPHA, short_law
from sglang_smc_tools.testing.report import Result
from tools.tests.testing.conftest import Tables, random_table, warmed

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


TARGET = random_table(1)
SHARP = {"drawn": warmed(TARGET, 1 / 1.15)}
TWINS = {"q": TARGET, "same_models": True}
#: What draws or weighs wrongly: a check, what it is asked, what is wrong, and words of the note.
WRONG: list[tuple[Callable[..., Result], dict[str, Any], dict[str, Any], str]] = [
    (check_exact_answers, {}, {"drawn": 0.1}, "--speculative-smc-kernels torch"),
    (check_mode, {"mode": "exact", "num_answers": 600}, {"drawn": 0.2}, ""),
    (check_mode, {"mode": "exact", "num_answers": 600, "draft": True}, {"drawn": 0.2}, ""),
    (check_mode, {"mode": "exact", "num_answers": 600}, SHARP, "sharper"),
    (check_evidence, {"num_answers": 4000}, {"factor": 0.9}, ""),
    (check_evidence, {"num_answers": 4000}, {"factor": 1.1}, ""),
    (check_evidence, {"num_answers": 8000}, {"drafted": 0.4}, ""),
    (check_draft_law, {}, {"drafted": 0.3}, ""),
    (check_draft_law, {"draft": True}, {"drafted": 0.3}, ""),
    (check_draft_law, {}, {"weighs": False}, ""),  # p is not what they were drawn with
    (check_equal_models, {}, {"factor": 1.01, **TWINS}, ""),
]


@pytest.mark.parametrize(("check", "asked", "wrong", "says"), WRONG)
def test_a_check_turns_red_where_a_share_is_the_other_models(
    model: MakeModel,
    draft: Model,
    check: Callable[..., Result],
    asked: dict,
    wrong: dict,
    says: str,
) -> None:
    """Or the target's own, but sharper; or where weights are off."""
    asked = {**asked, "draft": draft} if "draft" in asked else asked
    result = check(model(**wrong), prompts=PROMPTS, **asked)
    assert result.failed and says in result.note


ADAPTIVE = {"settings": {"adaptive": "on"}}
HOPELESS = {"q": [[1e-12 if token else 1.0 for token in range(8)] for _ in range(8)]}


@pytest.mark.parametrize(
    ("check", "of", "verdict"),
    [
        (check_evidence, {"weighs": False}, Verdict.NOT_ENOUGH_DATA),
        (check_evidence, HOPELESS, Verdict.NOT_ENOUGH_DATA),  # the draft misses
        (check_evidence, ADAPTIVE, Verdict.NOT_APPLICABLE),
        (check_draft_law, ADAPTIVE, Verdict.NOT_APPLICABLE),
        (check_equal_models, {}, Verdict.NOT_APPLICABLE),
        (check_equal_models, TWINS, Verdict.PASS),
    ],
)
def test_verdicts_beside_failure(
    model: MakeModel, check: Callable[..., Result], of: dict, verdict: Verdict
) -> None:
    assert check(model(**of), PROMPTS).verdict is verdict


def test_an_approximate_mode_is_measured_towards_the_draft(model: MakeModel, draft: Model) -> None:
    """The toy's mode smc is importance sampling with few particles: between p and q."""
    result = check_mode(model(), "smc", PROMPTS, draft=draft, num_answers=600)
    assert result.verdict is Verdict.MEASURED
    assert result.estimate is not None and result.standard_error is not None
    assert result.estimate > 4 * result.standard_error
    assert "nearer to the draft" in result.note


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
        # type: ignore[method-assign]
        self.prefix = prefix
        self.complete = complete
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
