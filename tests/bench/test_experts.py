"""The study of experts that drafted trees visit: what it counts, and that it runs and publishes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experts import run as frame
from experts.run import VisitedTree, distinct_nodes, main, overlap_of, row_of

from sglang_smc.options.request import Budget
from sglang_smc_tools.plan.experts import Experts

SHAPE = Experts(count=64, per_token=4, size=8, dense_layers=0, shared=0.0)


def uniform(count: int, draw: np.random.Generator) -> np.ndarray:
    """What tokens with uniform routing visit, ``[count, layers, experts]``."""
    return draw.random((count, 3, SHAPE.count)).argsort(-1) < SHAPE.per_token


def test_nodes_are_distinct_prefixes() -> None:
    """Equal tokens after other ones are other nodes."""
    found = distinct_nodes([[7, 8, 9], [7, 8, 5], [6, 8, 9]])
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (2, 1), (2, 2), (2, 3)]


def test_uniform_routing_has_no_overlap_but_of_equal_nodes() -> None:
    draw = np.random.default_rng(0)
    found = [VisitedTree(uniform(9, draw), uniform(9, draw)) for _ in range(400)]
    for users in (1, 4):
        row = row_of("a", SHAPE, Budget(2, 8), users, found)
        assert row.nodes == 9 * users
        assert row.to_uniform.mean == pytest.approx(1.0, abs=0.01)
        assert row.unrelated_to_uniform.mean == pytest.approx(1.0, abs=0.01)
        equal = 1 - (9 * users - 1) / (18 * users - 1)
        assert row.overlap == pytest.approx(equal, abs=0.02)


def test_nodes_that_visit_the_same_experts_overlap_wholly() -> None:
    draw = np.random.default_rng(0)
    same = np.repeat(uniform(1, draw), 9, 0)
    row = row_of("a", SHAPE, Budget(1, 8), 1, [VisitedTree(same, uniform(9, draw))] * 2)
    assert (row.experts, row.overlap) == (4.0, pytest.approx(1.0))


@pytest.mark.parametrize("overlap", [0.0, 0.4, 1.0])
def test_an_overlap_is_what_the_planner_takes_for_it(overlap: float) -> None:
    visited = replace(SHAPE, overlap=overlap).visited(36)
    assert overlap_of(SHAPE, 36, visited) == pytest.approx(overlap)


def test_a_study_trains_measures_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experts import models

    monkeypatch.setattr(models, "MOST_BYTES", 4000)
    monkeypatch.setattr(models, "LENGTH", 32)
    monkeypatch.setattr(frame, "NUM_TREES", 8)
    monkeypatch.setattr(frame, "BUDGETS", (Budget(1, 4), Budget(2, 3)))
    assert main(["--output-dir", str(tmp_path), "--steps", "2"]) == 0
    rows = frame.REPORT.read(tmp_path)
    assert [(row.target, row.users, row.num_particles) for row in rows] == [
        (target, users, n)
        for target in ("random weights", "trained")
        for users in (1, 4)
        for n in (1, 2)
    ]
    alone = rows[0]
    assert alone.nodes == 5 and 4 < alone.experts < 20
    assert "a tiny one" in (tmp_path / "experts.md").read_text()
