"""What every study rests on: it goes on where it stopped, and never mixes two measurements."""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import study
from study import BenchError, Log, code_fingerprint, complete, grid_parser, main_of, selected


class Cell(NamedTuple):
    slug: str


CELLS = [Cell("one-a"), Cell("one-b"), Cell("two")]


class Plan:
    """Three cells of three numbers each, the same in every run but for ``code``."""

    def __init__(self, options: argparse.Namespace, code: str = "mine") -> None:
        self.options = options
        folder = options.output_dir
        self.all = {cell: Log(folder / f"{cell.slug}.jsonl", {"code": code}) for cell in CELLS}
        self.mine = [self.all[cell] for cell in selected(CELLS, options.only, look="--list")]

    def logs(self) -> list[Log]:
        return self.mine

    own_logs = logs

    def status(self) -> str:
        return "\n".join(f"{log.path.stem} {len(log.read())}" for log in self.mine)


class Study:
    """The command, and how many numbers its last call has measured."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.measured = folder, 0

    def __call__(self, *arguments: str, last: int = 100, code: str = "mine") -> int:
        """The exit status; measuring is interrupted after ``last`` numbers."""
        parser = grid_parser("x", "A study.", look="--list")
        options = parser.parse_args([*arguments, "--output-dir", str(self.folder)])
        self.measured = 0

        def measure(plan: Plan) -> str:
            for log in plan.mine:
                with log.writing() as append:
                    for number in range(len(log.read()), 3):
                        if self.measured == last:
                            raise KeyboardInterrupt
                        append({"number": number})
                        self.measured += 1
            return "done"

        def run() -> None:
            plan = Plan(options, code)
            complete(plan, lambda: measure(plan), lambda: None)

        return main_of(run, "It goes on.")

    def numbers(self, slug: str) -> list[int]:
        lines = (self.folder / f"{slug}.jsonl").read_text().splitlines()
        return [json.loads(line)["number"] for line in lines[1:]]


@pytest.fixture
def run(tmp_path: Path) -> Study:
    return Study(tmp_path / "out")


@pytest.mark.parametrize("last", [0, 1, 8])
def test_an_interrupted_run_goes_on(run: Study, last: int) -> None:
    assert run(last=last) == 130
    assert run() == 0
    assert run.measured == 9 - last
    assert [run.numbers(cell.slug) for cell in CELLS] == [[0, 1, 2]] * 3
    assert run() == 0
    assert run.measured == 0


@pytest.mark.parametrize("num_bytes", [-1, -9, 5])
def test_a_line_that_a_kill_cut_is_measured_again(run: Study, num_bytes: int) -> None:
    """The header, too."""
    run("--only", "two")
    path = run.folder / "two.jsonl"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert run("--only", "two") == 0
    assert run.numbers("two") == [0, 1, 2]


def test_what_was_measured_otherwise_is_refused(
    run: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--only", "one*")
    assert run("--only", "one-a", code="other") == 1
    assert "code is 'mine' there and 'other' here" in capsys.readouterr().err
    assert run("--only", "two", code="other") == 0  # of which nothing was there
    assert run("--only", "one-a", "--fresh", code="other") == 0
    assert (run.measured, run.numbers("one-a")) == (3, [0, 1, 2])
    assert run("--only", "one-b") == 0
    assert run.measured == 0  # fresh forgets what was selected alone


def test_a_look_changes_nothing(run: Study, capsys: pytest.CaptureFixture[str]) -> None:
    run("--only", "one-a", last=2)
    assert run("--list", "--fresh") == 0
    assert capsys.readouterr().out.splitlines()[-3:] == ["one-a 2", "one-b 0", "two 0"]
    assert run("--only", "three") == 1


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
