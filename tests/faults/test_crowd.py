"""The soak in small: a crowd comes at once, and six in ten leave, at all stages of a request."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from soak import cli, verdict

from sglang_smc.demo import serving

pytestmark = pytest.mark.engine

NUMBER, VERIFIED = 125, 24
WARM_UP = 0.2  # the others come at once


@contextlib.contextmanager
def warm_start(command: list[str], output: Any) -> Iterator[Any]:
    """A server that is a copy of an interpreter that waits, in place of a new one."""
    process = warm.start(command[1:], dict(os.environ), output.fileno())
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_hundred_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red for an answer that is wrong, lost or not its seed's, a slot, an open file or a thread.

    So short a run says nothing of memory, and little of how full the pool is, or who is retracted.
    """
    environment = {k: v for k, v in cli.ENVIRONMENT.items() if not k.startswith("MALLOC_")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # to be taken back at the end
    monkeypatch.setattr(cli, "ENVIRONMENT", environment)
    monkeypatch.setattr(serving, "_own_group", warm_start)
    monkeypatch.setattr(verdict, "GROWTH_BYTES", 1 << 30)
    monkeypatch.setattr(verdict, "LEAST_FULL", 0.0)
    options = cli.parse_arguments(
        f"--requests {NUMBER} --crowd {NUMBER} --pause 0 --leave 0.6 --dawdlers 9 --pool 1600 "
        f"--warm-up {WARM_UP} --verify {VERIFIED} --output-dir {tmp_path}".split()
    )
    found, _ = cli.run(options)
    assert [p for p in found.problems if not p.startswith("no request was retracted")] == [], found
    assert found.requests == NUMBER
    assert 0.2 < found.left / NUMBER < 0.65
    assert found.verified == VERIFIED
    assert len(found.growth) >= 3  # the server's processes
