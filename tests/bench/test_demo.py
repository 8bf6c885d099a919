"""The demo's numbers from canned answers, what its words may say, what it asks, its servers."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import demo
import pytest
from comparison import Contender, Run, Speed, Turn, conclusions, plain, row_of, tables
from demo import FIRST_PROBLEM, blocks, contenders, launches, parse_arguments
from plots import plot_rows
from results import Interval, wilson

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SERVER_ARGS_FIELDS, SMCConfig
from sglang_smc.tools.demo import serving
from sglang_smc.tools.demo.chat import Answer
from sglang_smc.tools.demo.serving import (
    Launch,
    Server,
    ServerError,
    read_records,
    running,
    smc_flags,
    wait_for_records,
)

SMC_INFO = {
    "completion_tokens": 41,
    "spec_verify_ct": 10,
    "spec_smc_num_particles": 8,
    "spec_smc_rounds_ct": 10,
    "spec_smc_resample_ct": 5,
    "spec_smc_ess_mean": 4.0,
}
NAMES = ("target", "smc", "auto", "exact", "standalone", "draft")


def run_of(contender: Contender, info: dict[str, Any], seconds: list[float]) -> Run:
    """One answer of each turn's seconds alone, the same two at a time; all but the first right."""
    run = Run(contender)
    for turns, size in ((run.alone, 1), (run.crowd, 2)):
        for spent in seconds:
            first = len(run.answers)
            answers = [
                Answer(i, f"id{i}", "#### 1", i > 0, "stop", seconds_to_first=0.1, seconds=spent)
                for i in range(first, first + size)
            ]
            turns.append(Turn(answers, spent))
    run.infos = {answer.request_id: info for answer in run.answers}
    return run


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a release on which SGLang's own speculation runs wherever ours does."""
    monkeypatch.setattr(demo, "has_standalone", lambda: True)


@pytest.fixture
def reference() -> Run:
    return run_of(contenders(parse_arguments([]))[0], {"completion_tokens": 41}, [1.0, 2.0, 4.0])


def test_a_row(reference: Run) -> None:
    smc = Contender("SMC", "smc", "smc", weighs=True)
    row = row_of(run_of(smc, SMC_INFO, [0.5, 1.0, 2.0]), reference)
    assert row.accuracy == wilson(8, 9)
    assert row.alone.to_ar == pytest.approx((2, 2, 2, 3))  # what both have is taken out
    assert (row.alone.n, row.crowd.n) == (3, 6)
    assert row.alone.tokens_per_second == pytest.approx(3 * 41 / 3.5)
    assert row.crowd.tokens_per_second == pytest.approx(6 * 41 / 3.5)
    assert (row.tokens_per_target_pass, row.ess_share, row.resample_rate) == (4.0, 0.5, 0.5)
    plain_row = row_of(reference, reference)
    assert (plain_row.alone.to_ar, plain_row.tokens_per_target_pass) == (None, 1.0)


def test_a_row_that_answered_fewer_is_held_against_the_same_problems(reference: Run) -> None:
    draft = Contender("AR, draft", "draft", "draft")
    row = row_of(run_of(draft, {"completion_tokens": 41}, [0.5, 1.0]), reference)
    assert row.crowd.to_ar is not None
    assert (row.crowd.to_ar.mean, row.crowd.to_ar.n) == (pytest.approx(2), 2)
    assert row.tokens_per_target_pass is None  # it has no target
    auto = row_of(run_of(Contender("SMC, auto", "auto", "smc"), SMC_INFO, [1.0]), reference)
    assert (auto.ess_share, auto.resample_rate) == (None, None)  # it keeps no population


@pytest.mark.parametrize(
    ("low", "high", "says"), [(1.1, 1.4, "faster"), (0.6, 0.9, "slower"), (0.9, 1.3, "no diff")]
)
def test_words_follow_from_the_interval(reference: Run, low: float, high: float, says: str) -> None:
    speed = Speed(1.0, Interval(1.2, low, high, 4), 1.0, 1.0, 4)
    smc = row_of(run_of(Contender("SMC", "smc", "smc"), SMC_INFO, [1.0]), reference)
    lines = conclusions(replace(smc, alone=speed, crowd=speed), 8).splitlines()
    assert len(lines) == 2
    assert all(line.split(": ")[-1].startswith(says) for line in lines)


def test_it_ends_with_tables_a_picture_and_json(reference: Run, tmp_path: Path) -> None:
    """Five minutes of answers must not end in a picture that cannot be drawn."""
    found = contenders(parse_arguments([]))
    rows = [row_of(run_of(c, SMC_INFO, [1.0, 2.0]), reference) for c in found]
    plot_rows(rows, tmp_path / "it.png", title="x", concurrency=8)
    assert (tmp_path / "it.png").stat().st_size > 0
    assert "8 at a time" in tables(rows, 8)
    assert plain(rows[0])["accuracy"]["n"] == 6


def test_one_server_takes_every_mode() -> None:
    options = parse_arguments(["--resample-at", "token"])
    asked = {c.slug: c.smc for c in contenders(options) if c.server == "smc"}
    configs = {slug: request_config(SMCConfig(), {"smc": smc}) for slug, smc in asked.items()}
    assert {slug: config.mode for slug, config in configs.items()} == {
        slug: slug for slug in ("smc", "auto", "exact")
    }
    assert configs["smc"].resample_at == "token"


def test_servers_differ_by_smc_or_the_model_alone() -> None:
    smc, target, standalone, draft = launches(parse_arguments(["--pair", "p"])).values()
    for other in (smc, standalone, draft):
        assert other.flags[: len(target.flags)] == target.flags
    models = [one.model.name for one in (smc, target, standalone, draft)]
    assert models == ["target", "target", "target", "draft"]


@pytest.mark.parametrize("problems", [1, 5, 128])
def test_no_problem_is_asked_twice(problems: int) -> None:
    options = parse_arguments(["--problems", str(problems), "--one-user", "3"])
    asked = list(chain.from_iterable(blocks(options)))
    assert asked == list(range(FIRST_PROBLEM + 3, FIRST_PROBLEM + 3 + problems))


# --- Its servers, with a stand-in


def test_smc_flags_exist(tmp_path: Path) -> None:
    known = {"--" + field.replace("_", "-") for field in SERVER_ARGS_FIELDS.values()}
    command = smc_flags(tmp_path, num_particles=8, num_steps=4)
    flags = {word for word in command if word.startswith("--")}
    assert flags - known == {"--speculative-algorithm", "--speculative-draft-model-path"}


def test_records_are_of_all_files_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    lines = {key: f'{{"id": "{key}", "request_parameters": "{{}}", "n": 1}}\n' for key in "abc"}
    (tmp_path / "10.log").write_text(lines["a"] + lines["b"])
    (tmp_path / "11.log").write_text(lines["c"] + '{"id": "d", ')  # half a line
    assert read_records(tmp_path) == {key: {"id": key, "n": 1} for key in "abc"}

    server = Server("http://nowhere", tmp_path)
    assert wait_for_records(server, ["a"]).keys() == {"a"}
    with pytest.raises(ServerError, match="no record of 1 of 2"):
        wait_for_records(server, ["a", "z"], timeout=0.0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make `running` start a Python program in place of SGLang."""

    def use(program: str) -> None:
        monkeypatch.setattr(
            serving,
            "server_command",
            lambda _, port, __: [sys.executable, "-c", program, str(port)],
        )

    return use


SERVE = """
import http.server, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks processes up in /proc")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["end", "ctrl-c"])
def test_no_process_is_left(
    stand_in: Callable[[str], None], tmp_path: Path, error: type[BaseException] | None
) -> None:
    import httpx

    stand_in(SERVE)
    try:
        with running(Launch("it", Path("m"), tmp_path / "log", 1)) as (server,):
            child = int(httpx.get(f"{server.url}/health", trust_env=False).text)
            assert is_alive(child)
            assert server.records.is_dir()
            if error:
                raise error
    except KeyboardInterrupt:
        pass
    deadline = time.monotonic() + 600  # against hanging: the kernel ends what is killed
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
    assert not server.records.exists()


def test_a_server_that_dies_shows_its_log(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in("raise SystemExit('no such model')")
    with (
        pytest.raises(ServerError, match=r"(?s)it ended while starting.*no such model"),
        running(Launch("it", Path("m"), tmp_path / "log", 1)),
    ):
        pytest.fail("it never came up")
