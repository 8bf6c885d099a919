"""``sglang-smc view`` beside a real server: the names that it reads are there."""

import pytest
from http_server import Server

from sglang_smc.command import view


def test_a_line_tells_what_the_server_does(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0.7}
    before = view.look(server.url)
    server.post("/generate", text="Sam has 10", sampling_params=sampling)
    (shown,) = view.between(before, view.look(server.url))
    assert shown.tokens_per_pass is not None and 1 < shown.tokens_per_pass <= 5
    assert shown.ess is not None and 0.25 <= shown.ess <= 1
    assert (shown.mode, shown.num_particles, shown.num_steps) == ("smc", 4, 4)
    assert shown.free is not None and 0.5 < shown.free <= 1
    assert view.main([server.url, "--once", "--interval", "0.1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
