"""Measure what the tests cost: CPU seconds of each file with all its processes, and engine starts.

A pytest plugin, on where `--costs FILE` is given. The table is printed at the end, and written as
JSON to FILE. CPU time is read from /proc at the first and last test of each file: that of a process
whose parent has died is missing, so a file's seconds are a lower bound.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm

KEY = "costs"  # of a report's user properties: file, CPU seconds, engine starts
TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write CPU seconds and engine starts by file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs(), "measured-costs")


class Costs:
    """Measures in each test process; adds up and prints in the first."""

    def __init__(self) -> None:
        self._starts = 0
        self._cpu, self._starts_before = tree_seconds(os.getpid()), 0
        self._files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
        self._ends_file: str | None = None  # path of the test that runs, where it is the last of it
        self._count_starts()

    def _count_starts(self) -> None:
        """Count engines by their detokenizer, which each has one of, and servers by command."""
        start_process = multiprocessing.process.BaseProcess.start
        start_server = warm.start

        def start(process: Any) -> None:
            target = getattr(process, "_target", None)
            self._starts += getattr(target, "__name__", "") == "run_detokenizer_process"
            start_process(process)

        def serve(arguments: list[str], *others: Any) -> Any:
            self._starts += _is_server(arguments)
            return start_server(arguments, *others)

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "subprocess.Popen" and isinstance(arguments[1], (list, tuple)):
                self._starts += _is_server(map(str, arguments[1]))

        multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]
        warm.start = serve  # type: ignore[assignment]
        sys.addaudithook(audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        file, following = (one and one.nodeid.partition("::")[0] for one in (item, nextitem))
        self._ends_file = file if file != following else None
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Read the clocks when the last test of a file has been torn down."""
        if call.when == "teardown" and self._ends_file is not None:
            item.user_properties.append((KEY, self.read(self._ends_file)))

    def read(self, file: str) -> tuple[str, float, int]:
        """Return a file with its CPU seconds and engine starts since the file before."""
        cpu, starts = tree_seconds(os.getpid()), self._starts
        cost = file, cpu - self._cpu, starts - self._starts_before
        self._cpu, self._starts_before = cpu, starts
        return cost

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up, in the process that prints; each report reaches it once."""
        total = self._files[report.nodeid.partition("::")[0]]
        total[0] += report.when == "call"
        total[1] += report.duration
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == KEY:
                total[2] += value[1]
                total[3] += value[2]

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Print the table by folder, and write it by file."""
        if hasattr(config, "workerinput"):
            return
        names = ("tests", "wall_seconds", "cpu_seconds", "engine_starts")
        rows = {
            file: dict(zip(names, map(float, row), strict=True))
            for file, row in self._files.items()
        }
        folders: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(names))
        for file, row in rows.items():
            for name in (str(Path(file).parent), "all"):
                folders[name] = [a + b for a, b in zip(folders[name], row.values(), strict=True)]
        terminalreporter.section("costs")
        terminalreporter.write_line(f"{'folder':20} {'tests':>6} {'wall s':>8} {'CPU s':>8} starts")
        for name, (tests, wall, cpu, starts) in folders.items():
            terminalreporter.write_line(
                f"{name:20} {tests:6.0f} {wall:8.0f} {cpu:8.0f} {starts:6.0f}"
            )
        Path(config.getoption("--costs")).write_text(json.dumps(rows, indent=1) + "\n")


def _is_server(arguments: Any) -> bool:
    return "sglang.launch_server" in arguments


def tree_seconds(root: int) -> float:
    """CPU seconds of a process, its living descendants, and all that they have waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    seconds: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children[int(fields[1])].append(int(entry.name))
            seconds[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        total += seconds.get(pid, 0.0)
        waiting += children[pid]
    return total
