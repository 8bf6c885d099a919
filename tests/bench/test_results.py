"""What all tables are made of, and that published tables say what their numbers say."""

import csv
import json
from typing import Any

import pytest
import trees
from drafts import report as drafts
from results import Interval, ess_share, interval_cell, resample_rate, wilson
from scipy.stats import binomtest
from steering import report as steering
from study import PUBLISHED, REPOSITORY
from support import cli as support
from support import page as support_page

from sglang_smc.demo.serving import tokens_per_pass


def smc_info(completion_tokens: int, rounds: int, resampled: int, ess: float) -> dict[str, Any]:
    return {
        "completion_tokens": completion_tokens,
        "spec_verify_ct": rounds,
        "spec_smc_num_particles": 8,
        "spec_smc_rounds_ct": rounds,
        "spec_smc_resample_ct": resampled,
        "spec_smc_ess_mean": ess,
    }


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (1, 10), (55, 100), (300, 300)])
def test_wilson_interval_is_scipys(hits: int, n: int) -> None:
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    found = wilson(hits, n)
    assert found == pytest.approx((hits / n, expected.low, expected.high, n), abs=1e-7)


def test_rates_are_weighted_by_rounds_and_plain_decoding_makes_one_token_a_pass() -> None:
    infos = [smc_info(100, rounds=30, resampled=3, ess=8.0), smc_info(20, 10, 7, ess=4.0)]
    assert ess_share(infos) == pytest.approx((30 * 1.0 + 10 * 0.5) / 40)
    assert resample_rate(infos) == 10 / 40
    assert tokens_per_pass([{"completion_tokens": 7}, {"completion_tokens": 31}]) == 1.0
    assert tokens_per_pass([{"completion_tokens": 1}]) == 0.0, "no decoding pass"


def cells(name: str, line: dict[str, str], scale: float, form: str) -> str:
    mean, low, high = (float(line[f"{name}_{part}"]) for part in ("mean", "low", "high"))
    return interval_cell(Interval(mean, low, high, 0), form, scale)


def test_the_published_table_of_fidelity_says_what_its_numbers_say() -> None:
    """Red where one of the two files is replaced or edited without the other."""
    path = PUBLISHED / "fidelity" / "fidelity.csv"
    table = path.with_suffix(".md").read_text().splitlines()
    for line in csv.DictReader(path.open()):
        said = [row for row in table if row.startswith(f"| {line['label']} |")]
        for column, scale, form in (("accuracy", 100, ".1f"), ("tilt", 1, "+.3f")):
            assert any(cells(column, line, scale, form) in row for row in said), line["slug"]


@pytest.mark.parametrize(
    ("study", "report"), [("drafts", drafts), ("steering", steering)], ids=["drafts", "steering"]
)
def test_a_published_table_is_made_of_the_published_numbers(study: str, report: Any) -> None:
    folder = PUBLISHED / study
    origin = json.loads((folder / "provenance.json").read_text())
    rows = report.read_csv(folder / f"{study}.csv")
    assert (folder / f"{study}.md").read_text() == report.markdown(rows, report.note(origin))


def test_pages_say_what_was_published() -> None:
    """Red where results are replaced and the page is not, or the other way round."""
    page = {path.stem: path.read_text() for path in (REPOSITORY / "docs").glob("*.md")}
    assert (
        steering.summaries(steering.read_csv(PUBLISHED / "steering" / "steering.csv"))
        in (page["steering"])
    )
    made = support_page.tables(support.read(PUBLISHED / "support" / "support.json"))
    assert made.strip() in page["support"]
    rows = json.loads((PUBLISHED / "trees" / "trees.json").read_text())["rows"]
    assert trees.markdown(rows) + "\n" == (PUBLISHED / "trees" / "trees.md").read_text()
    assert trees.markdown(rows) in page["drafts"]
    table = (PUBLISHED / "drafts" / "drafts.md").read_text().partition("**Temperature 1")[0]
    assert {line for line in table.splitlines() if line.count("|") == 7} <= set(
        page["drafts"].splitlines()
    )
