"""The fidelity benchmark's numbers, from canned answers: intervals, rows, table, picture."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from fidelity.bounding import Divergence
from fidelity.grid import Cell, cells
from fidelity.measure import Forecast
from fidelity.plot import plot_rows
from fidelity.report import CellRow, fastest_within, make_rows, write_csv
from fidelity.stats import frontier, mean_interval, paired_difference
from fidelity.store import Record
from results import Interval
from study import matching

N = 100
ORIGIN = {"date": "2026-01-01", "git_sha": "abc", "hardware": "a CPU", "versions": {}}


def test_paired_interval_by_hand() -> None:
    # Ten problems: we alone solve 1, the reference alone 3, both 4, none 2.
    ours = dict(enumerate([1, 0, 0, 0, 1, 1, 1, 1, 0, 0]))
    reference = dict(enumerate([0, 1, 1, 1, 1, 1, 1, 1, 0, 0]))
    interval = paired_difference(ours, reference)
    # With one more of each: (2 - 4) / 12, variance (6 / 12 - (2 / 12)^2) / 12 = 17 / 432.
    half = 1.959964 * math.sqrt(17 / 432)
    assert interval is not None
    assert interval == pytest.approx((-0.2, -1 / 6 - half, -1 / 6 + half, 10))


def test_paired_interval_keeps_a_width_and_uses_common_problems() -> None:
    same = paired_difference({1: True, 2: False, 3: True}, {1: True, 2: False, 4: False})
    assert same is not None
    assert (same.mean, same.n) == (0.0, 2)
    assert same.low < 0 < same.high
    assert paired_difference({1: True}, {2: True}) is None


def test_mean_interval() -> None:
    half = 1.959964 * 1.0 / math.sqrt(3)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - half, 2 + half, 3))
    assert mean_interval([]) is None


def test_frontier() -> None:
    points = [(1, 0.9), (4, 0.8), (5, 0.85), (5, 0.7), (8, 0.6), (7, 0.6), (3, 0.9)]
    assert frontier(points) == [(3, 0.9), (5, 0.85), (8, 0.6)]
    assert frontier([]) == []


def canned(cell: Cell, hits: int, passes: int) -> list[Record]:
    info: dict[str, Any] = {"completion_tokens": 41}
    if cell.kind.engine == "smc":
        info |= {
            "spec_verify_ct": passes,
            "spec_smc_num_particles": 8,
            "spec_smc_rounds_ct": passes,
            "spec_smc_resample_ct": passes / 2,
            "spec_smc_ess_mean": 4.0,
            "spec_smc_exact_ct": passes / 4,
        }
    return [Record(i, i < hits, 0, (i + 1) / 10, {**info, **_evidence(cell, i)}) for i in range(N)]


def _evidence(cell: Cell, index: int) -> dict[str, float | None]:
    """As the server says it: nothing in the modes that mix."""
    if cell.kind.engine != "smc":
        return {}
    mixes = (cell.kind.smc or {}).get("mode") in ("mixed", "auto")
    return {"spec_smc_log_evidence": None if mixes else -1.0 if index % 2 else -2.0}


@pytest.fixture(scope="module")
def rows() -> list[CellRow]:
    """All cells: the target solves 90, a cell of SMC the less the more tokens a pass it has."""
    records = {}
    for place, cell in enumerate(cells((0.7, 1.0))):
        lost = {"AR target": 0, "AR draft": 50, "exact": 1}.get(cell.kind.family, 2 + place % 9)
        records[cell] = canned(cell, 90 - lost, passes=20 - lost)
    few = Interval(0.5, 0.1, 0.9, 16)
    bounds = {cell: Divergence(None, few, few, few, few) for cell in records if cell.is_pure_smc}
    return make_rows(records, bounds)


def row_of(rows: list[CellRow], slug: str) -> CellRow:
    return next(row for row in rows if row.slug == slug)


def test_rows(rows: list[CellRow]) -> None:
    target = row_of(rows, "ar-target-t0.7")
    assert (target.accuracy.mean, target.difference, target.tokens_per_pass) == (0.9, None, 1.0)
    assert target.tokens_per_second == pytest.approx(41 * N / 10)
    assert row_of(rows, "ar-draft-t1").tokens_per_pass is None
    exact = row_of(rows, "exact-n4-k8-t0.7")
    assert exact.difference is not None
    assert exact.difference.mean == pytest.approx(-0.01)
    assert exact.tokens_per_pass == pytest.approx(40 / 19)
    assert (exact.ess_share, exact.resample_rate, exact.divergence) == (None, None, Divergence())
    smc = row_of(rows, "smc-token-n8-k4-t1")
    assert (smc.ess_share, smc.resample_rate, smc.exact_rate) == (0.5, 0.5, None)
    assert (smc.label, smc.mode, smc.evidence_threshold) == ("SMC token N=8 K=4", "smc", 0)
    mixed = row_of(rows, "mixed-c0.2-n8-k8-t1")
    assert (mixed.label, mixed.evidence_threshold) == ("mixed c=0.2 N=8 K=8", 0.2)
    assert (mixed.ess_share, mixed.resample_rate) == (None, None)
    assert mixed.exact_rate == pytest.approx(0.25)


def test_the_evidence_bounds_pure_smc_only(rows: list[CellRow]) -> None:
    found = row_of(rows, "smc-block-n8-k8-t0.7").divergence
    assert found.upper is not None
    assert (found.upper.mean, found.upper.n) == (1.5, N)
    assert found.lower is not None and found.lower.mean == 0.5
    uppers = {row.family for row in rows if row.divergence.upper is not None}
    assert uppers == {"SMC block", "SMC token"}


def test_fastest_within(rows: list[CellRow]) -> None:
    here = [row for row in rows if row.temperature == 0.7]
    three, one = fastest_within(here, 3), fastest_within(here, 1)
    assert three is not None and one is not None
    assert three.tokens_per_pass == pytest.approx(40 / 17)
    assert one.family == "exact"
    assert fastest_within(here, 0.5) is None


@pytest.mark.parametrize("slugs", [{"smc-block-n8-k8-t1", "smc-cut-c1-n8-k8-t1"}, {"ar-draft-t1"}])
def test_a_part_ends_with_all_its_files(
    rows: list[CellRow], slugs: set[str], tmp_path: Path
) -> None:
    """Hours of answers must not end in a picture that cannot be drawn."""
    some = [row for row in rows if row.slug in slugs]
    plot_rows(some, tmp_path / "plot.png", problems=N)
    write_csv(some, tmp_path / "rows.csv", ORIGIN)
    assert (tmp_path / "plot.png").stat().st_size > 0
    lines = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [float(line["accuracy_mean"]) for line in lines] == [row.accuracy.mean for row in some]


def test_forecast_learns_the_speed_of_the_machine() -> None:
    target, draft = matching(cells((0.7,)), ["ar-*"])
    forecast = Forecast({target: 1000, draft: 1000})
    for _ in range(1000):
        left = forecast.answered(target, 3 * target.kind.cost)
    engine_start = 30.0
    assert left - engine_start == pytest.approx(1000 * 3 * draft.kind.cost, rel=0.2)
