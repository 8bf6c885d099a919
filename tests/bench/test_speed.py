"""The speed benchmark's run: who is asked what, how it resumes, how it refuses."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from speed import cli
from speed.grid import AR, BLOCK, CHAIN, TREE, System
from speed.measure import WARM_UP_TOKENS
from speed.remote import Asker, EngineError, RemoteEngine, Work, end_group, reason
from speed_stand_ins import FakeEngine, leave_out_what_takes_seconds

QUICK = ("--preset", "cpu", "--quick")


class Bench:
    """Runs the command with stand-ins, and remembers what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, Work]] = []
        self.started: list[str] = []
        self.refuses: set[str] = set()
        self.breaks_at: int | None = None

    def __call__(self, *arguments: str, last: int = 10**6) -> int:
        """The exit status; the stand-ins are interrupted after ``last`` answers."""
        self.asked, self.started, budget = [], [], [last]

        @contextlib.contextmanager
        def start(system: System) -> Iterator[Asker]:
            self.started.append(system.slug)
            if system.family in self.refuses:
                raise EngineError("ValueError: no such backend")
            breaks_at = self.breaks_at if system.family == BLOCK else None
            yield FakeEngine(system, self.asked, budget, breaks_at)

        return cli.main([*arguments, "--output-dir", str(self.folder)], start)

    def counted(self) -> list[tuple[str, Work]]:
        """What was asked but for warm-ups."""
        tokens = WARM_UP_TOKENS
        return [(s, w) for s, w in self.asked if w.params[0]["max_new_tokens"] != tokens]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    leave_out_what_takes_seconds(monkeypatch, cli, tmp_path)
    device = {"name": "x", "bandwidth": 1e9, "flops": 1e12, "capacity": 1e9}

    def measure(_: object, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(device))

    monkeypatch.setattr(cli, "measure_machine", measure)
    return Bench(tmp_path / "out")


def test_every_cell_is_measured_in_turns_with_plain_decoding(bench: Bench) -> None:
    assert bench(*QUICK) == 0
    assert bench.started[0] == "ar"
    ours = [(slug, w) for slug, w in bench.counted() if slug in ("ar", "smc-block-n4-k4")]
    at = next(i for i, (slug, _) in enumerate(ours) if slug != "ar")
    assert [slug for slug, _ in ours[at - 1 : at + 3]] == ["ar", "smc-block-n4-k4"] * 2
    assert ours[at - 1][1] == ours[at][1]
    for name in cli.REPORT.files:
        assert (bench.folder / "cpu-quick" / name).stat().st_size > 0
    origin = json.loads((bench.folder / "cpu-quick" / "provenance.json").read_text())
    assert origin["settings"]["weights"] == "dummy"


def test_where_one_engine_fits_plain_decoding_stands_around_the_others(bench: Bench) -> None:
    only = ("--only", "smc-block-n8-k8*", "smc-exact-n8*", "--batch", "1", "--prompt", "256")
    assert bench("--preset", "h200-70b", *only) == 0
    assert bench.started == ["ar", "smc-block-n8-k8", "smc-exact-n8-k8", "ar"]
    assert [slug for slug, _ in bench.counted()] == (
        ["ar"] * 3 + ["smc-block-n8-k8"] * 3 + ["smc-exact-n8-k8"] * 3 + ["ar"] * 3
    )


def test_an_interrupted_run_goes_on(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*QUICK, "--only", "smc-*", last=7) == 130
    assert "goes on from here" in capsys.readouterr().err
    first = bench.counted()
    assert bench(*QUICK, "--only", "smc-*") == 0
    ours = [(slug, str(w)) for slug, w in first + bench.counted() if slug != "ar"]
    assert len(ours) == len(set(ours)) == 6
    assert bench(*QUICK, "--only", "smc-*") == 0
    assert (bench.asked, bench.started) == ([], [])
    assert bench(*QUICK, "--only", "smc-block*", "--repeats", "4") == 0
    assert [slug for slug, _ in bench.counted()] == ["ar", "smc-block-n4-k4"] * 2


def test_a_call_that_is_out_of_time_begins_nothing_new(bench: Bench) -> None:
    assert bench(*QUICK, "--minutes", "0") == 1  # and has nothing to report
    assert bench.counted() == []
    only = ("--only", "smc-block-n8-k8*", "--batch", "1", "--prompt", "256")
    assert bench("--preset", "h200-70b", *only, "--minutes", "0") == 0
    assert bench.started == ["ar", "ar"]  # around what would have been between


def test_what_does_not_start_is_written_down_with_its_reason(bench: Bench) -> None:
    bench.refuses = {CHAIN, TREE}
    assert bench(*QUICK) == 0
    assert {"smc-block-n4-k4", "ngram"} <= set(bench.started)
    table = (bench.folder / "cpu-quick" / "speed.md").read_text()
    assert "STANDALONE chain: not run here: ValueError: no such backend" in table
    assert "no such backend" in (bench.folder / "cpu-quick" / "speed.csv").read_text()
    assert bench(*QUICK) == 0
    assert bench.started == []  # it would say the same again
    assert bench(*QUICK, "--fresh", "--only", "standalone-chain*") == 0
    assert bench.started == ["ar", "standalone-chain"]


def test_a_cell_that_kills_its_engine_costs_itself_alone(bench: Bench) -> None:
    bench.breaks_at = 1
    assert bench("--preset", "cpu", "--only", "smc-block-n4-k4*") == 0
    assert bench.started == ["ar", "smc-block-n4-k4", "smc-block-n4-k4"]
    text = (bench.folder / "cpu" / "speed.md").read_text()
    assert "SMC block N=4 K=4: not run here: OutOfMemoryError: too large" in text
    assert [len(w.prompts) for slug, w in bench.counted() if slug != "ar"] == [8, 8, 8]


def test_a_failure_of_plain_decoding_is_not_blamed_on_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(self: FakeEngine, _: Work) -> Any:
        raise EngineError("it died")

    monkeypatch.setattr(FakeEngine, "ask", die)
    bench.refuses = {AR}
    assert bench(*QUICK, "--only", "smc*") == 1
    assert "no such backend" in capsys.readouterr().err
    bench.refuses = set()
    monkeypatch.setattr(
        FakeEngine, "ask", lambda self, w: die(self, w) if self.system.family == AR else None
    )
    assert bench(*QUICK, "--only", "smc*") == 1
    assert "Plain decoding failed" in capsys.readouterr().err
    assert not list((bench.folder / "cpu-quick" / "cells").glob("smc*"))


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("x\nValueError: no\nlater\n", "ValueError: no"),
        (
            "ImportError: \n\n[kernel] none\n- ModuleNotFoundError: x\n",
            "ImportError: [kernel] none",
        ),
        ("", "The engine ended without an error message; its last words: it said nothing"),
    ],
)
def test_the_reason_is_the_engines_own_error(log: str, said: str) -> None:
    assert reason(log) == said


def test_a_child_that_dies_is_an_engine_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("RuntimeError: gone\n")
    command = [sys.executable, "-c", "print(input())"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    try:
        engine = RemoteEngine(process, log)
        assert engine.exchange({"a": 1}) == {"a": 1}
        process.wait()
        with pytest.raises(EngineError, match="RuntimeError: gone"):
            engine.exchange({"a": 2})
    finally:
        end_group(process)
