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
from fidelity.report import CellRow, conclusions, make_rows, markdown, most_tokens_within, write_csv
from fidelity.scoring import Score
from fidelity.stats import mean_interval, paired_difference
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
        if (cell.kind.smc or {}).get("mode") == "exact":
            info |= {"spec_smc_tilt": 0.1, "spec_smc_tilt_information": 4.0}
    return [
        Record(i, i < hits, 0, (i + 1) / 10, [1] * 41, {**info, **_evidence(cell, i)})
        for i in range(N)
    ]


def scores(tilt: float) -> list[Score]:
    """Of answers that all have this tilt, give or take, and log p of -40 less ten times that."""
    return [
        Score(i, 0, 41, -40.0 - 10 * tilt, tilt, 20.0, 10 * tilt + (-1) ** i, 10.0, [tilt] * 41)
        for i in range(N)
    ]


def _evidence(cell: Cell, index: int) -> dict[str, float | None]:
    """As the server says it: nothing in the modes that mix."""
    if cell.kind.engine != "smc":
        return {}
    mixes = (cell.kind.smc or {}).get("mode") in ("mixed", "auto")
    return {"spec_smc_log_evidence": None if mixes else -1.0 if index % 2 else -2.0}


TILTS = {"AR target": 0.0, "AR draft": 0.9, "exact": 0.0, "mixed c=4": 0.1}


@pytest.fixture(scope="module")
def rows() -> list[CellRow]:
    """All cells: the target solves 90, a cell of SMC the less the more tokens a pass it has."""
    answers = {}
    for place, cell in enumerate(cells((0.7, 1.0))):
        known = {"AR target": 0, "AR draft": 50, "exact": 1, "mixed c=4": 2}
        lost = known.get(cell.kind.name, 3 + place % 9)
        records = canned(cell, 90 - lost, passes=20 - lost)
        answers[cell] = list(zip(records, scores(TILTS.get(cell.kind.name, 0.3)), strict=True))
    few = Interval(0.5, 0.1, 0.9, 16)
    bounds = {cell: Divergence(None, few, few, few, few) for cell in answers if cell.is_pure_smc}
    return make_rows(answers, bounds)


def row_of(rows: list[CellRow], slug: str) -> CellRow:
    return next(row for row in rows if row.slug == slug)


def test_rows(rows: list[CellRow]) -> None:
    target = row_of(rows, "ar-target-t0.7")
    assert (target.accuracy.mean, target.difference, target.tokens_per_pass) == (0.9, None, 1.0)
    assert target.tokens_per_second == pytest.approx(41 * N / 10)
    assert row_of(rows, "ar-draft-t1").tokens_per_pass is None
    exact = row_of(rows, "exact-t0.7")
    assert exact.difference is not None
    assert exact.difference.mean == pytest.approx(-0.01)
    assert exact.tokens_per_pass == pytest.approx(40 / 19)
    assert (exact.ess_share, exact.resample_rate, exact.divergence) == (None, None, Divergence())
    smc = row_of(rows, "smc-c0-t1")
    assert (smc.ess_share, smc.resample_rate, smc.exact_rate) == (0.5, 0.5, None)
    assert (smc.label, smc.mode, smc.evidence_threshold) == ("smc c=0", "smc", 0)
    mixed = row_of(rows, "mixed-c4-t1")
    assert (mixed.label, mixed.evidence_threshold) == ("mixed c=4", 4)
    assert (mixed.ess_share, mixed.resample_rate) == (None, None)
    assert mixed.exact_rate == pytest.approx(0.25)


def test_rows_in_nats(rows: list[CellRow]) -> None:
    mixed = row_of(rows, "mixed-c4-t1")
    half = (
        1.959964 * math.sqrt(N / (N - 1) / N) / 10
    )  # the tilts of answers are 1 apart, either way
    assert mixed.tilt == pytest.approx((0.1, 0.1 - half, 0.1 + half, N))
    assert mixed.innovation.mean == pytest.approx(0.1 / 41)
    assert mixed.sharpening.mean == pytest.approx(0.1 / 20)
    assert mixed.kl_at_least.mean == pytest.approx(41 * math.log(1 + 0.98 * math.expm1(0.1)))
    assert mixed.log_p_difference is not None
    assert mixed.log_p_difference.mean == pytest.approx(-1 / 41)
    assert row_of(rows, "ar-target-t1").log_p_difference is None
    assert row_of(rows, "ar-target-t1").kl_at_least.mean == 0


def test_the_servers_own_tilt_stands_beside_that_of_the_plain_models(rows: list[CellRow]) -> None:
    """Where answers carry it; elsewhere the cell is empty."""
    watched = row_of(rows, "exact-t0.7").server_tilt
    half = 1.959964 / math.sqrt(4 * N)
    assert watched == pytest.approx((0.1, 0.1 - half, 0.1 + half, N))
    assert row_of(rows, "mixed-c4-t0.7").server_tilt is None
    table = markdown(rows, "a note")
    exact, mixed = (next(x for x in table.splitlines() if x.startswith(n)) for n in NAMES)
    assert exact.split("|")[7].strip() == "+0.100 [+0.002, +0.198]"
    assert mixed.split("|")[7].strip() == ""


NAMES = ("| exact |", "| mixed c=4 |")


def test_the_evidence_bounds_pure_smc_only(rows: list[CellRow]) -> None:
    found = row_of(rows, "smc-c0-t0.7").divergence
    assert found.upper is not None
    assert (found.upper.mean, found.upper.n) == (1.5, N)
    assert found.lower is not None and found.lower.mean == 0.5
    uppers = {row.label for row in rows if row.divergence.upper is not None}
    assert uppers == {"smc c=0"}


def test_most_tokens_within_limits(rows: list[CellRow]) -> None:
    here = [row for row in rows if row.temperature == 0.7]
    wide, narrow = most_tokens_within(here, 0.15, 5.0), most_tokens_within(here, 0.05, 5.0)
    assert wide is not None and narrow is not None
    assert (wide.label, narrow.label) == ("mixed c=4", "exact")
    assert most_tokens_within(here, 0.15, 0.1) == narrow  # mixed is too many nats away
    assert most_tokens_within(here, -0.1, 1.0) is None
    assert "exact: 2.11" in conclusions(rows)


@pytest.mark.parametrize(
    "slugs", [{"smc-c0-t1", "mixed-c1-t1", "ar-target-t1"}, {"ar-draft-t1"}, {"exact-t0.7"}]
)
def test_a_part_ends_with_all_its_files(
    rows: list[CellRow], slugs: set[str], tmp_path: Path
) -> None:
    """Hours of answers must not end in a picture that cannot be drawn."""
    some = [row for row in rows if row.slug in slugs]
    plot_rows(some, tmp_path / "plot.png")
    write_csv(some, tmp_path / "rows.csv", ORIGIN)
    assert (tmp_path / "plot.png").stat().st_size > 0
    lines = list(csv.DictReader((tmp_path / "rows.csv").open()))
    for column in ("accuracy", "tilt", "kl_at_least"):
        told = [float(line[f"{column}_mean"]) for line in lines]
        assert told == pytest.approx([getattr(row, column).mean for row in some], rel=1e-5)


def test_forecast_learns_the_speed_of_the_machine() -> None:
    target, draft = matching(cells((0.7,)), ["ar-*"])
    forecast = Forecast({target: 1000, draft: 1000})
    for _ in range(1000):
        left = forecast.answered(target, 3 * target.kind.cost)
    engine_start = 30.0
    assert left - engine_start == pytest.approx(1000 * 3 * draft.kind.cost, rel=0.2)
