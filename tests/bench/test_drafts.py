"""The study of drafts, and of SGLang's trees: the grids, what a run keeps, and the tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import trees
from answers import Reply, Request
from drafts.grid import PROPOSALS, cells
from drafts.report import DraftRow, fastest, markdown, plain_seconds, round_seconds
from drafts.run import Drafts, note
from fidelity.grid import AUTO, EXACT
from intervals import Interval
from speed_stand_ins import Runner, canned_scores, leave_out_what_takes_seconds
from study import PUBLISHED

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

ONE = ("--temperatures", "0.7", "--problems", "4", "--jobs", "1")


def test_the_server_takes_every_setting_and_no_file_is_written_twice() -> None:
    every = cells((0.7, 1.0))
    for smc in (cell.smc for cell in every if cell.smc):
        config = request_config(SMCConfig(), {"smc": smc})
        assert (config.mode, config.num_particles) == (smc["mode"], smc["num_particles"])
    slugs = [cell.slug for cell in every]
    assert len(set(slugs)) == len(slugs)
    assert {cell.smc["num_particles"] for cell in every if cell.smc} == {1, 4, 8}


def reply(engine: str, entry: Request) -> Reply:
    """Two tokens a pass with one particle, one more with each further one."""
    info: dict[str, Any] = {"completion_tokens": 37, "finish_reason": {"type": "stop"}}
    smc = entry.sampling_params.get("custom_params", {}).get("smc")
    if engine != "target":
        info["spec_verify_ct"] = 36 / (1 + (smc["num_particles"] if smc else 1)) + entry.index % 2
    text = f"#### {entry.item.number}"
    return Reply(entry.index, text, [5] * 36 + [entry.index % 500], info)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    leave_out_what_takes_seconds(monkeypatch, Drafts, tmp_path)
    return Runner(Drafts, tmp_path / "out", reply, ONE, score=canned_scores)


def test_a_whole_run_is_published(bench: Runner) -> None:
    assert bench("--publish") == 0
    assert bench.started == list(dict.fromkeys(cell.engine for cell in cells((0.7,))))
    assert bench.published() == set(Drafts.report.files)
    rows = bench.rows()
    model, head = rows["draft model exact N=8"], rows["EAGLE-3 exact N=8"]
    # Every other answer of 36 tokens behind the first took a pass more than 36 / 9.
    assert head.tokens_per_pass.mean == pytest.approx(36 / 4.5)
    cost = round_seconds("eagle3-8b", 8)
    assert head.tokens_per_second == pytest.approx(8 / cost, rel=1e-5)
    assert head.to_draft_model == pytest.approx(round_seconds("llama-3.2-1b", 8) / cost, rel=1e-5)
    assert model.to_draft_model == 1
    assert rows["tuned draft STANDALONE"].rule == "STANDALONE"
    assert rows["AR target"].tokens_per_second == pytest.approx(1 / plain_seconds(), rel=1e-5)


def test_answers_of_older_code_are_shown_and_never_gone_on_with(
    bench: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row names its code."""
    code = {"format": 1, "plugin": "older", "pair": "a pair"}
    monkeypatch.setattr(Drafts, "fingerprint", lambda _: dict(code))
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
    told = there = Interval(0.5, 0.25, 0.75, 9)
    fields = (f"{proposal} {rule} N={n}", proposal, rule, n, 0.7, there, *([told] * 6), None)
    return DraftRow(*fields, 4.0, speed, 1.5, "code")


def test_the_bottom_line_compares_exact_with_exact(tmp_path: Path) -> None:
    """Red where auto's speed stands against exact's, or SGLang's chain wins."""
    given = (EXACT, 8, 800.0), (AUTO, 4, 900.0), ("STANDALONE", 1, 950.0)
    rows = [a_row("draft model", EXACT, 1, 400.0), a_row("draft model", EXACT, 8, 500.0)]
    rows += [a_row("EAGLE-3", *one) for one in given]
    Drafts.report.write(tmp_path, rows, {"problems": 9}, note)
    assert Drafts.report.read(tmp_path) == rows
    best = fastest(rows, "EAGLE-3", (EXACT,))
    assert best is not None and best.tokens_per_second == 800
    assert fastest(rows, "tuned draft", (EXACT,)) is None
    lines = [line for line in markdown(rows, "").splitlines() if line.startswith("| EAGLE-3 |")]
    assert [line.split("|")[2].strip() for line in lines] == ["exact N=8", "auto N=4"]
    assert [line.split("|")[5].strip() for line in lines] == ["1.60", ""]
    assert (tmp_path / "drafts.png").stat().st_size > 0


def test_published_milliseconds_are_the_planners_of_today() -> None:
    planned = {one.name: one.planned for one in PROPOSALS}
    for row in Drafts.report.read(PUBLISHED / "drafts"):
        name = planned.get(row.proposal)
        seconds = round_seconds(name, row.num_particles) if name else plain_seconds()
        assert row.round_ms == pytest.approx(1e3 * seconds, rel=1e-5)
        assert row.tokens_per_second == pytest.approx(row.tokens_per_pass.mean / seconds, rel=1e-4)


# --- SGLang's trees beside SMC


def test_trees_are_asked_once_with_seeds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where two cells share a seed, or a row tells of another's answers."""
    monkeypatch.setattr(trees, "PUBLISHED", tmp_path)
    monkeypatch.setattr(trees, "provenance", lambda settings: {"settings": settings})
    run = Runner(trees.Trees, tmp_path / "out", reply, ("--problems", "3"))
    assert run("--only", "exact-*", "--publish") == 1
    assert "cells are not complete, as sglang-" in run.said
    first = run.asked
    assert run("--publish", last=20) == 130
    first += run.asked
    assert run("--publish") == 0
    seeds = [entry.sampling_params["sampling_seed"] for _, entry in first + run.asked]
    assert len(seeds) == len(set(seeds)) == 3 * len(trees.CELLS)
    rows = json.loads((tmp_path / "trees" / "trees.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [row.name for row in trees.ROWS]
    for row in rows:
        n = row["smc"]["num_particles"] if row["smc"] else 1
        # 36 tokens behind the first; every other problem takes a pass more.
        wanted = 3 * 36 / (3 * 36 / (1 + n) + 1)
        assert {round(one["mean"], 6) for one in row["tokens"].values()} == {round(wanted, 6)}
        (made,) = (one for one in trees.ROWS if one.name == row["name"])
        measured = [cell.temperature for cell in trees.CELLS if cell.row == made]
        assert list(row["tokens"]) == [f"{t:g}" for t in measured]
