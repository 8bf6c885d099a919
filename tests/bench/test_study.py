"""What every study rests on: it goes on where it stopped, and never mixes two measurements.

Of the fidelity study, whose frame the others share.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import study
from answers import Reply, Request
from drafts.run import Drafts
from fidelity.grid import cells
from fidelity.run import Fidelity
from speed_stand_ins import Runner, canned_scores, graded_reply, leave_out_what_takes_seconds
from steering.run import Steering
from study import BenchError, Log, code_fingerprint, matching
from trees import Trees

EVERY = cells((0.7,))
WORDS = ("--problems", "6", "--temperatures", "0.7")


def code(name: str) -> Any:
    """A fingerprint, in place of the study's own."""
    return lambda _: {"code": name}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    leave_out_what_takes_seconds(monkeypatch, Fidelity, tmp_path)
    monkeypatch.setattr(Fidelity, "fingerprint", code("mine"))
    return Runner(Fidelity, tmp_path / "out", graded_reply, WORDS, score=canned_scores)


def numbers(run: Runner, slug: str, folder: str = "answers") -> list[int]:
    lines = (run.folder / folder / f"{slug}.jsonl").read_text().splitlines()
    return sorted(json.loads(line)["index"] for line in lines[1:])


def test_a_whole_grid_is_measured_written_and_published_and_a_part_never(run: Runner) -> None:
    assert run("--only", "ar-*", "--publish") == 1
    missing = f"{len(EVERY) - 2} of {len(EVERY)} cells are not complete, as {EVERY[2].slug}"
    assert missing in run.said
    assert not run.published()
    assert run("--publish", "--fresh") == 0
    assert run.started == ["target", "draft", "smc"]
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
    again = [(one.index, str(one.sampling_params)) for _, one in first + run.asked]
    assert len(again) == len(set(again)) == 6 * len(matching(EVERY, ["smc-*"]))
    assert run("--only", "smc-*") == 0
    assert (run.asked, run.started) == ([], [])
    assert numbers(run, "smc-c0-t0.7") == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("folder", ["answers", "scores"])
@pytest.mark.parametrize("num_bytes", [-1, -40, 5])
def test_a_line_that_a_kill_cut_is_measured_again(run: Runner, num_bytes: int, folder: str) -> None:
    """The header, too."""
    run("--only", "exact-*")
    path = run.folder / folder / "exact-t0.7.jsonl"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert run("--only", "exact-*") == 0
    assert numbers(run, "exact-t0.7", folder) == [0, 1, 2, 3, 4, 5]


def test_what_was_measured_otherwise_is_refused(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    def refuse(engine: str, entry: Request) -> Reply:
        if entry.index == 2:
            raise BenchError("The engine refused it.")
        return graded_reply(engine, entry)

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
        (Fidelity, "target", ["target"]),
        (Fidelity, "draft", ["draft"]),
        (Fidelity, "smc", ["target", "draft"]),
        (Drafts, "target", ["target"]),
        (Drafts, "EAGLE-3", ["target", "eagle3"]),
        (Drafts, "n-gram", ["target"]),
        (Drafts, "STANDALONE tuned draft", ["target", "tuned"]),
        (Steering, "plain target itself", ["target"]),
        (Steering, "smc draft", ["draft", "draft"]),
        (Steering, "smc target", ["target", "draft"]),
        (Steering, "smc target itself", ["target", "target"]),
        (Trees, "SMC with the EAGLE-3 head", ["target", "eagle3"]),
    ],
)
def test_engines_are_of_their_models_and_end(
    monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, models: list[str]
) -> None:
    """And know nothing of earlier answers, which n-gram matches would find."""
    seen: list[Any] = []

    def engine(**keywords: Any) -> Any:
        paths = (keywords.get(key) for key in ("model_path", "speculative_draft_model_path"))
        seen.append([Path(path).name for path in paths if path])
        is_plain = name.startswith(("target", "draft", "plain"))
        assert ("speculative_algorithm" in keywords) == (not is_plain)
        manager, loop = SimpleNamespace(tokenizer=None), SimpleNamespace()
        done = {"flush_cache": "flushed", "shutdown": "ended"}
        told = {call: lambda word=word: seen.append(word) for call, word in done.items()}
        return SimpleNamespace(tokenizer_manager=manager, loop=loop, **told)

    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=engine))
    with kind(kind.parser().parse_args([])).running(name) as asker:
        assert list(asker.ask([])) == []
    assert seen == [models, "flushed", "ended"]


def test_other_settings_of_any_kind_are_told(tmp_path: Path) -> None:
    log = Log(tmp_path / "deep" / "log.jsonl", {"a": (1, 2)})
    with log.writing():
        pass
    assert log.read() == []
    with pytest.raises(BenchError, match=r"a is \[1, 2\] there and \[1\] here"):
        Log(log.path, {"a": (1,)}).read()


@pytest.mark.parametrize("place", ["kernels/a.py", "sglang_smc/round/deep/a.py"])
def test_any_change_of_the_code_is_another_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(study, "REPOSITORY", tmp_path)
    path, seen = tmp_path / place, []
    path.parent.mkdir(parents=True)
    for name, text in (("a.py", "x = 1\n"), ("a.py", "x = 2\n"), ("more.py", "")):
        path.with_name(name).write_text(text)
        assert code_fingerprint() == code_fingerprint()
        seen.append(code_fingerprint()["plugin"])
    assert len(set(seen)) == 3
