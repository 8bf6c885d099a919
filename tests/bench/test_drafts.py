"""The study of drafts: its grid, the arithmetic of chains, what a run keeps, and its tables."""

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trees
from answers import Reply, Request
from drafts import cli, grid
from drafts.chains import Rounds, chances, expected_rounds, head_law, model_law
from drafts.cost import plain_seconds, round_seconds
from drafts.grid import AUTO, EXACT, LIKELIEST, PROPOSALS, SAMPLED, Proposal, cells
from drafts.report import DraftRow, fastest, markdown, note
from fidelity.measure import Record
from head_laws import DFLASH, EAGLE3, Draft, make_head
from results import Interval
from speed_stand_ins import Runner, canned_scores, leave_out_what_takes_seconds
from study import PUBLISHED

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

ONE = ("--temperatures", "0.7", "--problems", "4", "--jobs", "1")


# --- The grid


def test_the_server_takes_every_setting_and_no_file_is_written_twice() -> None:
    for kind in grid.kinds():
        if kind.smc:
            config = request_config(SMCConfig(), {"smc": kind.smc})
            assert (config.mode, config.num_particles) == (
                kind.smc["mode"],
                kind.smc["num_particles"],
            )
    slugs = [cell.slug for cell in cells((0.7, 1.0))]
    assert len(set(slugs)) == len(slugs)
    assert {name.smc["num_particles"] for name in grid.kinds() if name.smc} == {1, 4, 8}


# --- Rounds of one chain


def every_outcome(keep: np.ndarray, anchor: int = 0) -> float:
    """The mean number of rounds from an anchor on, by all that may happen."""
    left, steps = keep.shape
    if anchor >= left:
        return 0.0
    most, total = min(steps, left - anchor), 1.0
    for kept in product((True, False), repeat=most):
        chance = np.prod([k if yes else 1 - k for yes, k in zip(kept, keep[anchor], strict=False)])
        accepted = next((i for i, yes in enumerate(kept) if not yes), most)
        total += float(chance) * every_outcome(keep, anchor + accepted + 1)
    return total


def test_rounds_by_all_outcomes() -> None:
    """Red for a bonus token that is lost, a block that goes on past a refusal, and a text's end."""
    keep = np.random.default_rng(0).uniform(size=(6, 3))
    assert expected_rounds(keep) == pytest.approx(every_outcome(keep))
    assert expected_rounds(np.zeros((5, 3))) == 5
    assert expected_rounds(np.ones((8, 3))) == 2
    assert expected_rounds(np.ones((9, 3))) == 3
    assert expected_rounds(np.empty((0, 3))) == 0


PROMPT, ANSWER = [3, 5, 2], [7, 2, 9, 4, 1, 6]


def test_chances_of_a_model_by_hand(tiny: Callable[..., str]) -> None:
    """Red for laws of the wrong place or temperature, and for drafts taken as p's likeliest."""
    target, draft = (load(tiny(seed=seed, vocab_size=16, scale=0.3)) for seed in (1, 2))
    found = chances(target, model_law(draft), PROMPT, ANSWER, 0.5)
    text = torch.tensor([[*PROMPT, *ANSWER]])
    with torch.inference_mode():
        p, q = ((m(text).logits[0].double() / 0.5).softmax(-1) for m in (target, draft))
    for anchor, step in product(range(5), range(8)):
        place = len(PROMPT) + anchor + 1 + step
        if place < text.shape[1]:
            token = int(text[0, place])
            wanted = min(1.0, float(q[place - 1, token] / p[place - 1, token]))
            assert found[SAMPLED][anchor, step] == pytest.approx(wanted, rel=1e-4)
            assert found[LIKELIEST][anchor, step] == (int(q[place - 1].argmax()) == token)


@pytest.mark.parametrize("kind", [EAGLE3, DFLASH])
def test_chances_of_a_head_are_those_of_its_rounds(
    tiny: Callable[..., str], tmp_path: Path, kind: str
) -> None:
    """Each anchor has a law of its own, by the reference of the engine's tests."""
    folder = tiny(seed=1, vocab_size=16, layers=4, scale=0.3)
    made = make_head(kind, folder, tmp_path / "head", num_steps=8)
    target = load(folder)
    found = chances(target, head_law(kind == DFLASH, Path(made), target), PROMPT, ANSWER, 1.0)
    text, reference = [*PROMPT, *ANSWER], Draft(kind, folder, made, 8)
    p = reference.model(torch.tensor([text])).logits[0].softmax(-1)
    for anchor in range(5):
        q = reference.probs(text, len(PROMPT) + anchor)
        for step, place in enumerate(range(len(PROMPT) + anchor + 1, len(text))):
            wanted = min(1.0, float(q[step, text[place]] / p[place - 1, text[place]]))
            assert found[SAMPLED][anchor, step] == pytest.approx(wanted, rel=1e-3)


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# --- A run


def reply(engine: str, entry: Request) -> Reply:
    """Two tokens a pass with one particle, one more with each further one."""
    info: dict[str, Any] = {"completion_tokens": 37, "finish_reason": {"type": "stop"}}
    smc = entry.sampling_params.get("custom_params", {}).get("smc")
    if engine != "target":
        info["spec_verify_ct"] = 36 / (1 + (smc["num_particles"] if smc else 1)) + entry.index % 2
    text = f"#### {entry.item.number}"
    return Reply(entry.index, text, [5] * 36 + [entry.index % 500], info)


def count(proposal: Proposal, answers: Sequence[Record], temperature: float) -> Rounds:
    """Three tokens a round, by the one rule that is told."""
    return {SAMPLED: np.array([12.0] * len(answers))}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    leave_out_what_takes_seconds(monkeypatch, cli, tmp_path)
    return Runner(cli, tmp_path / "out", reply, ONE, canned_scores, count)


def test_a_whole_run_is_published_and_a_part_never(bench: Runner) -> None:
    assert bench("--only", "eagle-3-exact-n8*", "--publish") == 1
    assert "cells are not complete, as ar-target-t0.7" in bench.said
    assert not bench.published()
    assert bench("--publish", "--fresh") == 0
    assert bench.started == list(dict.fromkeys(kind.engine for kind in grid.kinds()))
    assert bench.published() == set(cli.REPORT.files)
    rows = bench.rows()
    model, head = rows["draft model exact N=8"], rows["EAGLE-3 exact N=8"]
    # Every other answer of 36 tokens behind the first took a pass more than 36 / 9.
    assert head.tokens_per_pass.mean == pytest.approx(36 / 4.5)
    cost = round_seconds("eagle3-8b", 8)
    assert head.tokens_per_second == pytest.approx(8 / cost, rel=1e-5)
    assert head.to_draft_model == pytest.approx(round_seconds("llama-3.2-1b", 8) / cost, rel=1e-5)
    assert model.to_draft_model == 1
    chain = rows[f"EAGLE-3 {SAMPLED}"]
    assert (chain.tokens_per_pass.mean, chain.accuracy, chain.num_particles) == (3, None, 1)
    assert chain.tokens_per_second == pytest.approx(3 / round_seconds("eagle3-8b", 1), rel=1e-5)
    assert rows["AR target"].tokens_per_second == pytest.approx(1 / plain_seconds(), rel=1e-5)


def test_answers_of_older_code_are_shown_and_never_gone_on_with(
    bench: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row names its code."""
    older = {"format": 1, "plugin": "older", "pair": "a pair"}
    monkeypatch.setattr(cli, "fingerprint", lambda: older)
    assert bench("--only", "draft-model-exact*") == 0
    monkeypatch.setattr(cli, "fingerprint", lambda: {**older, "plugin": "newer"})
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
    there = Interval(0.5, 0.25, 0.75, 9)
    told = there if rule in (EXACT, AUTO) else None
    label = grid.label(proposal, rule, n)
    fields = (label, proposal, rule, n, 0.7, there, *([told] * 6), None)
    return DraftRow(*fields, 4.0, speed, told and 1.5, "code")


def test_the_bottom_line_compares_exact_with_exact(tmp_path: Path) -> None:
    """Red where auto's speed stands against exact's, or a chain of SGLang's wins."""
    given = (EXACT, 8, 800.0), (AUTO, 4, 900.0), (SAMPLED, 1, 950.0)
    rows = [a_row("draft model", EXACT, 1, 400.0), a_row("draft model", EXACT, 8, 500.0)]
    rows += [a_row("EAGLE-3", *one) for one in given]
    cli.REPORT.write(tmp_path, rows, {"problems": 9}, note)
    assert cli.REPORT.read(tmp_path) == rows
    best = fastest(rows, "EAGLE-3", (EXACT,))
    assert best is not None and best.tokens_per_second == 800
    assert fastest(rows, "tuned draft", (EXACT,)) is None
    lines = [line for line in markdown(rows, "").splitlines() if line.startswith("| EAGLE-3 |")]
    assert [line.split("|")[2].strip() for line in lines] == ["exact N=8", "auto N=4"]
    assert [line.split("|")[5].strip() for line in lines] == ["1.60", ""]
    assert (tmp_path / "drafts.png").stat().st_size > 0


def test_published_milliseconds_are_the_planners_of_today() -> None:
    planned = {one.name: one.planned for one in PROPOSALS}
    for row in cli.REPORT.read(PUBLISHED / "drafts"):
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
    run = Runner(trees, tmp_path / "out", reply, ("--problems", "3"))
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
        assert list(row["tokens"]) == (["0.7", "1"] if n == 8 else ["0", "0.7", "1"])
