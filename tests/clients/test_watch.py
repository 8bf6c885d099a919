"""``sglang-smc watch`` beside a real server: the names that it reads are there."""

import json
import time

import httpx
import pytest
from http_server import Server

from sglang_smc.watch import cli, looks
from sglang_smc.watch.lines import REQUEST_HEADER, lines_of


def test_a_line_tells_what_the_server_does(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0.7}
    before = looks.look(server.url)
    server.post("/generate", text="Sam has 10", sampling_params=sampling)
    (shown,) = looks.between(before, looks.look(server.url))
    assert shown.tokens_per_pass is not None and 1 < shown.tokens_per_pass <= 5
    assert shown.ess is not None and 0.25 <= shown.ess <= 1
    assert (shown.mode, shown.num_particles, shown.num_steps) == ("smc", 4, 4)
    assert shown.free is not None and 0.5 < shown.free <= 1
    assert cli.main([server.url, "--once", "--interval", "0.1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_request_that_runs_has_a_line(server: Server) -> None:
    """Red if it is told under another name, if it counts another's rounds, or stays there."""
    sampling = {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 0.7}
    custom = {"smc": {"mode": "exact", "num_particles": 3}}
    asked = {
        "text": "Sam has 10",
        "rid": "watched-one",
        "stream": True,
        "sampling_params": {**sampling, "custom_params": custom},
    }
    with httpx.stream("POST", server.url + "/generate", json=asked, timeout=60) as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data: {"))
        said = next(events)
        while json.loads(said[6:])["meta_info"]["completion_tokens"] < 40:
            said = next(events)
        now = looks.look(server.url)
        (shown,) = looks.between(now, now)
    (one,) = [request for request in shown.requests if request["rid"] == "watched-one"]
    assert one["output_tokens"] >= 40 and one["rounds"] > 5
    assert one["output_tokens"] == pytest.approx(one["tokens_per_pass"] * one["rounds"])
    assert (one["mode"], one["num_particles"], one["num_steps"]) == ("exact", 3, 4)
    assert one["ess_ratio"] is None and one["resample_rate"] == 0, "it verifies"
    lines = lines_of([shown])
    assert lines[2] == REQUEST_HEADER and any("watched-one" in line for line in lines)
    deadline = time.monotonic() + 30
    while looks.look(server.url)[0].requests:
        assert time.monotonic() < deadline, "it has left, and is still there"
        time.sleep(0.1)
