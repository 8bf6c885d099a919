"""Round and example of docs/algorithm.md: the functions that rounds use give the numbers shown."""

import math
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from sglang_smc.smc import verification, weighing
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.prefixes import common_tail
from sglang_smc.smc.randomness import stratified
from sglang_smc.smc.weighing import (
    SCHEMES,
    accumulate,
    ancestors_of,
    covered_columns,
    effective_sample_size,
    normalized,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "algorithm.md").read_text()
EXAMPLE = PAGE.partition("\n## One round in numbers\n")[2].partition("\n## ")[0]
NUMBERS = set(re.findall(r"\d+\.\d+|\d+", EXAMPLE))
VERIFICATION = PAGE.partition("\n### Verification: exact and auto\n")[2].partition("\n## ")[0]
P = torch.tensor([[0.25, 0.8, 0.2], [0.4, 0.5, 0.35]], dtype=torch.float64)
Q = torch.tensor([[0.5, 0.8, 0.5], [0.2, 0.5, 0.5]], dtype=torch.float64)
THRESHOLD = 0.75
KEEP_ALL = 0.5
TEXTS = [["Paris", "in", "spring"], ["Rome", "for", "Easter"]]


def uniforms(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def decide(p: torch.Tensor, evidence_threshold: float) -> weighing.Decision:
    block = weighing.Block(
        log_weights=torch.zeros(1, 2, dtype=torch.float64),
        log_p=p.log().unsqueeze(0),
        log_q=Q.log().unsqueeze(0),
        up_to_end=torch.ones(1, 2, 3, dtype=torch.bool),
        present=torch.ones(1, 2, dtype=torch.bool),
        power=uniforms(1.0),
        num_steps=torch.tensor([3]),
        ess_threshold=uniforms(THRESHOLD),
        resample_each_token=torch.tensor([False]),
        evidence_threshold=uniforms(evidence_threshold),
        scheme=torch.tensor([SCHEMES.index("systematic")]),
        keep_uniforms=uniforms(0.999),  # whatever the uniform, all is kept
        uniforms=uniforms(0.3, 0.3).unsqueeze(0),
    )
    return weighing.reweight_and_resample(block)


def shown(*rows: tuple[torch.Tensor, torch.Tensor]) -> list[str]:
    """The table's rows of p / q, with the weight behind them."""
    return [
        "| p / q | "
        + " | ".join(f"{p:g} / {q:g}" for p, q in zip(above.tolist(), below.tolist(), strict=True))
        + f" | **{(above / below).prod():.1f}** |"
        for above, below in rows
    ]


def test_the_table() -> None:
    for row in shown(*zip(P, Q, strict=True)):
        assert row in EXAMPLE
    for text in TEXTS:
        assert " | ".join(text) in EXAMPLE
    running = accumulate(torch.zeros(2), (P / Q).log())  # [N, K + 1]
    evidence = running.exp().mean(0)[1:]
    assert "| evidence up to here | " + " | ".join(f"{e:.4g}" for e in evidence) in EXAMPLE
    cut = covered_columns(running.T.unsqueeze(0), uniforms(0.9), torch.tensor([3]), uniforms(0.99))
    assert cut.tolist() == [2], "a larger c can cut there"


def systematic(shares: torch.Tensor, own: torch.Tensor) -> list[int]:
    scheme, size = torch.tensor([[SCHEMES.index("systematic")], [len(shares)]])
    return ancestors_of(shares[None], own[None], scheme, size)[0].tolist()


def test_the_decision() -> None:
    found = decide(P, KEEP_ALL)
    weights = found.weighed
    ess = effective_sample_size(weights)
    shares = normalized(weights)[0]
    assert found.num_columns.tolist() == [3]
    assert found.resampled.tolist() == [True]
    assert {f"{ess.item():.2f}", f"{THRESHOLD * 2:g}"} <= NUMBERS
    assert {f"{share:.3f}" for share in shares.tolist()} <= NUMBERS
    assert found.ancestors.tolist() == [[1, 1]]
    assert found.log_weights.tolist() == [[0.0, 0.0]]
    assert f"{-found.log_evidence.item():.3f}" in NUMBERS
    for uniform, first in ((0.2499, 0), (0.2501, 1)):
        assert systematic(shares, uniforms(uniform, 0)) == [first, 1]


def test_all_zero_is_the_column_behind_the_kept_ones() -> None:
    found = [decide(P * uniforms(1, 0, 1), threshold) for threshold in (KEEP_ALL, math.inf)]
    assert [(int(f.num_columns), bool(f.all_zero)) for f in found] == [(1, True), (0, False)]


def test_the_bonus() -> None:
    same = torch.ones(1, 2, 2, dtype=torch.bool)
    drawn = stratified(uniforms(0.35, 0.7).unsqueeze(0), same)[0]
    assert drawn.tolist() == pytest.approx([0.35, 0.85])
    cumulative = uniforms(0.6, 0.9, 1.0)
    assert torch.searchsorted(cumulative, drawn, right=True).tolist() == [0, 1]
    assert {"0.6", "0.3", "0.35", "0.85"} <= NUMBERS
    heirs = torch.tensor([[[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]]])  # behind one token
    here = torch.ones(1, 2, dtype=torch.bool)
    assert common_tail(heirs, torch.full((1, 2), 4), here).tolist() == [3]


def test_verification() -> None:
    """The table of two chains of one token."""
    p = torch.tensor([0.5, 0.5])
    q = torch.tensor([0.25, 0.75])
    drafts = torch.cartesian_prod(*[torch.arange(2)] * 2)  # [G, N]
    tree = verification.grow(drafts.unsqueeze(2), torch.ones_like(drafts))
    law_p, law_q = (TokenDistribution.of_log_probs(x.log().repeat(16, 1)) for x in (p, q))
    layers = verification.descend(tree, law_p, [law_q.at(slice(8))])
    # [G, N], [G]
    shares = layers.shares[1]
    stops = verification.exits(layers)[:, 0, 0]
    for line in (
        f"| a, a | 0.0625 | {shares[0, 0]:.2f} | | {stops[0]:.2f} |",
        f"| a, b | 0.375 | {shares[1, 0]:.2f} | {shares[1, 1]:.2f} | {stops[1]:.2f} |",
        f"| b, b | 0.5625 | | {shares[3, 0]:.2f} | {stops[3]:.2f} |",
        f"R = ({layers.residual[0, 0, 0]:.2f}, 0)",
    ):
        assert line in VERIFICATION


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(DOCS / "draw_round.py")))


def test_the_picture_is_what_its_script_draws(script: SimpleNamespace) -> None:
    drawn = (DOCS / "round.svg").read_text(encoding="utf-8")
    assert script.draw() == drawn
    ElementTree.fromstring(drawn)


def test_the_picture_computes_as_rounds_do(script: SimpleNamespace) -> None:
    p, q = (uniforms(*(v for draft in script.DRAFTS for v in draft[at])) for at in (1, 2))
    log_weights = (p / q).log().view(4, 3).sum(1)
    assert script.weights() == pytest.approx(log_weights.exp().tolist())
    ess = effective_sample_size(log_weights).item()
    assert script.effective_sample_size(script.weights()) == pytest.approx(ess)
    assert ess < script.ESS_THRESHOLD * 4, "the picture shows a resampling"
    for uniform in (0.0, 0.3, script.UNIFORM, 0.99):
        expected = systematic(normalized(log_weights), uniforms(uniform, 0, 0, 0))
        assert script.ancestors(script.weights(), uniform) == expected
