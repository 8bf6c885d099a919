"""A copy of a waiting interpreter is what a new one would be, had it imported SGLang."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.engine

TELL = """
import os, sys, threading
from sglang.srt import plugins
pipe.send({
    "pid": os.getpid(), "parent": os.getppid(), "folder": os.getcwd(),
    "variable": os.environ.get("SGLANG_SMC_SAMPLE"), "test": os.environ.get("PYTEST_CURRENT_TEST"),
    "loaded": plugins._plugins_loaded, "threads": threading.active_count(), "copy": "warm" in str(
        sys.modules["__main__"].__dict__.get("__file__")),
})
sys.exit(3)
"""


@pytest.fixture
def waiting() -> warm.Warm:
    if warm._warm is None or warm._accelerator():
        pytest.skip("all starts are Python's own here")
    return warm._warm


def test_a_copy_is_our_child_with_the_environment_of_now(
    waiting: warm.Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has loaded no plugin and started no thread."""
    monkeypatch.setenv("SGLANG_SMC_SAMPLE", "now")
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=exec, args=(TELL, {"pipe": writer})
    )
    process.start()
    assert reader.recv() == {
        "pid": process.pid,
        "parent": os.getpid(),
        "folder": os.getcwd(),
        "variable": "now",
        "test": os.environ["PYTEST_CURRENT_TEST"],
        "loaded": False,
        "threads": 1,
        "copy": True,
    }
    process.join(30)
    assert process.exitcode == 3


def test_what_imports_read_needs_another_interpreter(waiting: warm.Warm) -> None:
    """SGLang keeps this switch in a constant; others it reads when it needs them."""
    environment = dict(os.environ)
    interpreter = waiting.interpreter(environment)
    assert waiting.interpreter(environment) is interpreter
    assert interpreter.misfits({**environment, "SGLANG_TEST_RETRACT": "1"})
    assert interpreter.misfits({**environment, "OMP_NUM_THREADS": "7"})
    late = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0", "SGLANG_SMC_CPU_OVERLAP": "1"}
    assert not interpreter.misfits({**environment, **late})


def test_a_server_is_started_as_a_module(waiting: warm.Warm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as sink:
        process = warm.start(["-m", "platform"], dict(os.environ), sink.fileno())
        assert process.wait(30) == 0
    assert sys.platform in log.read_text().lower()
