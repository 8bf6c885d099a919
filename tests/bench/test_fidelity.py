"""The fidelity benchmark's run: what is asked, what is kept, how it resumes and how it refuses."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from demo import FIRST_PROBLEM, blocks
from demo import parse_arguments as demo_arguments
from fidelity import cli, grid
from fidelity.engines import arguments
from fidelity.grid import Cell, cells
from fidelity.measure import MAX_PROBLEMS, WARM_UP, Asker, Reply, Request, grade, request
from fidelity.store import Record, seconds
from pair.task import held_out
from speed_stand_ins import canned_scores, leave_out_what_takes_seconds
from study import BenchError, matching

from sglang_smc.demo.party import FIRST_SHOWN
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

#: The settings that a run of one temperature measures.
SETTINGS = len(cells((0.7,)))
TINY = ("--problems", "6", "--temperatures", "0.7")


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
    info: dict[str, Any] = {"completion_tokens": 3, "finish_reason": {"type": "stop"}, "id": "x"}
    if engine == "smc":
        info |= {
            "spec_smc_num_particles": 8,
            "spec_smc_rounds_ct": 10,
            "spec_smc_resample_ct": 5,
            "spec_smc_ess_mean": 4.0,
            "spec_smc_log_evidence": -1.5,
        }
    return Reply(entry.index, f"#### {number}", [5, entry.index, 1], info)


class Bench:
    """Runs the command with stand-ins, and remembers what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, Request]] = []
        self.started: list[str] = []

    def __call__(self, *arguments: str, last: int = 10**6) -> int:
        """The exit status; the stand-in is interrupted after ``last`` answers."""
        self.asked, self.started = [], []
        budget = [last]

        @contextlib.contextmanager
        def start(engine: str) -> Iterator[Asker]:
            self.started.append(engine)
            yield FakeAsker(engine, self.asked, budget)

        words = [*TINY, "--output-dir", str(self.folder), *arguments]
        return cli.main(words, start, canned_scores)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    leave_out_what_takes_seconds(monkeypatch, cli, tmp_path)
    return Bench(tmp_path / "out")


def test_the_server_takes_every_setting_and_none_is_measured_twice() -> None:
    server, seen = SMCConfig(), set()
    for kind in grid.kinds():
        if kind.smc:
            config = request_config(server, {"smc": kind.smc})
            assert kind.evidence_threshold in (None, config.covering)
            mode = "mixed" if config.mode == "auto" else config.mode
            sizes = (config.num_particles, config.num_steps)
            seen.add((mode, *sizes, config.resample_at, config.covering, config.lag))
    assert len(seen) == sum(kind.engine == "smc" for kind in grid.kinds())
    pure = [kind for kind in grid.kinds() if Cell(kind, 0.7).is_pure_smc]
    assert [kind.evidence_threshold for kind in pure] == [0]


def test_the_engines_differ_by_model_and_smc_alone() -> None:
    target, draft, smc = (arguments(name, Path("p")) for name in ("target", "draft", "smc"))
    assert {key for key in target if target[key] != draft[key]} == {"model_path"}
    assert {**smc, **target} == smc
    assert (smc["speculative_smc_num_particles"], smc["speculative_num_steps"]) == (8, 8)


def test_an_answer_that_was_cut_off_is_wrong_and_one_without_all_tokens_refused() -> None:
    whole = reply(Request(0, held_out(0), {}), "target")
    cut = whole._replace(meta_info={**whole.meta_info, "finish_reason": {"type": "length"}})
    assert grade(whole, part=0, at=1.0).right
    assert not grade(cut, part=0, at=1.0).right
    with pytest.raises(BenchError, match="with 3 tokens, of which 2 came"):
        grade(whole._replace(output_ids=[5, 1]), part=0, at=1.0)


def test_the_demo_asks_other_problems_with_other_seeds() -> None:
    """Whatever a table may be asked for, and the demo asks by default."""
    last = request(cells((0.7,))[0], MAX_PROBLEMS - 1)
    assert last.sampling_params["sampling_seed"] == last.index < FIRST_PROBLEM
    asked = [index for block in blocks(demo_arguments([])) for index in block]
    assert MAX_PROBLEMS <= FIRST_PROBLEM < min(asked)
    assert max(asked) < FIRST_SHOWN
    with pytest.raises(SystemExit):
        cli.parse_arguments(["--problems", str(MAX_PROBLEMS + 1)])


def test_everything_is_measured_and_written(bench: Bench) -> None:
    assert bench() == 0
    assert bench.started == ["target", "draft", "smc"]
    assert len(bench.asked) == 6 * SETTINGS
    for name in cli.OUTPUTS:
        assert (bench.folder / name).stat().st_size > 0
    origin = json.loads((bench.folder / cli.ORIGIN).read_text())
    assert origin["settings"]["problems"] == 6


def test_an_interrupted_run_goes_on(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--only", "smc-*", last=9) == 130
    assert "goes on from here" in capsys.readouterr().err
    first = bench.asked
    assert len(first) == 9
    assert bench("--only", "smc-*") == 0
    again = [(e.index, str(e.sampling_params)) for _, e in first + bench.asked]
    assert len(again) == len(set(again)) == 6 * len(matching(cells((0.7,)), ["smc-*"]))
    assert bench("--only", "smc-*") == 0
    assert (bench.asked, bench.started) == ([], [])
    path = bench.folder / "answers" / "smc-c0-t0.7.jsonl"
    parts = [json.loads(line)["part"] for line in path.read_text().splitlines()[1:]]
    assert parts == [0, 0, 0, 1, 1, 1]


def test_only_a_whole_grid_is_published(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--only", "ar-*", "--publish") == 1
    assert f"{SETTINGS - 2} of {SETTINGS} cells are not complete" in capsys.readouterr().err
    assert not cli.PUBLISHED.exists()
    assert bench("--publish") == 0
    assert {path.name for path in (cli.PUBLISHED / "fidelity").iterdir()} == set(cli.OUTPUTS)


def test_time_of_a_cell_in_parts() -> None:
    record: Callable[..., Record] = lambda part, at: Record(0, True, part, at, [], {})  # noqa: E731
    assert seconds([record(0, 1.0), record(0, 4.0), record(1, 2.5), record(1, 0.5)]) == 6.5
