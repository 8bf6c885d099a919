"""No rank decides by a clock of its own: whatever a scheduler process times is listed here.

Tensor-parallel ranks must end the same requests in the same round, else they wait for one another
for ever. Two clocks never agree. So what is timed is measured and told to people alone, or one rank
times it and tells the others, or all take what any of them says.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_measures import PACKAGE, ROOT, sources

TOOLS = {"command", "demo", "distill", "plan", "testing", "view", "watch"}  # other processes
CLOCKS = {"time", "datetime", "timeit", "sched", "signal"}  # modules
WAITS = {"poll", "result", "wait", "wait_for"}  # methods whose first argument says how long

MEASURED = "told to people, and decides nothing"
FIRST_RANK = "the first rank's potentials alone are asked, and what came of it is broadcast"
ANY_RANK = "a request ends on all ranks where it was slow on any (all_reduce)"
BROADCAST = "the first rank's measurements are broadcast at start"

AGREED = {
    "sglang_smc/ops/check.py": {"settle: time.perf_counter": MEASURED},
    "sglang_smc/potentials/calls.py": {
        "Caller.__init__: time.monotonic": FIRST_RANK,
        "Caller.ask: time.monotonic": FIRST_RANK,
        "Call.answers: time.monotonic": FIRST_RANK,
        "Call.answers: .result()": FIRST_RANK,
    },
    "sglang_smc/potentials/http.py": {"Http._client: timeout=": FIRST_RANK},
    "sglang_smc/potentials/regex_count.py": {"RegexCount._count: timeout=": FIRST_RANK},
    "sglang_smc/recording/recorder.py": {
        "Session.__init__: time.monotonic": MEASURED,
        "Session.usage: time.monotonic": MEASURED,
    },
    "sglang_smc/requests/grammar.py": {
        "_Pauses.__call__: time.thread_time": ANY_RANK,
        "_Cost.counted: time.thread_time": ANY_RANK,
    },
    "sglang_smc/round/costs.py": {
        "costs_of: time.perf_counter": MEASURED,
        "_seconds: time.perf_counter": BROADCAST,
    },
    # Clocks as default arguments: of log lines and of metrics.
    "sglang_smc/state/counters.py": {"LowESSWarning.__init__: time.monotonic": MEASURED},
    "sglang_smc/state/monitor.py": {"Monitor.__init__: time.monotonic": MEASURED},
    "sglang_smc/state/watched.py": {"Watched.__init__: time.monotonic": MEASURED},
}


def timed(source: str) -> set[str]:
    """Every look at a clock, and every wait that may end by one, with the function it stands in."""
    tree = ast.parse(source)
    names = {}  # by what a file calls it: a module of CLOCKS, or something of one
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    clocks = {name: full for name, full in names.items() if full.split(".")[0] in CLOCKS}

    def walk(node: ast.AST, place: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            place = (*place, node.name)
        what = use(node)
        if what is not None:
            yield f"{'.'.join(place)}: {what}"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, place)

    def use(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return f"{clocks[node.value.id]}.{node.attr}" if node.value.id in clocks else None
        if isinstance(node, ast.Name) and "." in clocks.get(node.id, ""):
            return clocks[node.id]
        if isinstance(node, ast.keyword) and "timeout" in (node.arg or ""):
            return f"{node.arg}="
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            return f".{node.func.attr}()" if node.func.attr in WAITS else None
        return None

    return set(walk(tree, ()))


def of_scheduler(path: Path) -> bool:
    """Whether a file may run in a scheduler process."""
    return not path.is_relative_to(PACKAGE) or path.relative_to(PACKAGE).parts[0] not in TOOLS


def test_whatever_is_timed_is_agreed_upon() -> None:
    paths = {str(path.relative_to(ROOT)): path for path in sources() if of_scheduler(path)}
    found = {name: timed(path.read_text()) for name, path in paths.items()}
    assert len(found) > 100
    told = {name: uses for name, uses in found.items() if uses}
    assert told == {name: set(uses) for name, uses in AGREED.items()}, (
        "a clock or a timeout: say here how ranks agree on what it decides"
    )


@pytest.mark.parametrize(
    "line",
    [
        "import time\nx = time.time()",
        "import time as t\nx = t.monotonic_ns()",
        "from time import perf_counter as now\nx = now()",
        "from datetime import datetime\nx = datetime.now()",
        "import regex\nx = regex.search(a, b, timeout=1)",
        "x = future.result(seconds)",
        "x = event.wait(1.0)",
    ],
)
def test_a_clock_is_seen(line: str) -> None:
    assert timed(line) and not timed("x = future.result() + time_of(1)")
