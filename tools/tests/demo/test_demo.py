"""The servers of the demo and of the soak: their flags, their answers, and that all end."""

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from pair.task import held_out

from sglang_smc.options.server import SERVER_ARGS_FIELDS
from sglang_smc_tools.demo import chat, cli, serving
from sglang_smc_tools.demo.serving import Launch, ServerError, flags_of, running, smc_arguments


def test_flags_of_smc_exist(tmp_path: Path) -> None:
    known = {"--" + field.replace("_", "-") for field in SERVER_ARGS_FIELDS.values()}
    flags = set(flags_of(smc_arguments(tmp_path, num_particles=8, num_steps=4))[::2])
    assert flags - known == {"--speculative-algorithm", "--speculative-draft-model-path"}


#: It has a process of its own, as SGLang has, and streams an answer in two pieces.
SERVER = """
import http.server, json, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        asked = body["sampling_params"]
        if asked["temperature"] == 9:
            self.wfile.write(b'data: {"error": {"message": "too hot"}}\\n\\n')
            return
        for text, ends in (("It", None), ("It is\\n#### NUMBER", "stop")):
            reason = ends and {"type": ends}
            told = {"text": text, "meta_info": {"finish_reason": reason, "asked": asked}}
            self.wfile.write(f"data: {json.dumps(told)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


LaunchOf = Callable[[str], Launch]


@pytest.fixture
def launch_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LaunchOf:
    """Make `running` start a Python program in place of SGLang."""

    def of(program: str) -> Launch:
        monkeypatch.setattr(serving, "server_command", lambda _: ["-c", program])
        return Launch({}, label="it", log=tmp_path / "log")

    return of


def test_an_answer_is_streamed_and_checked(launch_of: LaunchOf) -> None:
    """Red where pieces are shown twice, or a request has a seed, with which it would not adapt."""
    item = held_out(7)
    launch = launch_of(SERVER.replace("NUMBER", str(item.number)))
    asked = cli.parser().parse_args(["--temperature", "0.5"])
    tokenizer = SimpleNamespace(apply_chat_template=lambda chat, **_: chat[0]["content"])
    pieces: list[str] = []
    with running(launch) as (url,):
        party = cli.Party(launch, url, asked, tokenizer)
        answer = party.ask(7, pieces.append)
        asked.temperature = 9
        with pytest.raises(ServerError, match=r"(?s)it: .*too hot.*The last lines of"):
            party.ask(7)
    assert answer.right and pieces == ["It", f" is\n#### {item.number}"]
    assert 0 < answer.seconds_to_first < answer.seconds
    assert answer.info["asked"] == {"temperature": 0.5, "max_new_tokens": cli.MAX_TOKENS}


class Answering:
    """A party that takes no server, and so many seconds for each of its tokens."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[int] = []

    def ask(self, index: int) -> cli.DemoAnswer:
        self.asked.append(index)
        time.sleep(40 * self.seconds)
        info = {"completion_tokens": 41, "spec_verify_ct": 10}
        return cli.DemoAnswer(True, self.seconds, 40 * self.seconds, info)


def test_both_servers_answer_in_turns_until_the_time_is_up() -> None:
    """Red where one has other problems, a turn is left half, or the time is not kept."""
    options = cli.parser().parse_args(["--requests", "4", "--seconds", "2"])
    parties: Any = Answering(0.002), Answering(0.001)
    began = time.monotonic()
    turns = cli._answer_in_turns(*parties, options)
    assert time.monotonic() - began < 20
    assert sorted(parties[0].asked) == sorted(parties[1].asked)
    count = len(turns[1])
    assert count == len(turns[4]) >= 2
    assert len(set(parties[0].asked)) == count * (cli.ALONE + 4), "no problem comes twice"
    (plain, smc), many = ([*cli.rows_of(size, turns)] for size in (1, 4))
    assert plain["tokens_per_target_pass"] == smc["tokens_per_target_pass"] == 4.0
    mean, low, high = smc["times_plain"]
    assert 1.5 < mean < 2.5 and low < mean < high and "times_plain" not in plain
    assert many[1]["row"] == "SMC exact, 4 at once" and many[1]["problems"] == 4 * count


def test_an_interval_is_that_of_students_t() -> None:
    assert cli.interval_of([2.0, 2.0, 2.0]) == pytest.approx((2.0, 2.0, 2.0))
    mean, low, high = cli.interval_of([1.0, math.e])
    half = 12.71 * math.sqrt(0.5) / math.sqrt(2)
    assert (mean, low, high) == pytest.approx([math.exp(0.5 + x) for x in (0, -half, half)])


CHAT = SERVER.replace(
    SERVER[
        SERVER.index("        asked =") : SERVER.index('        self.wfile.write(b"data: [DONE]')
    ],
    """
        for text in ("Yes", f"Yes, {len(body['input_ids'])}"):
            told = {"text": text, "meta_info": {"completion_tokens": 9, "spec_verify_ct": 4}}
            self.wfile.write(f"data: {json.dumps(told)}\\n\\n".encode())
""",
)


def test_a_chat_reads_all_turns_and_shows_what_they_took(
    launch_of: LaunchOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = iter(["Is it?", "Surely?", ""])
    launch_of(CHAT)
    monkeypatch.setattr("builtins.input", lambda _: next(asked))
    monkeypatch.setattr(chat, "is_current", lambda *_: True)
    monkeypatch.setattr(chat, "install", lambda *_: cli.PAIR / "target")
    assert cli.main(["--real"]) == 0
    said = capsys.readouterr().out
    shown, first, second = (int(told) for told in re.findall(r"Yes, (\d+)\n", said))
    assert second > first + 3 and "Yes, " in said and "YesYes" not in said
    assert shown > first  # it has forgotten the demo's own question, which it answered first
    assert said.index("> Repeat this list") < said.index("Yes") < said.index("What to expect")
    assert len(re.findall(r"\(9 tokens in .* a second, 2\.00 a target pass\)", said)) == 3


class Letters:
    """A tokenizer whose tokens are letters."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: bool) -> str:
        return "".join(message["content"] for message in messages)

    def __call__(self, text: str, **_: bool) -> dict[str, list[str]]:
        return {"input_ids": list(text)}


def test_a_long_chat_forgets_its_oldest_turns() -> None:
    room = chat.TEXT_TOKENS - chat.MAX_TOKENS
    messages = [{"content": letter * (room // 2)} for letter in "abcde"]
    assert chat.read(messages, Letters()) == list("e" * (room // 2))
    assert len(messages) == 1
    assert len(chat.read([{"content": "f" * 2 * room}], Letters())) == room


def test_a_chat_takes_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--real", "--seconds", "3", "--quick"]) == 2
    assert "--seconds, --quick does not go with --real" in capsys.readouterr().err


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["end", "ctrl-c"])
def test_no_process_is_left(launch_of: LaunchOf, error: type[BaseException] | None) -> None:
    with suppress(KeyboardInterrupt), running(launch_of(SERVER)) as (url,):
        child = int(httpx.get(f"{url}/health", trust_env=False).text)
        assert is_alive(child)
        if error:
            raise error
    deadline = time.monotonic() + 600  # against hanging: the kernel ends what is killed
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_a_server_that_dies_shows_its_log(launch_of: LaunchOf) -> None:
    died = pytest.raises(ServerError, match=r"(?s)it ended while starting.*no such model")
    with died, running(launch_of("raise SystemExit('no such model')")):
        pytest.fail("it never came up")
