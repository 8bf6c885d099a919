"""The simulated rules on languages that are enumerated, and what is made of their answers.

Seeds are fixed, so a test passes always or never. Had they been drawn, correct code would fail a
chi-square test with probability 0.001.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fidelity.cut_rules import CapColumn, CapWeight, Residual, VerifyAtCut, Weigh
from fidelity.cuts import (
    MIXTURES,
    Arm,
    Fidelity,
    Scored,
    cross_fitted,
    load_pair,
    over_curve,
    score,
    summary,
    table,
)
from fidelity.nats import ratio
from fidelity.simulate import Answer, Pair, Rule, Verify, answers
from laws import Law, enumerate_law, p_value
from ragged_tables import RaggedTable
from toy_reference import Table
from toy_tables import mild_pair

FOLDER = Path(__file__).parents[2] / "bench" / "pair"
EOS, LENGTH, VOCAB = 1, 4, 3
MILD = mild_pair(LENGTH, VOCAB)
TOY = Pair(RaggedTable(MILD.target), RaggedTable(MILD.draft), EOS)
SAME = TOY._replace(draft=TOY.target)
TARGET, DRAFT = Table(MILD.target).next_probs, Table(MILD.draft).next_probs
P_LAW = enumerate_law(LENGTH, EOS, lambda position: TARGET)
SMC = [
    Weigh(0.5),
    CapWeight(0.5),
    CapColumn(0.5),
    Residual(0.5),
    VerifyAtCut(1.0, any_text=False),
    VerifyAtCut(1.0, any_text=True),
]


def p_of(
    pair: Pair, rule: Rule, count: int, steps: int, law: Law = P_LAW, size: int = 3000
) -> float:
    found = answers(pair, [[0]] * size, rule, count, steps, seed=1, limit=LENGTH)
    return p_value([tuple(answer.tokens) for answer in found], law)


@pytest.mark.parametrize(("count", "steps"), [(1, 2), (3, 2), (4, 3)])
def test_exact_follows_the_target(count: int, steps: int) -> None:
    assert p_of(TOY, Verify(), count, steps) > 0.001


def test_other_modes_do_not() -> None:
    """So the tests around this one can fail."""
    assert p_of(TOY, Verify(0.25), 3, 2) < 0.001
    assert p_of(TOY, Weigh(0.0), 3, 2) < 0.001


@pytest.mark.parametrize("rule", SMC, ids=lambda rule: type(rule).__name__)
def test_a_draft_that_is_the_target_leaves_its_law(rule: Rule) -> None:
    assert p_of(SAME, rule, 3, 2, size=800) > 0.001


def test_one_particle_without_cuts_follows_draft_and_target_in_turn() -> None:
    law = enumerate_law(LENGTH, EOS, lambda position: TARGET if position % 2 == 0 else DRAFT)
    assert p_of(TOY, Weigh(0.0), 1, 1, law) > 0.001


def test_the_residual_of_one_chain_is_that_of_speculative_sampling() -> None:
    """One column, c = 1: kept with min(1, p/q), else drawn from what p has beyond q."""
    assert p_of(TOY, Residual(1.0), 1, 1) > 0.001
    assert p_of(TOY, Weigh(1.0), 1, 1) < 0.001


def test_one_text_that_is_verified_at_every_cut_follows_the_target() -> None:
    """One chain, one column: it is kept with min(1, p/q) twice, by evidence and by verification."""
    rule = VerifyAtCut(math.inf, any_text=True)
    assert p_of(TOY, rule, 3, 2) > 0.001


def test_rows_of_any_length_read_as_their_model_does() -> None:
    models, pair = load_pair(FOLDER, 0.7)
    tokens = torch.arange(40).view(2, 20) + 50
    rows = pair.target.rows(1, 20)
    rows.log_probs(tokens[:1, :12], torch.zeros(1, dtype=torch.int64))
    rows.reorder(torch.zeros(2, dtype=torch.int64))
    # The second row loses its last seven tokens, and reads the same as many columns on.
    starts = torch.tensor([12, 5])
    found = rows.log_probs(torch.stack([tokens[0, 12:16], tokens[1, 12:16]]), starts)
    for row, text in enumerate((tokens[0, :16], torch.cat([tokens[0, :5], tokens[1, 12:16]]))):
        with torch.no_grad():
            logits = models.target.module(text.unsqueeze(0)).logits[0, -4:]  # pyright: ignore
        assert torch.allclose(found[row], (logits / 0.7).log_softmax(-1), atol=1e-3)


def test_scores_have_their_means_under_the_target() -> None:
    """Exactly, by enumeration: l less its mean has mean 0, the mixture's odds have mean 1."""
    texts = list(P_LAW)
    scored = score(TOY, [[0]] * len(texts), [Answer(list(text), 1) for text in texts])
    mass = torch.tensor([P_LAW[text] for text in texts])
    shift = torch.tensor([one.shift for one in scored])
    variance = torch.tensor([one.variance for one in scored])
    mixtures = torch.tensor([one.log_mixtures for one in scored])
    assert abs(float(mass @ shift)) < 1e-5
    assert math.isclose(float(mass @ shift.square()), float(mass @ variance), rel_tol=1e-4)
    assert torch.allclose(mass @ mixtures.exp(), torch.ones(len(MIXTURES)), atol=1e-5)
    assert [one.num_tokens for one in scored] == [len(text) for text in texts]


def test_the_draft_is_tilted_and_the_target_is_not() -> None:
    drafted = Fidelity.of(sampled(TOY._replace(target=TOY.draft)))
    plain = Fidelity.of(sampled(TOY))
    assert ratio(drafted.shift, drafted.variance).low > 0.3
    low, high = ratio(plain.shift, plain.variance)[1:3]
    assert low < 0 < high
    assert drafted.log_odds.mean() > 0 >= plain.log_odds.mean() - 0.02


def sampled(pair: Pair) -> list[Scored]:
    prompts = [[0]] * 1000
    return score(TOY, prompts, answers(pair, prompts, Verify(), 2, 2, seed=2, limit=LENGTH))


def test_a_ratio_lies_in_its_interval_as_often_as_it_says() -> None:
    """Of 400 samples 95 % +- 4 standard deviations; the normal law is a little short at n = 60."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        bottoms = random.uniform(1, 3, 60)
        _, low, high, _ = ratio(bottoms * random.normal(0.5, 0.3, 60), bottoms)
        inside += low < 0.5 < high
    assert 0.90 < inside / 400 < 0.995


def test_a_mixture_is_chosen_on_the_other_half() -> None:
    mixtures = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert cross_fitted(mixtures).tolist() == [0.0, 0.0, 0.0, 0.0]


def made(tokens: float, tilt: float, kl: float) -> Fidelity:
    """Answers around these numbers, with noise of their own."""
    noise = np.random.default_rng(int(1000 * tokens)).normal(0, 0.1, (3, 200))
    ones = np.ones(200)
    return Fidelity(tokens + noise[0], ones, tilt + noise[1], ones, kl + noise[2])


def test_a_point_is_held_against_the_curve_at_its_own_speed() -> None:
    curve = [made(6.0, 0.0, 0.0), made(8.0, 0.4, 1.0)]
    tilt, kl = over_curve(curve, made(7.0, 0.2, 0.5))
    assert tilt.low < 0 < tilt.high
    assert kl.low < 0 < kl.high
    tilt, kl = over_curve(curve, made(7.0, 0.1, 0.9))
    assert math.isclose(tilt.mean, -0.1, abs_tol=0.05) and tilt.high < 0
    assert math.isclose(kl.mean, 0.4, abs_tol=0.05) and kl.low > 0


def test_the_table_has_a_row_for_each_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = [Arm("exact", Verify()), Arm("mixed", Verify(1.0))]
    monkeypatch.setattr("fidelity.cuts.CURVE", curve)
    arms = dict(zip(curve, (made(6.0, 0.0, 0.0), made(8.0, 0.4, 1.0)), strict=True))
    rows = summary({**arms, Arm("smc", Weigh(1.0)): made(7.0, 0.3, 0.7)})
    assert [row["name"] for row in rows] == ["exact", "mixed", "smc"]
    assert "kl_over_curve" in rows[2] and "kl_over_curve" not in rows[1]
    assert table(rows).count("\n") == 4
