"""The demo's numbers from canned answers, what its words may say, and what it asks."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import demo
import pytest
from comparison import Contender, Run, Speed, Turn, conclusions, plain, row_of, tables
from demo import FIRST_PROBLEM, blocks, contenders, launches, parse_arguments
from plots import plot_rows
from results import Interval, wilson

from sglang_smc.demo.chat import Answer
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

SMC_INFO = {
    "completion_tokens": 41,
    "spec_verify_ct": 10,
    "spec_smc_num_particles": 8,
    "spec_smc_rounds_ct": 10,
    "spec_smc_resample_ct": 5,
    "spec_smc_ess_mean": 4.0,
}
NAMES = ("target", "smc", "auto", "exact", "standalone", "draft")


def run_of(contender: Contender, info: dict[str, Any], seconds: list[float]) -> Run:
    """One answer of each turn's seconds alone, the same two at a time; all but the first right."""
    run = Run(contender)
    for turns, size in ((run.alone, 1), (run.crowd, 2)):
        for spent in seconds:
            first = len(run.answers)
            answers = [
                Answer(i, f"id{i}", "#### 1", i > 0, "stop", seconds_to_first=0.1, seconds=spent)
                for i in range(first, first + size)
            ]
            turns.append(Turn(answers, spent))
    run.infos = {answer.request_id: info for answer in run.answers}
    return run


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a release on which SGLang's own speculation runs wherever ours does."""
    monkeypatch.setattr(demo, "has_standalone", lambda: True)


@pytest.fixture
def reference() -> Run:
    return run_of(contenders(parse_arguments([]))[0], {"completion_tokens": 41}, [1.0, 2.0, 4.0])


def test_a_row(reference: Run) -> None:
    smc = Contender("SMC", "smc", "smc", weighs=True)
    row = row_of(run_of(smc, SMC_INFO, [0.5, 1.0, 2.0]), reference)
    assert row.accuracy == wilson(8, 9)
    assert row.alone.to_ar == pytest.approx((2, 2, 2, 3))  # what both have is taken out
    assert (row.alone.n, row.crowd.n) == (3, 6)
    assert row.alone.tokens_per_second == pytest.approx(3 * 41 / 3.5)
    assert row.crowd.tokens_per_second == pytest.approx(6 * 41 / 3.5)
    assert (row.tokens_per_target_pass, row.ess_share, row.resample_rate) == (4.0, 0.5, 0.5)
    plain_row = row_of(reference, reference)
    assert (plain_row.alone.to_ar, plain_row.tokens_per_target_pass) == (None, 1.0)


def test_a_row_that_answered_fewer_is_held_against_the_same_problems(reference: Run) -> None:
    draft = Contender("AR, draft", "draft", "draft")
    row = row_of(run_of(draft, {"completion_tokens": 41}, [0.5, 1.0]), reference)
    assert row.crowd.to_ar is not None
    assert (row.crowd.to_ar.mean, row.crowd.to_ar.n) == (pytest.approx(2), 2)
    assert row.tokens_per_target_pass is None  # it has no target
    auto = row_of(run_of(Contender("SMC, auto", "auto", "smc"), SMC_INFO, [1.0]), reference)
    assert (auto.ess_share, auto.resample_rate) == (None, None)  # it keeps no population


@pytest.mark.parametrize(
    ("low", "high", "says"), [(1.1, 1.4, "faster"), (0.6, 0.9, "slower"), (0.9, 1.3, "no diff")]
)
def test_words_follow_from_the_interval(reference: Run, low: float, high: float, says: str) -> None:
    speed = Speed(1.0, Interval(1.2, low, high, 4), 1.0, 1.0, 4)
    smc = row_of(run_of(Contender("SMC", "smc", "smc"), SMC_INFO, [1.0]), reference)
    lines = conclusions(replace(smc, alone=speed, crowd=speed), 8).splitlines()
    assert len(lines) == 2
    assert all(line.split(": ")[-1].startswith(says) for line in lines)


def test_it_ends_with_tables_a_picture_and_json(reference: Run, tmp_path: Path) -> None:
    """Five minutes of answers must not end in a picture that cannot be drawn."""
    found = contenders(parse_arguments([]))
    rows = [row_of(run_of(c, SMC_INFO, [1.0, 2.0]), reference) for c in found]
    plot_rows(rows, tmp_path / "it.png", title="x", concurrency=8)
    assert (tmp_path / "it.png").stat().st_size > 0
    assert "8 at a time" in tables(rows, 8)
    assert plain(rows[0])["accuracy"]["n"] == 6


def test_one_server_takes_every_mode() -> None:
    options = parse_arguments(["--resample-at", "token"])
    asked = {c.slug: c.smc for c in contenders(options) if c.server == "smc"}
    configs = {slug: request_config(SMCConfig(), {"smc": smc}) for slug, smc in asked.items()}
    assert {slug: config.mode for slug, config in configs.items()} == {
        slug: slug for slug in ("smc", "auto", "exact")
    }
    assert configs["smc"].resample_at == "token"


def test_servers_differ_by_smc_or_the_model_alone() -> None:
    smc, target, standalone, draft = launches(parse_arguments(["--pair", "p"])).values()
    for other in (smc, standalone, draft):
        assert other.flags[: len(target.flags)] == target.flags
    models = [one.model.name for one in (smc, target, standalone, draft)]
    assert models == ["target", "target", "target", "draft"]


def test_rows_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("auto", "exact", "standalone", "draft"):
        found = [c.slug for c in contenders(parse_arguments([f"--no-{name}"]))]
        assert found == [one for one in NAMES if one != name]
    monkeypatch.setattr(demo, "has_standalone", lambda: False)  # an older release
    found = [c.slug for c in contenders(parse_arguments([]))]
    assert found == [one for one in NAMES if one != "standalone"]


@pytest.mark.parametrize("problems", [1, 5, 128])
def test_no_problem_is_asked_twice(problems: int) -> None:
    options = parse_arguments(["--problems", str(problems), "--one-user", "3"])
    asked = list(chain.from_iterable(blocks(options)))
    assert asked == list(range(FIRST_PROBLEM + 3, FIRST_PROBLEM + 3 + problems))
