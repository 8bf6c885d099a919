"""The frame of the studies: it goes on where it stopped, and never mixes two measurements.

Of the fidelity study, whose frame the others share.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import study
from drafts.run import DraftStudy
from fidelity import scoring
from fidelity.run import Fidelity, cells
from speed_stand_ins import Runner, canned_scores, graded_reply
from steering.run import Steering
from study import BenchError, Log, code_fingerprint, matching

EVERY = cells((0.7,))
WORDS = ("--problems", "6", "--temperatures", "0.7")


def code(name: str) -> Any:
    """A fingerprint, in place of the study's own."""
    return lambda _: {"code": name}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(Fidelity, "fingerprint", code("mine"))
    monkeypatch.setattr(scoring, "score", canned_scores)
    return Runner(Fidelity, tmp_path, monkeypatch, graded_reply, WORDS)


def numbers(run: Runner, slug: str) -> list[int]:
    lines = (run.folder / "answers" / f"{slug}.jsonl").read_text().splitlines()
    return sorted(json.loads(line)["index"] for line in lines[1:])


def test_a_whole_grid_is_measured_written_and_published_and_a_part_never(run: Runner) -> None:
    assert run("--only", "ar-*", "--publish") == 1
    missing = f"{len(EVERY) - 2} of {len(EVERY)} cells are not complete, as {EVERY[2].slug}"
    assert missing in run.said
    assert not run.published()
    assert run("--publish", "--fresh") == 0
    assert run.started == ["target", "draft", "target+draft"]
    assert len(run.asked) == 6 * len(EVERY)
    assert all((run.folder / name).stat().st_size > 0 for name in Fidelity.report.files)
    origin = json.loads((run.folder / "provenance.json").read_text())
    assert origin["settings"]["problems"] == 6
    assert run.published() == set(Fidelity.report.files)


@pytest.mark.parametrize("last", [0, 1, 9])
def test_an_interrupted_run_goes_on(run: Runner, last: int) -> None:
    assert run("--only", "smc-*", last=last) == 130
    assert "goes on from here" in run.said
    first = run.asked
    assert len(first) == last
    assert run("--only", "smc-*") == 0
    again = [str(params) for _, params in first + run.asked]
    assert len(again) == len(set(again)) == 6 * len(matching(EVERY, ["smc-*"]))
    assert run("--only", "smc-*") == 0
    assert (run.asked, run.started) == ([], [])
    assert numbers(run, "smc-c0-t0.7") == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_bytes", [-1, -40, 5])
def test_a_line_that_a_kill_cut_is_measured_again(run: Runner, num_bytes: int) -> None:
    """The header, too."""
    run("--only", "exact-*")
    path = run.folder / "answers" / "exact-t0.7.jsonl"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert run("--only", "exact-*") == 0
    assert numbers(run, "exact-t0.7") == [0, 1, 2, 3, 4, 5]


def test_other_measurements_are_refused(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    run("--only", "ar-*")
    monkeypatch.setattr(Fidelity, "fingerprint", code("other"))
    assert run("--only", "ar-target*") == 1
    assert "code is 'mine' there and 'other' here" in run.said
    assert run.started == []
    assert run("--only", "exact-*") == 0  # of which nothing was there
    assert run("--only", "ar-target*", "--fresh") == 0
    assert (len(run.asked), len(numbers(run, "ar-target-t0.7"))) == (6, 6)
    monkeypatch.setattr(Fidelity, "fingerprint", code("mine"))
    assert run("--only", "ar-draft*") == 0
    assert run.asked == []  # fresh forgets what was selected alone


def test_no_number_is_made_where_an_engine_fails(run: Runner) -> None:
    """Answers that came before are kept, and the row is of a complete cell alone."""

    def refuse(engine: str, index: int, params: dict[str, Any]) -> dict[str, Any]:
        if index == 2:
            raise BenchError("The engine refused it.")
        return graded_reply(engine, index, params)

    run.reply = refuse
    assert run("--only", "ar-target*") == 1
    assert "The engine refused it." in run.said
    assert numbers(run, "ar-target-t0.7") == [3, 4, 5]
    assert not (run.folder / "fidelity.csv").exists()
    run.reply = graded_reply
    assert run("--only", "ar-draft*") == 0
    assert list(run.rows()) == ["AR draft"]


@pytest.mark.parametrize(
    ("kind", "name", "models"),
    [
        (Fidelity, "draft", ["draft"]),
        (Fidelity, "smc", ["target", "draft"]),
        (DraftStudy, "target", ["target"]),
        (DraftStudy, "EAGLE-3", ["target", "eagle3"]),
        (DraftStudy, "n-gram", ["target"]),
        (DraftStudy, "STANDALONE tuned draft", ["target", "tuned"]),
        (Steering, "plain target itself", ["target"]),
        (Steering, "smc draft", ["draft", "draft"]),
        (Steering, "smc target", ["target", "draft"]),
        (Steering, "smc target itself", ["target", "target"]),
    ],
)
def test_engines_are_of_their_models(kind: Any, name: str, models: list[str]) -> None:
    found = kind(kind.parser().parse_args([])).launch(name).arguments
    paths = (found.get(key) for key in ("model_path", "speculative_draft_model_path"))
    assert [Path(path).name for path in paths if path] == models
    is_plain = name.startswith(("target", "draft", "plain"))
    assert ("speculative_algorithm" in found) == (not is_plain)


def test_other_settings_of_any_kind_are_told(tmp_path: Path) -> None:
    log = Log(tmp_path / "deep" / "log.jsonl", {"a": (1, 2)})
    with log.writing():
        pass
    assert log.read() == []
    with pytest.raises(BenchError, match=r"a is \[1, 2\] there and \[1\] here"):
        Log(log.path, {"a": (1,)}).read()


@pytest.mark.parametrize("place", ["kernels/a.py", "sglang_smc/round/deep/a.py"])
def test_changed_code_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(study, "REPOSITORY", tmp_path)
    path = tmp_path / place
    seen = []
    path.parent.mkdir(parents=True)
    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("more.py", "")):
        path.with_name(name).write_text(text)
        assert code_fingerprint() == code_fingerprint()
        seen.append(code_fingerprint()["plugin"])
    assert len(set(seen)) == 3
