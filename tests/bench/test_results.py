"""What all tables are made of, and that published tables say what their numbers say."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import trees
from results import Interval, ess_share, interval_cell, resample_rate, wilson
from scipy.stats import binomtest
from study import PUBLISHED, REPOSITORY

from sglang_smc.demo.serving import tokens_per_pass


def plain_info(completion_tokens: int) -> dict[str, Any]:
    return {"completion_tokens": completion_tokens}


def smc_info(completion_tokens: int, rounds: int, resampled: int, ess: float) -> dict[str, Any]:
    return {
        "completion_tokens": completion_tokens,
        "spec_verify_ct": rounds,
        "spec_smc_num_particles": 8,
        "spec_smc_rounds_ct": rounds,
        "spec_smc_resample_ct": resampled,
        "spec_smc_ess_mean": ess,
    }


@pytest.mark.parametrize(("hits", "n"), [(0, 10), (1, 10), (55, 100), (299, 300), (300, 300)])
def test_wilson_interval_is_scipys(hits: int, n: int) -> None:
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    interval = wilson(hits, n)
    assert interval.mean == hits / n
    assert interval.low == pytest.approx(expected.low, abs=1e-7)
    assert interval.high == pytest.approx(expected.high, abs=1e-7)


def test_plain_decoding_makes_one_token_a_pass() -> None:
    assert tokens_per_pass([plain_info(7), plain_info(31)]) == 1.0


def test_answers_of_one_token_need_no_decoding_pass() -> None:
    assert tokens_per_pass([plain_info(1)]) == 0.0


def test_ess_is_weighted_by_rounds() -> None:
    infos = [smc_info(100, rounds=30, resampled=3, ess=8.0), smc_info(20, 10, 7, ess=4.0)]
    assert ess_share(infos) == pytest.approx((30 * 1.0 + 10 * 0.5) / 40)
    assert resample_rate(infos) == 10 / 40


def cells(name: str, line: dict[str, str], scale: float, form: str) -> str:
    mean, low, high = (float(line[f"{name}_{part}"]) for part in ("mean", "low", "high"))
    return interval_cell(Interval(mean, low, high, 0), form, scale)


#: The columns that tables show with their interval, their scale and their form there.
OF_ANSWERS = [
    ("accuracy", 100, ".1f"),
    ("difference", 100, "+.1f"),
    ("tilt", 1, "+.3f"),
    ("kl_at_least", 1, ".2f"),
    ("innovation", 1, "+.4f"),
    ("log_p_difference", 1, "+.4f"),
    ("server_tilt", 1, "+.3f"),
]
SHOWN = {
    "fidelity": OF_ANSWERS,
    "drafts": [("tokens_per_pass", 1, ".2f"), *OF_ANSWERS],
    "speed": [("ratio_to_ar", 1, ".2f")],
}
#: The studies of `SHOWN` that are published.
TABLES = sorted(path for name in SHOWN for path in PUBLISHED.rglob(f"{name}.csv"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_published_tables_say_what_their_numbers_say(path: Path) -> None:
    """Red where one of the two files is replaced or edited without the other."""
    table = path.with_suffix(".md").read_text()
    with path.open() as file:
        lines = list(csv.DictReader(file))
    for column, scale, form in SHOWN[path.stem]:
        for line in (x for x in lines if x[f"{column}_mean"]):
            label = line.get("label") or line["system"]
            said = [row for row in table.splitlines() if row.startswith(f"| {label} |")]
            assert any(cells(column, line, scale, form) in row for row in said), (label, column)


def test_something_is_published() -> None:
    assert {"fidelity", "drafts"} <= {path.stem for path in TABLES}


def test_the_table_of_trees_says_what_its_numbers_say() -> None:
    """Likewise; and docs/drafts.md shows it as it is."""
    rows = json.loads((PUBLISHED / "trees" / "trees.json").read_text())["rows"]
    table = (PUBLISHED / "trees" / "trees.md").read_text()
    assert trees.markdown(rows) + "\n" == table
    assert table in (REPOSITORY / "docs" / "drafts.md").read_text()
