"""What of this package may read a clock, turn data into code or a path, or log text is listed here.

- Tensor-parallel ranks must end the same requests in the same round, else they wait for one another
  for ever, and two clocks never agree. So what is timed is told to people alone, or one rank times
  it and tells the others, or all take what any of them says.
- None of the places where data becomes code or a path sees anything of a request.
- No line of the log has text of a request as it came.
"""

import ast
import re
from collections.abc import Callable, Iterator

import pytest
from house_measures import ROOT, sources, tree_of

TREES = {
    str(path.relative_to(ROOT)).removeprefix("sglang_smc/"): tree_of(path) for path in sources()
}
Listed = dict[str, set[str]]
Search = Callable[[ast.Module], Iterator[str]]


def dotted(node: ast.expr) -> str:
    """`a.b.c` as written; what is called in between is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


# --- Clocks

TOOLS = {"tools", "command"}  # other processes
CLOCKS = {"time", "datetime", "timeit", "sched", "signal"}  # modules
WAITS = {"poll", "result", "wait", "wait_for"}  # methods whose first argument says how long

AGREED: Listed = {
    # Told to people, and decides nothing; clocks as default arguments are of log lines and metrics.
    "ops/check.py": {"settle: time.perf_counter"},
    "models/recorder.py": {"Session.__init__: time.monotonic", "Session.usage: time.monotonic"},
    "state/metrics.py": {"Monitor.__init__: time.monotonic"},
    "state/fidelity.py": {"FidelityWindows.__init__: time.monotonic"},
    "server/routes.py": {"with_logprobs: time.time"},
    # Layers are fused on servers of one rank alone.
    "proposers/layer_choice.py": {"PassClock: time.perf_counter"},
    # The first rank's potentials alone are asked, and what came of it is broadcast.
    "potentials/runner.py": {
        "PotentialRunner.__init__: time.monotonic",
        "PotentialRunner.submit: time.monotonic",
        "PotentialRunner.wait: time.monotonic",
        "PotentialRunner.wait: .result()",
        "Call.result: time.monotonic",
        "Call.result: .wait()",
    },
    "potentials/library.py": {"Http._client: timeout=", "RegexCount._count: timeout="},
    # A request ends on all ranks where it was slow on any (all_reduce).
    "rules/grammar.py": {"_Cost.counted: time.thread_time"},
    # Some is told to people; the first rank's time and measurements are broadcast at start.
    "round/costs.py": {
        "Allowance.__init__: time.perf_counter",
        "Allowance.has: time.perf_counter",
        "costs_of: time.perf_counter",
        "_seconds_of: time.perf_counter",
        "_seconds_of: time.thread_time",
    },
}


def timed(tree: ast.Module) -> Iterator[str]:
    """Every look at a clock, and every wait that may end by one, with the function it stands in."""
    names = {}  # by what a file calls it: a module of CLOCKS, or something of one
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            owner = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {each.asname or each.name: owner + each.name for each in node.names}
    clocks = {name: full for name, full in names.items() if full.split(".")[0] in CLOCKS}
    for place, node in placed(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) in clocks:
            yield f"{place}: {clocks[dotted(node.value)]}.{node.attr}"
        elif isinstance(node, ast.Name) and "." in clocks.get(node.id, ""):
            yield f"{place}: {clocks[node.id]}"
        elif isinstance(node, ast.keyword) and "timeout" in (node.arg or ""):
            yield f"{place}: {node.arg}="
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            yield from [f"{place}: .{node.func.attr}()"] if node.func.attr in WAITS else []


def placed(node: ast.AST, place: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All nodes, with the function or class that each stands in."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        place = f"{place}.{node.name}".lstrip(".")
    yield place, node
    for child in ast.iter_child_nodes(node):
        yield from placed(child, place)


# --- Code and paths

CODE_MODULES = {
    "cloudpickle", "code", "ctypes", "dill", "importlib", "joblib", "marshal", "pickle", "runpy",
    "shelve", "subprocess",
}  # fmt: skip
CODE_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "numpy.load",
    "np.load", "yaml.load", "os.system", "os.popen",
}  # fmt: skip
RISKY_METHODS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "savefig",
    "from_str",  # SGLang's own reader of a pickled processor
}  # fmt: skip

#: Tools, in processes of their own, read and write where their user says, and start servers.
OF_TOOLS = RISKY_METHODS | {"importlib", "subprocess"}
LISTED: Listed = {
    # Where the server's owner has given --enable-custom-logit-processor, which is off by default.
    "rules/processors.py": {"from_str"},
    # The names of our own patch files, as they stand in this module.
    "server/hooks.py": {"importlib"},
    # Potentials and drafters: code that the server's owner names in a flag; no request imports any.
    "operator_code.py": {"importlib"},
    # The name of an error: torch reads the file of --speculative-token-map as weights alone.
    "proposers/hot_tokens.py": {"pickle"},
    # A method of theirs, not a file.
    "process.py": {"open"},
    "potentials/library.py": {"open"},
    # Descriptions of the machine, below /sys.
    "cpu/threads.py": {"read_text"},
    # The file of a page in the storage of a hierarchical cache: its name is a hash.
    "patches/weights.py": {"unlink"},
    # What the same command left, read as weights alone.
    "tools/sglang_smc_tools/distill/train.py": {"torch.load"},
    # The draft's checkpoint, which the server's owner names: weights alone, and its JSON files.
    "drafts/checkpoint.py": {"torch.load", "read_text"},
    "models/draft_config.py": {"read_text"},
    # The file of --speculative-smc-presets, which the server's owner names.
    "server/presets.py": {"read_text"},
    # Starts our own command, with words of the server's flags, before there are requests.
    "server/ahead.py": {"subprocess"},
}


def risks(tree: ast.Module) -> Iterator[str]:
    """Imports and calls by which data may become code or a path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [alias.name for alias in node.names]
            modules = named if isinstance(node, ast.Import) else [node.module or ""]
            yield from {name.partition(".")[0] for name in modules} & CODE_MODULES
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            method = name.rpartition(".")[2]
            yield from [name] if name in CODE_CALLS else {method} & RISKY_METHODS


# --- The log

# What its lines show as it is: numbers, and texts of the server's owner or of this package.
OWN_TEXTS: Listed = {
    "server/arguments.py": {"config"},
    "server/draft_window.py": {"told"},  # which names the operator's draft
    "proposers/assembly.py": {"first"},  # a number in words
    "models/vocabulary.py": {"error"},  # a draft's tokenizer cannot be read
    "process.py": {"memory.as_text()", "memory.advice"},
    "options/policy.py": {"self.reason"},  # numbers
    "proposers/layer_choice.py": {"reason", "self.as_dict()['passes']"},  # numbers
    "cpu/quantized.py": {"path", "method", "dtype"},  # of a checkpoint
    "round/costs.py": {"found.as_dict()", "type(error).__name__", "error"},  # of measuring
    # Numbers, and words of this package.
    "server/sizes.py": {
        "' and '.join(map(flag_of, CHOSEN))",
        "'at most ' if config.adapts else ''",
        "chosen.told(config)",
    },
    "server/ahead.py": {"error", "last"},  # of starting a command, and what that prints
    "ops/check.py": {"problem", "FLAG"},  # of a kernel's check
    "potentials/runner.py": {"self._stopped"},  # the operator's name for a potential
    "models/recorder.py": {"recorded"},
    # Why a round is not replayed, and why none is recorded.
    "round/graph.py": {"reason", "told"},
    "state/metrics.py": {"ess", "self._watched.all", "warning"},  # of numbers
    "patches/metrics.py": {"' and no '.join(unread)"},  # names of SGLang's counters
}
LEVELS = {
    f"logger.{level}"
    for level in ("debug", "info", "warning", "error", "critical", "log", "exception")
}


def logged(tree: ast.Module) -> Iterator[str]:
    """Yield what log lines show that is neither a number nor `printable`."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or dotted(call.func) not in LEVELS:
            continue
        form, *shown = call.args
        if dotted(call.func) == "logger.exception" or call.keywords:
            yield "a traceback, which quotes the error's text"
        if not (isinstance(form, ast.Constant) and isinstance(form.value, str)):
            yield ast.unparse(form)
        elif "%s" in form.value:
            kinds = re.findall(r"%[-.0-9]*([a-z])", form.value)
            is_each = len(kinds) == len(shown)
            for number, one in enumerate(shown):
                is_text = not is_each or kinds[number] == "s"
                if is_text and not (isinstance(one, ast.Call) and dotted(one.func) == "printable"):
                    yield ast.unparse(one)


@pytest.mark.parametrize(
    ("search", "listed"), [(timed, AGREED), (risks, LISTED), (logged, OWN_TEXTS)]
)
def test_it_is_found_only_where_it_is_listed(search: Search, listed: Listed) -> None:
    """List what is new if ranks agree on what it decides, or if no request can choose it."""
    tools = TOOLS if search is timed else set()
    parsed = {name: tree for name, tree in TREES.items() if name.split("/")[0] not in tools}
    assert len(parsed) > 100
    found = {name: set(search(tree)) for name, tree in parsed.items()}
    of_tools = {name: uses for name, uses in found.items() if name.split("/")[0] in TOOLS}
    found |= {name: uses - OF_TOOLS for name, uses in of_tools.items()}
    assert {name: uses for name, uses in found.items() if uses} == listed


@pytest.mark.parametrize(
    ("search", "line", "found"),
    [
        (timed, "import time\nx = time.time()", "time.time"),
        (timed, "import time as t\nx = t.monotonic_ns()", "time.monotonic_ns"),
        (timed, "from time import perf_counter as now\nx = now()", "time.perf_counter"),
        (timed, "from datetime import datetime\nx = datetime.now()", "datetime.datetime"),
        (timed, "x = future.result() + time_of(1)", None),
        (risks, "from dill import loads", "dill"),
        (risks, "eval(text)", "eval"),
        (risks, "torch.load(path, weights_only=True)", "torch.load"),
        (logged, "logger.error('%d %s', number, req.rid)", "req.rid"),
        (logged, "logger.error('%s', *many)", "*many"),
        (logged, "logger.info(f'{rid}')", "f'{rid}'"),
        (logged, "logger.exception('failed')", "a traceback, which quotes the error's text"),
        (logged, "logger.info('%.2f %s', share, printable(rid))", None),
    ],
)
def test_the_search_finds_what_is_nowhere(search: Search, line: str, found: str | None) -> None:
    """What stands in a file of the package the test above finds there."""
    said = {one.removeprefix(": ") for one in search(ast.parse(line))}
    assert found in said if found else not said
