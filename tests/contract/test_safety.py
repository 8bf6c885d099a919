"""Nothing in this package turns data into code, or into a path, but where it is listed here.

None of the listed places sees anything of a request. Likewise no line of the log has text of a
request as it came.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("sglang_smc", "kernels", "patches")
    for path in (ROOT / folder).rglob("*.py")
)

CODE_MODULES = {
    "cloudpickle", "code", "ctypes", "dill", "importlib", "joblib", "marshal", "pickle", "runpy",
    "shelve", "subprocess",
}  # fmt: skip
CODE_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "numpy.load",
    "np.load", "yaml.load", "os.system", "os.popen",
}  # fmt: skip
FILE_METHODS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "savefig",
}  # fmt: skip

# SGLang's own reader of a pickled processor.
PICKLE_METHODS = {"from_str"}

LISTED = {
    # Where the server's owner has given --enable-custom-logit-processor, which is off by default.
    ("sglang_smc/requests/processors.py", "from_str"),
    # The names of our own patch files, as they stand in this module.
    ("sglang_smc/server/hooks.py", "importlib"),
    # Potentials: code that the server's owner names in a flag; requests choose among their names.
    ("sglang_smc/potentials/declared.py", "importlib"),
    # A method of theirs, not a file.
    ("sglang_smc/potentials/calls.py", "open"),
    ("sglang_smc/potentials/combine.py", "open"),
    # Descriptions of the machine, below /sys.
    ("sglang_smc/cpu/threads.py", "read_text"),
    # The planner, a command line tool: models and plots where its user says.
    ("sglang_smc/plan/plot.py", "savefig"),
    ("sglang_smc/plan/shapes.py", "read_text"),
    # The viewer, another: traces that its user names, pages where he says, its own parts; pandas
    # and matplotlib, where a notebook asks for them.
    ("sglang_smc/view/finding.py", "read_bytes"),
    ("sglang_smc/view/cli.py", "write_text"),
    ("sglang_smc/view/page.py", "importlib"),
    ("sglang_smc/view/page.py", "read_text"),
    ("sglang_smc/view/particles.py", "importlib"),
    # The doctor, another: versions of packages, and the tokenizers that its user names.
    ("sglang_smc/command/machine.py", "importlib"),
    ("sglang_smc/command/pair.py", "read_text"),
    # The commands' own modules; the demo, which starts servers of the pair in the package, and
    # keeps their logs where its user says.
    ("sglang_smc/command/cli.py", "importlib"),
    ("sglang_smc/demo/party.py", "importlib"),
    ("sglang_smc/demo/serving.py", "subprocess"),
    ("sglang_smc/demo/serving.py", "open"),
    ("sglang_smc/demo/serving.py", "read_text"),
    ("sglang_smc/demo/cli.py", "mkdir"),
    ("sglang_smc/demo/cli.py", "write_text"),
    # The tool that trains drafts, another: prompts, samples and checkpoints where its user says.
    ("sglang_smc/distill/checkpoints.py", "mkdir"),
    ("sglang_smc/distill/checkpoints.py", "write_bytes"),
    ("sglang_smc/distill/checkpoints.py", "write_text"),
    ("sglang_smc/distill/head_config.py", "read_text"),
    ("sglang_smc/distill/job.py", "mkdir"),
    ("sglang_smc/distill/job.py", "write_text"),
    ("sglang_smc/distill/texts.py", "mkdir"),
    ("sglang_smc/distill/texts.py", "read_text"),
    ("sglang_smc/distill/texts.py", "write_text"),
    # The file of --speculative-smc-presets, which the server's owner names.
    ("sglang_smc/server/presets.py", "read_text"),
    # The checks of a user's own pair, another: prompts and a report where its user says.
    ("sglang_smc/testing/prompts.py", "read_text"),
    ("sglang_smc/testing/cli.py", "write_text"),
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` as written; what is called in between is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def risks(path: Path) -> Iterator[str]:
    """Imports and calls by which data may become code or a path."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [alias.name for alias in node.names]
            modules = named if isinstance(node, ast.Import) else [node.module or ""]
            yield from {name.partition(".")[0] for name in modules} & CODE_MODULES
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CODE_CALLS:
                yield name
            elif name.rpartition(".")[2] in FILE_METHODS | PICKLE_METHODS:
                yield name.rpartition(".")[2]


# What log lines show as it is: numbers, and texts of the server's owner or of this package.
OWN_TEXTS = {
    ("sglang_smc/server/arguments.py", "config"),
    ("sglang_smc/models/vocabulary.py", "error"),  # a draft's tokenizer cannot be read
    ("sglang_smc/process.py", "_memory.as_text()"),
    ("sglang_smc/process.py", "_memory.advice"),
    ("sglang_smc/round/costs.py", "found"),
    ("sglang_smc/ops/check.py", "*(problem, FLAG)"),  # of a kernel's check
    ("sglang_smc/potentials/calls.py", "self._stopped"),  # the operator's name for a potential
    (
        "sglang_smc/recording/recorder.py",
        "*(usage.gigabytes, self._free / 2 ** 30, usage.seconds, largest / 2 ** 30, recorded)",
    ),
    ("sglang_smc/round/graph.py", "*(reason, self.launched)"),  # why a round is not replayed
    ("sglang_smc/round/graph.py", "told"),  # why none is recorded
    ("sglang_smc/state/counters.py", "tilt"),
    (
        "sglang_smc/state/counters.py",
        "f'{self._ess / self._particles:.2f}' if self._particles else '-'",
    ),
    ("sglang_smc/state/monitor.py", "warning"),  # of numbers
    ("patches/metrics.py", "' and no '.join(unread)"),  # names of SGLang's counters
}  # fmt: skip
LEVELS = {"debug", "info", "warning", "error", "critical", "log", "exception"}


def logged(tree: ast.AST) -> Iterator[str]:
    """Yield what log lines show that is neither a number nor `printable`."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or dotted(call.func) not in {
            f"logger.{level}" for level in LEVELS
        }:
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


def test_the_log_has_text_of_a_request_through_printable_alone() -> None:
    """Red for a line with new text: escape it, or list it if no request can choose it."""
    found = {
        (str(path.relative_to(ROOT)), text)
        for path in FILES
        for text in logged(ast.parse(path.read_text()))
    }
    assert found == OWN_TEXTS


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("logger.error('%d %s', number, req.rid)", "req.rid"),
        ("logger.error('%s', *many)", "*many"),
        ("logger.info(f'{rid}')", "f'{rid}'"),
        ("logger.exception('failed')", "a traceback, which quotes the error's text"),
        ("logger.info('%.2f %s', share, printable(rid))", None),
    ],
)
def test_the_search_finds_lines_with_text(line: str, text: str | None) -> None:
    assert list(logged(ast.parse(line))) == ([] if text is None else [text])


def test_data_becomes_code_or_a_path_only_where_it_is_listed() -> None:
    found = {(str(path.relative_to(ROOT)), risk) for path in FILES for risk in risks(path)}
    assert found == LISTED


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    for number, (line, risk) in enumerate(
        [
            ("import pickle", "pickle"),
            ("from dill import loads", "dill"),
            ("from importlib import import_module as load", "importlib"),
            ("eval(text)", "eval"),
            ("torch.load(path, weights_only=True)", "torch.load"),
            ("CustomLogitProcessor.from_str(text)", "from_str"),
            ("open(path)", "open"),
            ("Path(name).read_text()", "read_text"),
        ]
    ):
        path = tmp_path / f"{number}.py"
        path.write_text(line)
        assert list(risks(path)) == [risk]
