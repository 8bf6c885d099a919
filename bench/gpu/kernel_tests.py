"""Run the tests of kernels and whole rounds on the GPU by plain pytest, files in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from speed.remote import end_group
from speed.runner import Attempt, Case, Places
from study import REPOSITORY, code_fingerprint, digest

FOLDER = "tests/kernels"
#: Files of the folder that always run on a CPU.
NO_GPU = ("test_compilation.py", "test_fake_cuda.py")
SINGLE = ("tests/unit/test_host_sync.py",)
#: Each process compiles its own kernels; with more processes they wait for each other.
MOST_JOBS = 8
LONGEST_MESSAGE = 600
SECONDS = 120.0
#: Without the current folder on the module path.
PYTEST = (sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider")


def kernel_cases(places: Places) -> list[Case]:
    """Return one case; its parts are the test files."""
    code = {**code_fingerprint(), "tests": digest((REPOSITORY / "tests").rglob("*.py"))}
    files = test_files()
    shown = " ".join([*PYTEST, *files])
    return [Case("tests", dict.fromkeys(files, code), SECONDS, partial(run_files, places), shown)]


def test_files() -> list[str]:
    """Return the files that need a GPU, the largest first."""
    found = [path for path in (REPOSITORY / FOLDER).glob("test_*.py") if path.name not in NO_GPU]
    found += [REPOSITORY / file for file in SINGLE]
    found.sort(key=lambda path: -path.stat().st_size)
    return [str(path.relative_to(REPOSITORY)) for path in found]


def run_files(places: Places, missing: Sequence[str], attempt: Attempt) -> None:
    """Run files in parallel, so that kernels compile on several cores."""
    places.logs.mkdir(parents=True, exist_ok=True)
    jobs = max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2))
    waiting, running = list(missing), dict[str, subprocess.Popen[str]]()
    began: dict[str, float] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                file = waiting.pop(0)
                running[file], began[file] = start(file, places.logs), time.monotonic()
            for file in [file for file, one in running.items() if one.poll() is not None]:
                status = running.pop(file).returncode
                attempt.started = True
                seconds = {"seconds": time.monotonic() - began[file]}
                attempt.add(file, outcome(file, status, places.logs) | seconds)
            time.sleep(0.2)
    finally:
        for one in running.values():
            end_group(one)


def start(file: str, logs: Path) -> subprocess.Popen[str]:
    """Start the tests of a file."""
    report, log = written(file, logs)
    report.unlink(missing_ok=True)
    with log.open("w") as output:
        return subprocess.Popen(
            [*PYTEST, f"--junitxml={report}", file],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            text=True,
            start_new_session=True,
        )


def written(file: str, logs: Path) -> tuple[Path, Path]:
    """Return the paths of a file's report and log."""
    name = file.removesuffix(".py").replace("/", "-")
    return logs / f"{name}.xml", logs / f"{name}.log"


def outcome(file: str, status: int, logs: Path) -> dict[str, Any]:
    """Return the counts of pytest's report, and the messages of what is broken."""
    report, log = written(file, logs)
    if not report.exists():
        last = log.read_text(errors="replace").strip()[-LONGEST_MESSAGE:]
        return {"failed": f"pytest ended with {status}: {last}"}
    cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = []
    for case in cases:
        for bad in [one for one in case if one.tag in ("failure", "error")][:1]:
            message = (bad.get("message") or bad.text or "")[:LONGEST_MESSAGE]
            wrong.append(f"{case.get('name')}: {message}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(wrong) - skipped
    return {"passed": passed, "skipped": skipped, "broken": len(wrong), "wrong": wrong}
