"""The study of drafts: the grid, what a run keeps, and the tables."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from drafts.run import (
    PROPOSALS,
    DraftRow,
    DraftStudy,
    cells,
    fastest,
    markdown,
    note,
    plain_seconds,
    round_seconds,
)
from fidelity import scoring
from fidelity.run import AUTO, EXACT, Quality
from intervals import Interval
from pair.task import held_out
from speed_stand_ins import Runner, canned_scores
from study import PUBLISHED

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

ONE = ("--temperatures", "0.7", "--problems", "4")


def test_the_server_takes_every_setting_and_no_file_is_written_twice() -> None:
    every = cells((0.7, 1.0))
    for smc in (cell.smc for cell in every if cell.smc):
        config = request_config(SMCConfig(), {"smc": smc})
        assert (config.mode, config.num_particles) == (smc["mode"], smc["num_particles"])
    slugs = [cell.slug for cell in every]
    assert len(set(slugs)) == len(slugs)
    assert {cell.smc["num_particles"] for cell in every if cell.smc} == {1, 4, 8}


def reply(engine: str, index: int, params: dict[str, Any]) -> dict[str, Any]:
    """Two tokens a pass with one particle, one more with each further one."""
    info: dict[str, Any] = {"completion_tokens": 37, "finish_reason": {"type": "stop"}}
    smc = params.get("custom_params", {}).get("smc")
    if "+" in engine or smc:
        info["spec_verify_ct"] = 36 / (1 + (smc["num_particles"] if smc else 1)) + index % 2
    text = f"#### {held_out(index).number}"
    return {"text": text, "output_ids": [5] * 36 + [index], "meta_info": info}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(scoring, "score", canned_scores)
    return Runner(DraftStudy, tmp_path, monkeypatch, reply, ONE)


def test_a_whole_run_is_published(bench: Runner) -> None:
    assert bench("--publish") == 0
    assert len(bench.started) == len({cell.engine for cell in cells((0.7,))})
    assert bench.published() == set(DraftStudy.report.files)
    rows = bench.rows()
    model = rows["draft model exact N=8"]
    head = rows["EAGLE-3 exact N=8"]
    # Every other answer of 36 tokens behind the first took a pass more than 36 / 9.
    assert head.tokens_per_pass.mean == pytest.approx(36 / 4.5)
    cost = round_seconds("eagle3-8b", 8)
    assert head.tokens_per_second == pytest.approx(8 / cost, rel=1e-5)
    assert head.to_draft_model == pytest.approx(round_seconds("llama-3.2-1b", 8) / cost, rel=1e-5)
    assert model.to_draft_model == 1
    assert rows["tuned draft STANDALONE"].rule == "STANDALONE"
    assert rows["AR target"].tokens_per_second == pytest.approx(1 / plain_seconds(), rel=1e-5)


def test_answers_of_old_code_are_only_shown(bench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row names its code."""
    code = {"format": 1, "plugin": "older", "pair": "a pair"}
    monkeypatch.setattr(DraftStudy, "fingerprint", lambda _: dict(code))
    assert bench("--only", "draft-model-exact*") == 0
    code["plugin"] = "newer"
    assert bench("--only", "eagle-3-exact*") == 0
    plugins = {(row.proposal, row.plugin) for row in bench.rows().values()}
    assert plugins == {("draft model", "older"), ("EAGLE-3", "newer")}
    assert bench("--only", "draft-model-*") == 1
    assert "plugin is 'older' there and 'newer' here" in bench.said


def test_more_problems_go_on_with_what_is_there(bench: Runner) -> None:
    """And a table of fewer looks at no more than these."""
    only = ("--only", "eagle-3-exact-n8*")
    for more, asks, answers in ((), True, 4), (("--problems", "6"), True, 6), ((), False, 4):
        assert bench(*only, *more) == 0
        told = bench.rows()["EAGLE-3 exact N=8"].tokens_per_pass.n
        assert (bool(bench.started), told) == (asks, answers)


def a_row(proposal: str, rule: str, n: int, speed: float) -> DraftRow:
    told = Interval(0.5, 0.25, 0.75, 9)
    quality = dict.fromkeys((field.name for field in fields(Quality)), told) | {"server_tilt": None}
    return DraftRow(
        label=f"{proposal} {rule} N={n}",
        proposal=proposal,
        rule=rule,
        num_particles=n,
        temperature=0.7,
        tokens_per_pass=told,
        round_ms=4.0,
        tokens_per_second=speed,
        to_draft_model=1.5,
        plugin="code",
        **quality,
    )


def test_the_bottom_line_compares_exact_with_exact(tmp_path: Path) -> None:
    """Red where auto's speed stands against exact's, or SGLang's chain wins."""
    given = (EXACT, 8, 800.0), (AUTO, 4, 900.0), ("STANDALONE", 1, 950.0)
    rows = [a_row("draft model", EXACT, 1, 400.0), a_row("draft model", EXACT, 8, 500.0)]
    rows += [a_row("EAGLE-3", *one) for one in given]
    DraftStudy.report.write(tmp_path, rows, {"problems": 9}, note)
    assert DraftStudy.report.read(tmp_path) == rows
    best = fastest(rows, "EAGLE-3", (EXACT,))
    assert best is not None and best.tokens_per_second == 800
    assert fastest(rows, "tuned draft", (EXACT,)) is None
    lines = [line for line in markdown(rows, "").splitlines() if line.startswith("| EAGLE-3 |")]
    assert [line.split("|")[2].strip() for line in lines] == ["exact N=8", "auto N=4"]
    assert [line.split("|")[5].strip() for line in lines] == ["1.60", ""]
    assert (tmp_path / "drafts.png").stat().st_size > 0


def test_published_milliseconds_are_the_planners_of_today() -> None:
    planned = {one.name: one.planned for one in PROPOSALS}
    for row in DraftStudy.report.read(PUBLISHED / "drafts"):
        name = planned.get(row.proposal)
        seconds = round_seconds(name, row.num_particles) if name else plain_seconds()
        assert row.round_ms == pytest.approx(1e3 * seconds, rel=1e-5)
        assert row.tokens_per_second == pytest.approx(row.tokens_per_pass.mean / seconds, rel=1e-4)
