"""Expected tokens of rounds, by rule: it runs, and a target that drafts for itself keeps all."""

from pathlib import Path

import pytest
from verifier import cells, run, trees
from verifier.cells import VerifierCell


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts and texts are of few tokens; a third pair drafts by the target itself."""
    monkeypatch.setattr(trees, "ANSWER_TOKENS", 10)
    monkeypatch.setattr(trees, "NUM_TEXTS", 2)
    monkeypatch.setattr(cells, "SIZES", ((2, 3),))
    monkeypatch.setattr(cells, "TEMPERATURES", (0.7,))
    monkeypatch.setitem(cells.PAIRS, "same", ("target", "target"))


def test_it_writes_a_line_for_each_cell(
    short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red where a rule names a constant that is gone, or a model does not load."""
    asked = ["--only", "draft-*-q0.7", "head-*-q0.7", "same-*-q0.7", "--contexts", "2"]
    assert run.main([*asked, "--output-dir", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1].partition("-")[0] for row in rows] == ["draft", "head", "same"]
    assert (tmp_path / "verifier.md").read_text().splitlines()[-1] == rows[-1]


def test_a_target_that_drafts_for_itself_keeps_all(short: None) -> None:
    cell = VerifierCell(
        "same", num_particles=1, num_steps=3, temperature=0.7, draft_temperature=0.7
    )
    (context,) = trees.contexts_of("same", 1, 0.7)
    found = trees.expected_of(cell, context, seed=0)
    for name in ("one chain", "shares by bins", "bound", "nodes"):
        assert found[name] == pytest.approx(4.0, abs=1e-3), name
