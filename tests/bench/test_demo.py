"""The servers of the demo and of the soak: their flags, their answers, and that all end."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pair.task import held_out

from sglang_smc.options.server import SERVER_ARGS_FIELDS
from sglang_smc.tools.demo import cli, serving
from sglang_smc.tools.demo.serving import Launch, ServerError, flags_of, running, smc_arguments


def test_flags_of_smc_exist(tmp_path: Path) -> None:
    known = {"--" + field.replace("_", "-") for field in SERVER_ARGS_FIELDS.values()}
    flags = set(flags_of(smc_arguments(tmp_path, num_particles=8, num_steps=4))[::2])
    assert flags - known == {"--speculative-algorithm", "--speculative-draft-model-path"}


STREAM = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        asked = body["sampling_params"]
        if asked["custom_params"]["smc"]["mode"] == "wrong":
            self.wfile.write(b'data: {"error": {"message": "no such mode"}}\\n\\n')
            return
        for text, ends in (("It", None), (f"It is\\n#### {asked['sampling_seed']}", "stop")):
            reason = ends and {"type": ends}
            told = {"text": text, "meta_info": {"finish_reason": reason, "asked": asked}}
            self.wfile.write(f"data: {json.dumps(told)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_an_answer_is_streamed_and_checked(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    """Red where pieces are shown twice, or a seed or a mode does not arrive."""
    stand_in(STREAM)
    item = held_out(7)
    asked = cli.parser().parse_args(["--seed", str(item.number - 7)])
    launch, tokenizer = Launch({}, label="it", log=tmp_path / "log"), SimpleNamespace()
    tokenizer.apply_chat_template = lambda chat, **_: chat[0]["content"]
    pieces: list[str] = []
    with running(launch) as (url,):
        party = cli.Party(launch, url, asked, tokenizer)
        answer = party.ask(7, {"mode": "auto"}, pieces.append)
        with pytest.raises(ServerError, match=r"(?s)it: .*no such mode.*The last lines of"):
            party.ask(7, {"mode": "wrong"})
    assert answer.right and pieces == ["It", f" is\n#### {item.number}"]
    assert 0 < answer.seconds_to_first < answer.seconds
    assert answer.info["asked"]["custom_params"] == {"smc": {"mode": "auto"}}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make `running` start a Python program in place of SGLang."""

    def use(program: str) -> None:
        monkeypatch.setattr(serving, "server_command", lambda _: ["-c", program])

    return use


SERVE = """
import http.server, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["end", "ctrl-c"])
def test_no_process_is_left(
    stand_in: Callable[[str], None], tmp_path: Path, error: type[BaseException] | None
) -> None:
    import httpx

    stand_in(SERVE)
    try:
        with running(Launch({}, label="it", log=tmp_path / "log")) as (url,):
            child = int(httpx.get(f"{url}/health", trust_env=False).text)
            assert is_alive(child)
            if error:
                raise error
    except KeyboardInterrupt:
        pass
    deadline = time.monotonic() + 600  # against hanging: the kernel ends what is killed
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_a_server_that_dies_shows_its_log(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in("raise SystemExit('no such model')")
    with (
        pytest.raises(ServerError, match=r"(?s)it ended while starting.*no such model"),
        running(Launch({}, label="it", log=tmp_path / "log")),
    ):
        pytest.fail("it never came up")
