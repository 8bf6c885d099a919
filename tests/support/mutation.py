"""Count which mutants of the mathematics, the ledger and the round the in-process tests kill.

    python tests/support/mutation.py --output FILE [--count 300] [--only PATH]

A mutant is one change by an operator of Cosmic Ray (`a < b` for `a <= b`, `0` for `1`, `not x` for
`x`, ...) at one place; the sample is fixed by its seed. Tests of unit/ and property/ that run the
mutated line are run in a fork, the shortest first, until one fails. FILE has a line of JSON per
mutant, and a run goes on where it was stopped. No clock decides: a mutant that loops for ever ends
at a limit of CPU seconds, and counts as killed. Seconds are those of budget.toml's machine.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import json
import os
import random
import resource
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

from costs import slowness

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/unit", "tests/property")
FILES = (
    "sglang_smc/smc/*.py",
    "sglang_smc/kv/report.py",
    "sglang_smc/kv/arena.py",
    "sglang_smc/round/*.py",
    "sglang_smc/state/particles.py",
)
SEED = 0
MOST_SECONDS = 15.0  # of tests per mutant, as they took without a mutation
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]


class Mutant(NamedTuple):
    """One operator at one place of one file."""

    file: str
    line: int
    operator: str
    occurrence: int  # among those of the operator in the file
    before: str
    after: str


class Coverage(NamedTuple):
    """Which tests run which line, how long each takes, and what they import beside the package."""

    tests: dict[str, dict[str, list[str]]]  # by file and line, as JSON has it
    seconds: dict[str, float]  # by test
    modules: list[str]


def files() -> list[str]:
    """Return the files to mutate."""
    return [str(path.relative_to(ROOT)) for glob in FILES for path in sorted(ROOT.glob(glob))]


def places(file: str) -> list[list[tuple[str, int, int]]]:
    """Return operator, occurrence and line of all mutants, by place; types are left alone."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / file).read_text()
    skipped = spans_of_types(source)
    tree = get_ast(source)
    found: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    for name in sorted(plugins.operator_names()):
        if "Variable" in name:  # they need arguments of their own
            continue
        operator = plugins.get_operator(name)()
        starts = [span[0] for node in ast_nodes(tree) for span in operator.mutation_positions(node)]
        for occurrence, start in enumerate(starts):
            if not any(first <= start < last for first, last in skipped):
                found[start].append((name, occurrence, start[0]))
    return [found[start] for start in sorted(found)]


def mutated(file: str, operator: str, occurrence: int) -> str:
    """Return the source of a file with one mutation."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    source = (ROOT / file).read_text()
    return mutate_code(source, plugins.get_operator(operator)(), occurrence) or source


def spans_of_types(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the spans of annotations, where an operator stands between types."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        for field in ("annotation", "returns"):
            part = getattr(node, field, None)
            if part is not None:
                start = part.lineno, part.col_offset
                spans.append((start, (part.end_lineno, part.end_col_offset)))
    return spans


def sample(count: int, only: str | None) -> list[Mutant]:
    """Return a fixed sample: a place, each as likely as any other, and one of its mutants."""
    choose = random.Random(SEED)
    known = [(file, place) for file in files() for place in places(file)]
    found = []
    for file, place in choose.sample(known, min(count, len(known))):
        operator, occurrence, line = choose.choice(place)
        if only in (None, file):
            texts = (ROOT / file).read_text(), mutated(file, operator, occurrence)
            lines = zip(*(text.splitlines() for text in texts), strict=False)
            before, after = next(pair for pair in lines if pair[0] != pair[1])
            found.append(Mutant(file, line, operator, occurrence, before.strip(), after.strip()))
    return found


def in_fork(run: Callable[[], Any], cpu_seconds: float | None = None) -> Any:
    """Return what ``run`` returns in a fork of this process; None where it does not come to it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            if cpu_seconds is not None:
                most = int(cpu_seconds)
                resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))
            with os.fdopen(writer, "w") as pipe:
                json.dump(run(), pipe)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else None


def pytest_main(arguments: list[str], *plugins: Any) -> int:
    """Run pytest here, silently."""
    import pytest

    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests")]
    os.chdir(ROOT)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return int(pytest.main([*PYTEST, *arguments], plugins=list(plugins)))


class Recorder:
    """A pytest plugin that notes each test's lines of the mutated files and its CPU seconds."""

    def __init__(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[str(ROOT / file) for file in files()]
        )
        self.seconds: dict[str, float] = {}
        self._slowness = slowness()
        self.failed: list[str] = []
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self._start = time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] = (time.process_time() - self._start) / self._slowness

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def result(self) -> Coverage:
        self.coverage.stop()
        data = self.coverage.get_data()
        of_lines = {}
        for file in files():
            lines = data.contexts_by_lineno(str(ROOT / file))
            of_lines[file] = {str(line): sorted(filter(None, of)) for line, of in lines.items()}
        files_of = {name: getattr(module, "__file__", "") for name, module in sys.modules.items()}
        outside = [name for name, file in files_of.items() if "site-packages" in (file or "")]
        return Coverage(of_lines, self.seconds, outside)


def measure_coverage() -> Coverage:
    """Run all tests once. Raises RuntimeError where one fails without a mutation."""

    def run() -> Any:
        recorder = Recorder()
        pytest_main([*TESTS, "--maxfail=20"], recorder)
        return recorder.failed, recorder.result()

    failed, found = in_fork(run) or (["all"], None)
    if failed:
        raise RuntimeError(f"these tests fail without a mutation: {', '.join(failed)}")
    return Coverage(*found)


def selected(mutant: Mutant, coverage: Coverage) -> list[str]:
    """Return the tests that run a mutant's line, the shortest first, of 15 s in all.

    A line that is run at import has the tests of the whole file.
    """
    lines = coverage.tests[mutant.file]
    tests = lines.get(str(mutant.line)) or sorted({t for some in lines.values() for t in some})
    found = []
    total = 0.0
    for test in sorted(tests, key=lambda test: (coverage.seconds[test], test)):
        total += coverage.seconds[test]
        if found and total > MOST_SECONDS:
            break
        found.append(test)
    return found


def is_killed(mutant: Mutant, tests: list[str], seconds: float) -> bool:
    """Run tests against a mutant in a fork. Tests that cannot be collected are a kill, too."""
    path = str(ROOT / mutant.file)
    source = mutated(mutant.file, mutant.operator, mutant.occurrence)
    get_code = SourceFileLoader.get_code

    def mutated_code(self: SourceFileLoader, fullname: str) -> Any:
        if self.get_filename(fullname) == path:
            return compile(source, path, "exec", dont_inherit=True)
        return get_code(self, fullname)

    def run() -> int:
        SourceFileLoader.get_code = mutated_code  # type: ignore[method-assign]
        return pytest_main(tests)

    return in_fork(run, cpu_seconds=60 + 5 * seconds) != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", help="a file of the package")
    options = parser.parse_args()
    chosen = sample(options.count, options.only)
    output = options.output
    done = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    known = output.with_suffix(".coverage.json")
    if not known.exists():
        known.write_text(json.dumps(measure_coverage()))
    coverage = Coverage(*json.loads(known.read_text()))
    for name in coverage.modules:
        with suppress(Exception), redirect_stderr(io.StringIO()):
            importlib.import_module(name)
    for number, mutant in enumerate(chosen[len(done) :], start=len(done) + 1):
        tests = selected(mutant, coverage)
        taken = sum(coverage.seconds[test] for test in tests)
        killed = bool(tests) and is_killed(mutant, tests, taken)
        done.append({**mutant._asdict(), "tests": len(tests), "killed": killed})
        with output.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(
            f"{number} of {len(chosen)}: {'killed' if killed else 'SURVIVED'} {mutant}", flush=True
        )
    counts = Counter((row["file"], row["killed"]) for row in done)
    for name in files():
        total = counts[name, True] + counts[name, False]
        print(f"{name:40} {counts[name, True]:4} of {total}")
    print(f"killed {sum(row['killed'] for row in done)} of {len(done)}")


if __name__ == "__main__":
    main()
