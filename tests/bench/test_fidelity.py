"""The fidelity benchmark's run: what is asked, what is kept, how it resumes and how it refuses."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fidelity import cli, grid
from fidelity.bounding import Bound, Divergence
from fidelity.engines import arguments
from fidelity.grid import Cell, cells
from fidelity.measure import MAX_TOKENS, WARM_UP, Asker, Reply, Request, grade, request
from fidelity.store import Record, seconds
from logs import BenchError, Log
from pair.task import held_out
from results import Interval

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

INTERVAL = Interval(1.0, 0.5, 1.5, 2)
ORIGIN = {"argv": ["x"], "date": "2026-01-01", "git_sha": "abc", "hardware": "a CPU"}
#: The settings that a run of one temperature measures.
SETTINGS = len(cells((0.7,)))
TINY = ("--problems", "6", "--bound-problems", "2", "--temperatures", "0.7")


class FakeAsker:
    """Right at even problems; dies at its ``last``-th answer, as a kill would have it."""

    def __init__(self, engine: str, asked: list[Any], last: list[int]) -> None:
        self.engine, self.asked, self.last = engine, asked, last

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        for entry in requests:
            if entry.index != WARM_UP:
                if self.last[0] == 0:
                    raise KeyboardInterrupt
                self.last[0] -= 1
                self.asked.append((self.engine, entry))
            yield reply(entry, self.engine)


def reply(entry: Request, engine: str) -> Reply:
    number = entry.item.number + entry.index % 2
    info: dict[str, Any] = {"completion_tokens": 41, "finish_reason": {"type": "stop"}, "id": "x"}
    if engine == "smc":
        info |= {
            "spec_smc_num_particles": 8,
            "spec_smc_rounds_ct": 10,
            "spec_smc_resample_ct": 5,
            "spec_smc_ess_mean": 4.0,
            "spec_smc_log_evidence": -1.5,
        }
    return Reply(entry.index, f"#### {number}", info)


class Bench:
    """Runs the command with stand-ins, and remembers what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, Request]] = []
        self.started: list[str] = []
        self.bounded: list[str] = []

    def __call__(self, *arguments: str, last: int = 10**6) -> int:
        """The exit status; the stand-in is interrupted after ``last`` answers."""
        self.asked, self.started, self.bounded = [], [], []
        budget = [last]

        @contextlib.contextmanager
        def start(engine: str) -> Iterator[Asker]:
            self.started.append(engine)
            yield FakeAsker(engine, self.asked, budget)

        return cli.main([*TINY, "--output-dir", str(self.folder), *arguments], start, self.bound())

    def bound(self) -> Bound:
        def bound(todo: Sequence[Cell], problems: int) -> Iterator[tuple[int, Divergence]]:
            for place, cell in reversed(list(enumerate(todo))):
                self.bounded.append(cell.slug)
                yield place, Divergence(None, INTERVAL, INTERVAL, INTERVAL, INTERVAL)

        return bound


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(cli, "PUBLISHED", tmp_path / "published")
    # What takes seconds and has tests of its own.
    monkeypatch.setattr(cli, "plot_rows", lambda _, path, problems: path.write_text("a picture"))
    monkeypatch.setattr(cli, "provenance", lambda _: dict(ORIGIN))
    return Bench(tmp_path / "out")


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Sets the thresholds of the default and of auto, whatever they are tuned to."""

    def choose(default: float, auto: float) -> None:
        monkeypatch.setattr(grid, "EVIDENCE_THRESHOLD", default)
        monkeypatch.setattr(grid, "AUTO_EVIDENCE_THRESHOLD", auto)

    return choose


def test_the_grid_is_complete(thresholds: Callable[[float, float], None]) -> None:
    thresholds(0.3, 0.7)
    slugs = [cell.slug for cell in cells((0.7, 1.0))]
    sizes = [f"n{n}-k{k}" for n in (4, 8, 16) for k in (4, 8)]
    kinds = [
        *("ar-target", "ar-draft", "exact-n1-k8", "exact-n4-k8", "exact-n8-k8"),
        *(f"smc-{at}-{size}" for at in ("block", "token") for size in sizes),
        *("smc-cut-c0.5-n8-k8", "smc-cut-c1-n8-k8", "smc-cut-c0.3-n16-k8"),
        *("mixed-c0.2-n8-k8", "mixed-c0.5-n8-k8", "mixed-c1-n8-k8"),
        *("auto-n8-k8", "smc-default-n8-k8"),
    ]
    assert len(kinds) == 25
    assert sorted(slugs) == sorted(f"{kind}-t{t}" for kind in kinds for t in ("0.7", "1"))


@pytest.mark.parametrize(
    ("default", "auto", "dropped"),
    [
        (0.5, 1.0, {"smc-cut-c0.5-n8-k8", "mixed-c1-n8-k8"}),
        (1.0, 0.2, {"smc-cut-c1-n8-k8", "mixed-c0.2-n8-k8"}),
        (0.3, 0.7, set()),
    ],
)
def test_what_has_a_name_is_left_out(
    thresholds: Callable[[float, float], None], default: float, auto: float, dropped: set[str]
) -> None:
    thresholds(default, auto)
    slugs = {kind.slug for kind in grid.kinds()}
    unnamed = ["smc-cut-c0.5-n8-k8", "smc-cut-c1-n8-k8"]
    unnamed += [f"mixed-c{c:g}-n8-k8" for c in grid.MIXED_THRESHOLDS]
    assert set(unnamed) - slugs == dropped
    assert {"auto-n8-k8", "smc-default-n8-k8"} <= slugs


def test_the_server_takes_every_setting_and_none_is_measured_twice() -> None:
    server = SMCConfig(num_particles=grid.MAX_PARTICLES, num_steps=grid.MAX_STEPS)
    seen = set()
    for kind in grid.kinds():
        if kind.smc:
            config = request_config(server, {"smc": kind.smc})
            assert kind.evidence_threshold in (None, config.covering)
            mode = "mixed" if config.mode == "auto" else config.mode
            sizes = (config.num_particles, config.num_steps)
            seen.add((mode, *sizes, config.resample_at, config.covering))
    assert len(seen) == sum(kind.engine == "smc" for kind in grid.kinds())


def test_cells_of_an_engine_stand_together_and_can_be_picked() -> None:
    engines = [cell.kind.engine for cell in cells((0.7, 1.0))]
    assert engines == sorted(engines, key=["target", "draft", "smc"].index)
    assert [cell.slug for cell in cells((0.7,), ("*token*n16*", "exact-n4*"))] == [
        "exact-n4-k8-t0.7",
        "smc-token-n16-k4-t0.7",
        "smc-token-n16-k8-t0.7",
    ]


def test_a_request_carries_its_cell() -> None:
    (cell,) = cells((0.7,), ("smc-token-n8-k4*",))
    assert request(cell, 3).sampling_params == {
        "temperature": 0.7,
        "max_new_tokens": MAX_TOKENS,
        "sampling_seed": 3,
        "custom_params": {
            "smc": {
                "mode": "smc",
                "num_particles": 8,
                "num_steps": 4,
                "resample_at": "token",
                "evidence_threshold": 0,
            }
        },
    }
    (cell,) = cells((0.7,), ("ar-target*",))
    assert "custom_params" not in request(cell, 3).sampling_params


@pytest.mark.parametrize(
    ("pattern", "asked"),
    [
        ("exact-n4*", {"mode": "exact", "num_particles": 4, "num_steps": 8}),
        ("auto*", {"mode": "auto", "num_particles": 8, "num_steps": 8}),
        ("smc-default*", {"num_particles": 8, "num_steps": 8}),
    ],
)
def test_a_cell_asks_for_nothing_that_is_not_its_own(pattern: str, asked: dict[str, Any]) -> None:
    (cell,) = cells((0.7,), (pattern,))
    assert cell.kind.smc == asked
    assert not cell.is_pure_smc


def test_pure_smc_cuts_nothing_for_its_evidence() -> None:
    pure = [kind for kind in grid.kinds() if Cell(kind, 0.7).is_pure_smc]
    assert len(pure) == 12
    assert {kind.evidence_threshold for kind in pure} == {0}


def test_the_engines_differ_by_model_and_smc_alone() -> None:
    target, draft, smc = (arguments(name, Path("p")) for name in ("target", "draft", "smc"))
    assert {key for key in target if target[key] != draft[key]} == {"model_path"}
    assert {**smc, **target} == smc
    assert (smc["speculative_smc_num_particles"], smc["speculative_num_steps"]) == (16, 8)


def test_an_answer_that_was_cut_off_is_wrong() -> None:
    whole = reply(Request(0, held_out(0), {}), "target")
    cut = whole._replace(meta_info={**whole.meta_info, "finish_reason": {"type": "length"}})
    assert grade(whole, part=0, at=1.0).right
    assert not grade(cut, part=0, at=1.0).right


def test_what_is_kept_of_an_answer() -> None:
    record = grade(reply(Request(1, held_out(1), {}), "smc"), part=2, at=1.23456)
    assert (record.index, record.right, record.part, record.at) == (1, False, 2, 1.235)
    assert record.info["spec_verify_ct"] == 10  # each round is a pass
    assert "id" not in record.info and "finish_reason" not in record.info


def test_everything_is_measured_and_written(bench: Bench) -> None:
    assert bench() == 0
    assert bench.started == ["target", "draft", "smc"]
    assert len(bench.asked) == 6 * SETTINGS
    assert len(bench.bounded) == 12
    for name in cli.OUTPUTS:
        assert (bench.folder / name).stat().st_size > 0
    origin = json.loads((bench.folder / cli.ORIGIN).read_text())
    assert origin["settings"]["problems"] == 6
    assert "argv" not in origin


def test_a_complete_run_asks_nothing_again(bench: Bench) -> None:
    bench()
    assert bench() == 0
    assert (bench.asked, bench.started, bench.bounded) == ([], [], [])


def test_an_interrupted_run_goes_on(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--only", "smc-*", last=9) == 130
    assert "goes on from here" in capsys.readouterr().err
    first = bench.asked
    assert len(first) == 9
    assert bench("--only", "smc-*") == 0
    again = [(e.index, str(e.sampling_params)) for _, e in first + bench.asked]
    assert len(again) == len(set(again)) == 6 * len(cells((0.7,), ("smc-*",)))
    path = bench.folder / "answers" / "smc-block-n4-k8-t0.7.jsonl"
    parts = [json.loads(line)["part"] for line in path.read_text().splitlines()[1:]]
    assert parts == [0, 0, 0, 1, 1, 1]


def test_half_a_line_is_asked_again(bench: Bench) -> None:
    bench("--only", "ar-target*", last=3)
    path = bench.folder / "answers" / "ar-target-t0.7.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert bench("--only", "ar-target*") == 0
    assert [entry.index for _, entry in bench.asked] == [2, 3, 4, 5]
    indices = [json.loads(line)["index"] for line in path.read_text().splitlines()[1:]]
    assert sorted(indices) == list(range(6))


def test_a_file_without_a_whole_header_begins_anew(bench: Bench) -> None:
    path = bench.folder / "answers" / "ar-target-t0.7.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1, "plug')
    assert bench("--only", "ar-target*") == 0
    assert len(bench.asked) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--problems", "7"), "problems is 6 there and 7 here"),
        (("--bound-problems", "3"), "bound_problems is 2 there and 3 here"),
    ],
)
def test_other_settings_are_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str], change: tuple[str, str], message: str
) -> None:
    only = ("--only", "smc-block-n4-k4*")
    bench(*only)
    assert bench(*only, *change) == 1
    error = capsys.readouterr().err
    assert message in error and "--fresh" in error and "--output-dir" in error
    assert bench.started == []


def test_other_code_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--only", "ar-target*")
    monkeypatch.setattr(cli, "fingerprint", lambda *_: {"plugin": "other"})
    assert bench("--only", "ar-target*") == 1
    assert "and 'other' here" in capsys.readouterr().err


def test_fresh_forgets_the_selected_cells_only(bench: Bench) -> None:
    bench("--only", "ar-*")
    assert bench("--only", "ar-draft*", "--problems", "7", "--fresh") == 0
    assert [engine for engine, _ in bench.asked] == ["draft"] * 7
    assert bench("--only", "ar-target*") == 0
    assert bench.asked == []


def test_list_starts_nothing(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench("--only", "ar-target*", last=2)
    capsys.readouterr()
    assert bench("--list", "--fresh") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ar-target-t0.7", "2", "of", "6", "answered"]
    assert len(lines) == SETTINGS
    assert bench.started == []


def test_the_report_has_cells_of_earlier_runs(bench: Bench) -> None:
    bench("--only", "ar-target*")
    bench("--only", "exact-n1*")
    assert "| AR target |" in (bench.folder / cli.TABLE).read_text()


def test_only_a_whole_grid_is_published(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--only", "ar-*", "--publish") == 1
    assert f"{SETTINGS - 2} of {SETTINGS} cells are not complete" in capsys.readouterr().err
    assert not cli.PUBLISHED.exists()
    assert bench("--publish") == 0
    assert {path.name for path in cli.PUBLISHED.iterdir()} == set(cli.OUTPUTS)


def test_no_such_cell(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--only", "nothing", "smc-n4*") == 1
    assert "No cell matches --only nothing smc-n4*;" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--problems", "0"), ("--bound-problems", "1")])
def test_bad_values_are_refused(bench: Bench, arguments: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench(*arguments)


def test_no_bounds_where_none_are_wanted(bench: Bench) -> None:
    assert bench("--bound-problems", "0", "--only", "smc-block*") == 0
    assert bench.bounded == []


def test_what_an_engine_refuses_is_said(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> Iterator[Reply]:
        raise BenchError("The engine refused it")

    monkeypatch.setattr(FakeAsker, "ask", refuse)
    assert bench() == 1
    assert "The engine refused it" in capsys.readouterr().err


def test_time_of_a_cell_in_parts() -> None:
    record: Callable[..., Record] = lambda part, at: Record(0, True, part, at, {})  # noqa: E731
    assert seconds([record(0, 1.0), record(0, 4.0), record(1, 2.5), record(1, 0.5)]) == 6.5


def test_a_log_without_entries_is_empty(tmp_path: Path) -> None:
    log = Log(tmp_path / "deep" / "log.jsonl", {"a": (1, 2)})
    assert log.read() == []
    with log.writing():
        pass
    assert log.read() == []
    with pytest.raises(BenchError, match=r"a is \[1, 2\] there and \[1\] here"):
        Log(log.path, {"a": (1,)}).read()
