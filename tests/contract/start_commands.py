"""Start commands up to what they do: import each one's module, and parse its arguments.

A script, since what a command imports is known in a process of its own alone. It reads a list of
commands as JSON, `sglang-smc` or what stands behind Python's name and words, and prints a list with
an exit status, the last line that was said, and what is imported by then of `HEAVY`, for each.
"""

import contextlib
import importlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

from sglang_smc.command import program

ROOT = Path(__file__).parents[2]
HEAVY = ("sglang", "torch")


def main_of(run: object, interrupted: str = "") -> int:
    """In place of that of `program`: what a command runs once its arguments are parsed."""
    return 0


def start(words: list[str]) -> object:
    if words[0] == "sglang-smc":
        found = re.search(
            r'^sglang-smc = "(.+):main"$', (ROOT / "pyproject.toml").read_text(), re.M
        )
        assert found is not None
        return importlib.import_module(found[1]).main(words[1:])
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    if is_module:
        return runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    return runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def outcome(words: list[str]) -> tuple[object, str, list[str]]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = start(words)
        except SystemExit as ended:
            status = ended.code
        except Exception as error:
            status = repr(error)
    lines = said.getvalue().splitlines() or [""]
    return status or 0, lines[-1], [name for name in HEAVY if name in sys.modules]


if __name__ == "__main__":
    program.main_of = main_of  # before a benchmark takes it from there
    asked = json.load(sys.stdin)
    print(json.dumps([outcome(words) for words in asked]))
