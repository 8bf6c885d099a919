"""Run the tests of kernels and whole rounds on the GPU by plain pytest, files in parallel."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu.runner import Attempt, Case, Places
from speed.remote import end_group
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


@dataclass(frozen=True)
class Started:
    """A running pytest process of one test file."""

    file: str
    process: subprocess.Popen[str]
    began: float
    report: Path
    log: Path

    def result(self) -> dict[str, Any]:
        """Return the counts of passed and broken tests, and the messages of the latter."""
        seconds = {"seconds": time.monotonic() - self.began}
        if self.report.exists():
            return {**counted(self.report), **seconds}
        last = self.log.read_text(errors="replace").strip()[-LONGEST_MESSAGE:]
        return {"failed": f"pytest ended with {self.process.returncode}: {last}", **seconds}


def start(file: str, logs: Path) -> Started:
    """Start the tests of a file."""
    name = file.removesuffix(".py").replace("/", "-")
    report, log = logs / f"{name}.xml", logs / f"{name}.log"
    report.unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command(file, report),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            text=True,
            start_new_session=True,
        )
    return Started(file, process, time.monotonic(), report, log)


def run_files(places: Places, missing: Sequence[str], attempt: Attempt) -> None:
    """Run files in parallel, so that kernels compile on several cores."""
    places.logs.mkdir(parents=True, exist_ok=True)
    jobs = max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2))
    waiting, running = list(missing), list[Started]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(waiting.pop(0), places.logs))
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                attempt.started = True
                attempt.add(one.file, one.result())
            time.sleep(0.2)
    finally:
        for one in running:
            end_group(one.process)


def counted(report: Path) -> dict[str, Any]:
    """Return the counts of pytest's JUnit report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = []
    for case in cases:
        bad = [one for one in case if one.tag in ("failure", "error")]
        if bad:
            message = (bad[0].get("message") or bad[0].text or "")[:LONGEST_MESSAGE]
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            wrong.append(f"{name}: {message}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(wrong) - skipped,
        "skipped": skipped,
        "broken": len(wrong),
        "wrong": wrong,
    }
