"""Measure what the tests cost, and fail above budget.toml: CPU seconds and engine starts.

A pytest plugin, on where `--costs FILE` is given. The table is printed at the end, and written as
JSON to FILE. CPU time is read at the first and last test of each file, with all child processes:
that of one whose parent has died is missing, so a file's seconds are a lower bound. Seconds are
those of the machine that the budget was made on: they are divided by how much longer a fixed loop
takes here before and after each file. That loop is Python's; compilers and tensors slow down by
other factors on a shared machine, by up to 1.7 where it was seen. Hence two limits: above `MARGIN`
a folder is marked in the table, above `MOST` the run fails.
"""

import json
import multiprocessing.process
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomllib

KEY = "costs"  # of a report's user properties: file, CPU seconds, engine starts
LONG = "long"  # likewise: CPU seconds of one test, in the test process itself
BUDGET = tomllib.loads((Path(__file__).parents[1] / "budget.toml").read_text())
MARGIN = 1.2  # times the budget
MOST = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write CPU seconds and engine starts by file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs(), "measured-costs")


class Costs:
    """Measures in each test process; adds up and prints in the first."""

    def __init__(self) -> None:
        self._starts = 0
        self._cpu = cpu_seconds()
        self._starts_before = 0
        names = ("tests", "wall_seconds", "cpu_seconds", "engine_starts")
        self._files: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(names, 0.0))
        self._ends_file: str | None = None  # path of the test that runs, where it is the last of it
        self._long_tests: list[tuple[float, str]] = []
        self._slowness = slowness()
        self._count_starts()

    def _count_starts(self) -> None:
        """Count engines by their detokenizer, which each has one of, and servers by command."""
        start_process = multiprocessing.process.BaseProcess.start

        def start(process: Any) -> None:
            target = getattr(process, "_target", None)
            self._starts += getattr(target, "__name__", "") == "run_detokenizer_process"
            start_process(process)

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "subprocess.Popen" and isinstance(arguments[1], (list, tuple)):
                self._starts += "sglang.launch_server" in map(str, arguments[1])

        multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]
        sys.addaudithook(audit)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        file, following = (one and one.nodeid.partition("::")[0] for one in (item, nextitem))
        self._ends_file = file if file != following else None
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Note a test that takes long itself, unless it starts an engine."""
        before = time.process_time()
        try:
            return (yield)
        finally:
            seconds = (time.process_time() - before) / self._slowness
            most = MOST * BUDGET["seconds_of_a_test"]
            if seconds > most and item.get_closest_marker("engine") is None:
                item.user_properties.append((LONG, seconds))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Read the clocks when the last test of a file has been torn down."""
        if call.when == "teardown" and self._ends_file is not None:
            item.user_properties.append((KEY, self.read(self._ends_file)))

    def read(self, file: str) -> tuple[str, float, int]:
        """Return a file with its CPU seconds and engine starts since the file before."""
        cpu = cpu_seconds()
        starts = self._starts
        before = self._slowness
        now = slowness()
        cost = file, (cpu - self._cpu) * 2 / (before + now), starts - self._starts_before
        self._cpu = cpu
        self._starts_before = starts
        self._slowness = now
        return cost

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up, in the process that prints; each report reaches it once."""
        total = self._files[report.nodeid.partition("::")[0]]
        total["tests"] += report.when == "call"
        total["wall_seconds"] += report.duration
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == KEY:
                total["cpu_seconds"] += value[1]
                total["engine_starts"] += value[2]
            elif name == LONG:
                self._long_tests.append((value, report.nodeid))

    def folders(self) -> dict[str, dict[str, float]]:
        """Return what each folder took, and all of them."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for file, row in self._files.items():
            first, second, *_ = Path(file).parts
            for folder in ("tools" if first == "tools" else second, "all"):
                for name, value in row.items():
                    found[folder][name] += value
        return found

    def over_budget(self) -> list[str]:
        """Return a sentence for each limit of budget.toml that is passed `MOST` times."""
        found = [
            f"{test} took {seconds:.1f} CPU seconds of {BUDGET['seconds_of_a_test']}"
            for seconds, test in self._long_tests
        ]
        folders = self.folders()
        for folder, row in folders.items():
            most = BUDGET["cpu_seconds"].get(folder, 0)
            if row["cpu_seconds"] > MOST * most:
                found.append(f"{folder}: {row['cpu_seconds']:.0f} CPU seconds of {most}")
        starts = folders["all"]["engine_starts"]
        if starts > BUDGET["engine_starts"]:
            found.append(f"{starts:.0f} engine starts of {BUDGET['engine_starts']}")
        return found

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail above the budget."""
        if not hasattr(session.config, "workerinput") and self.over_budget():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Print the table by folder beside the budget, and write it by file."""
        if hasattr(config, "workerinput"):
            return
        terminalreporter.section(f"costs (this machine is {self._slowness:.2f} times slower)")
        terminalreporter.write_line(
            f"{'folder':12} {'tests':>6} {'wall s':>8} {'CPU s':>8} {'budget':>8} starts"
        )
        for folder, row in self.folders().items():
            most = BUDGET["cpu_seconds"].get(folder, 0)
            above = "  above its budget" if row["cpu_seconds"] > MARGIN * most else ""
            terminalreporter.write_line(
                f"{folder:12} {row['tests']:6.0f} {row['wall_seconds']:8.0f} "
                f"{row['cpu_seconds']:8.0f} {most:8} {row['engine_starts']:6.0f}{above}"
            )
        for sentence in self.over_budget():
            terminalreporter.write_line(f"over the budget of tests/budget.toml: {sentence}")
        Path(config.getoption("--costs")).write_text(json.dumps(self._files, indent=1) + "\n")


def slowness() -> float:
    """Return how much longer a fixed loop takes here than where the budget was made; at least 1."""

    def loop() -> float:
        start = time.process_time()
        sum(i * i % 7 for i in range(500_000))
        return time.process_time() - start

    return max(1.0, min(loop() for _ in range(3)) / BUDGET["seconds_of_the_loop"])


def cpu_seconds() -> float:
    """CPU seconds of this process, its living descendants, and all that they have waited for."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            total += sum(process.cpu_times()[:4])
    return total
