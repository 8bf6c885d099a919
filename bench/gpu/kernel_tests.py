"""Run the tests of kernels and whole rounds on the GPU by plain pytest, files in parallel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from speed.remote import end_group
from speed.runner import Attempt, Case, Entry
from study import REPOSITORY, code_fingerprint, digest

FOLDER = "tests/kernels"
#: Files of the folder that always run on a CPU.
NO_GPU = ("test_compilation.py", "test_fake_cuda.py")
SINGLE = ("tests/unit/test_host_sync.py",)
#: Each process compiles its own kernels; with more processes they wait for each other.
MOST_JOBS = 8
SECONDS = 120.0
LONGEST_MESSAGE = 600
#: Without the current folder on the module path, and a line for each broken test.
PYTEST = (sys.executable, "-P", "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def kernel_cases(work: Path) -> list[Case]:
    """Return one case; its parts are the test files."""
    code = {**code_fingerprint(), "tests": digest((REPOSITORY / "tests").rglob("*.py"))}
    files = test_files()
    run = partial(run_files, work / "logs")
    return [Case("tests", dict.fromkeys(files, code), SECONDS, run, " ".join([*PYTEST, *files]))]


def test_files() -> list[str]:
    """Return the files that need a GPU, the largest first."""
    found = [path for path in (REPOSITORY / FOLDER).glob("test_*.py") if path.name not in NO_GPU]
    found += [REPOSITORY / file for file in SINGLE]
    found.sort(key=lambda path: -path.stat().st_size)
    return [str(path.relative_to(REPOSITORY)) for path in found]


def run_files(logs: Path, attempt: Attempt) -> None:
    """Run files in parallel, so that kernels compile on several cores, and record outcomes."""
    logs.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[str]] = []

    def run(file: str) -> Entry:
        path = logs / f"{file.removesuffix('.py').replace('/', '-')}.log"
        with path.open("w") as log:
            options = {"stdout": log, "stderr": log, "cwd": REPOSITORY, "text": True}
            running.append(
                one := subprocess.Popen([*PYTEST, file], start_new_session=True, **options)
            )
        return outcome(one.wait(), path.read_text(errors="replace").strip())

    pool = ThreadPoolExecutor(max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2)))
    try:
        asked = {pool.submit(run, file): file for file in attempt.missing}
        for done in as_completed(asked):
            attempt.started = True
            attempt.add(asked[done], done.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for one in (one for one in running if one.returncode is None):
            end_group(one)


def outcome(status: int, said: str) -> Entry:
    """Return the counts of pytest's last line, and its lines about broken tests."""
    counts = {name.rstrip("s"): int(n) for n, name in COUNT.findall(said.rpartition("\n")[2])}
    if not counts:
        return {"failed": f"pytest ended with {status}: {said[-LONGEST_MESSAGE:]}"}
    wrong = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {
        "passed": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
        "broken": counts.get("failed", 0) + counts.get("error", 0),
        "wrong": [line[:LONGEST_MESSAGE] for line in wrong],
    }
