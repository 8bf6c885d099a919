"""Run the tests of kernels and whole rounds on the GPU by plain pytest, files in parallel."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu.stages import Attempt, Case, Places
from study import REPOSITORY, code_fingerprint, digest

FOLDER = "tests/kernels"
#: Files of the folder that always run on a CPU.
NO_GPU = ("test_compilation.py", "test_fake_cuda.py")
SINGLE = ("tests/unit/test_host_sync.py",)
#: Each process compiles its own kernels; with more processes they wait for each other.
MOST_JOBS = 8
LONGEST_MESSAGE = 600
SECONDS = 120.0


def kernel_cases(places: Places) -> list[Case]:
    """Return one case; its parts are the test files."""
    code = {**code_fingerprint(), "tests": digest((REPOSITORY / "tests").rglob("*.py"))}
    files = test_files()
    parts = {file: {**code, "missing": missing_for(REPOSITORY / file)} for file in files}
    shown = "\n    ".join(shlex.join(command(file, None)) for file in files)
    return [Case("tests", parts, SECONDS, partial(run_files, places), shown)]


def test_files() -> list[str]:
    """Return the files that need a GPU, the largest first."""
    found = [path for path in (REPOSITORY / FOLDER).glob("test_*.py") if path.name not in NO_GPU]
    found += [REPOSITORY / file for file in SINGLE]
    found.sort(key=lambda path: -path.stat().st_size)
    return [str(path.relative_to(REPOSITORY)) for path in found]


def missing_for(path: Path) -> list[str]:
    """Return the packages that a test file imports and that are not installed."""
    names = {"pytest"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    here = {one.stem for one in (REPOSITORY / "tests").glob("*.py")}
    return sorted(name for name in names - here if importlib.util.find_spec(name) is None)


def command(file: str, report: Path | None) -> list[str]:
    """Return the pytest command, without the current folder on the module path."""
    written = [] if report is None else [f"--junitxml={report}"]
    return [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *written, file]


def run_files(places: Places, missing: Sequence[str], attempt: Attempt) -> None:
    """Run files in parallel, so that kernels compile on several cores."""
    places.logs.mkdir(parents=True, exist_ok=True)
    jobs = max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2))
    waiting, running = list(missing), list[Process]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Process(waiting.pop(0), places.logs))
            for process in [one for one in running if one.ended]:
                running.remove(process)
                attempt.started = True
                attempt.add(process.file, process.result())
            time.sleep(0.2)
    finally:
        for process in running:
            process.kill()


class Process:
    """A running pytest process of one test file."""

    def __init__(self, file: str, logs: Path) -> None:
        self.file = file
        self._began = time.monotonic()
        name = file.removesuffix(".py").replace("/", "-")
        self._report, self._log = logs / f"{name}.xml", logs / f"{name}.log"
        self._report.unlink(missing_ok=True)
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                command(file, self._report),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def result(self) -> dict[str, Any]:
        """Return the counts of passed and broken tests, and the messages of the latter."""
        seconds = {"seconds": time.monotonic() - self._began}
        if not self._report.exists():
            last = self._log.read_text(errors="replace").strip()[-LONGEST_MESSAGE:]
            return {"failed": f"pytest ended with {self._process.returncode}: {last}", **seconds}
        return {**counted(self._report), **seconds}


def counted(report: Path) -> dict[str, Any]:
    """Return the counts of pytest's JUnit report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    broken = {case_name(case): message(case) for case in cases if message(case) is not None}
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(broken) - skipped,
        "skipped": skipped,
        "broken": len(broken),
        "wrong": [f"{name}: {said}" for name, said in broken.items()],
    }


def case_name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def message(case: ElementTree.Element) -> str | None:
    """Return a failed test's message, shortened; None for other tests."""
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return (found.get("message") or found.text or "")[:LONGEST_MESSAGE]
    return None
