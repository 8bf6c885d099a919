"""The servers of the demo and of the soak: their flags, their records, and that all end."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_smc.options.server import SERVER_ARGS_FIELDS
from sglang_smc.tools.demo import serving
from sglang_smc.tools.demo.serving import (
    Launch,
    Server,
    ServerError,
    read_records,
    running,
    smc_flags,
    wait_for_records,
)


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
