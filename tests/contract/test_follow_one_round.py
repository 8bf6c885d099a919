"""The path through one round in CONTRIBUTING.md: each function stands where the page says."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (
    (ROOT / "CONTRIBUTING.md")
    .read_text()
    .partition("\n## Follow one round\n")[2]
    .partition("\n## ")[0]
)
STOP = re.compile(
    r"^\d\. \[`(?P<shown>.+?)`\]\((?P<path>.+?)#L(?P<line>\d+)\), (?P<text>.+)$", re.M
)


class Stop(NamedTuple):
    """One place to read at."""

    path: str
    line: int
    functions: list[str]  # the first stands at the line, the others in the same class or file


STOPS = [
    Stop(found["path"], int(found["line"]), re.findall(r"`([\w.]+)`", found["text"]))
    for found in STOP.finditer(SECTION)
    if found["shown"] == found["path"]
]


def lines_of(path: str) -> dict[str, int]:
    """`function` or `Class.method` -> its line."""
    found = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for one in inner:
            if isinstance(one, ast.FunctionDef):
                found[owner + one.name] = one.lineno
    return found


def test_the_path_is_short() -> None:
    assert len(STOPS) == len(re.findall(r"^\d\. ", SECTION, re.M)) >= 4
    assert len({stop.path for stop in STOPS}) <= 5


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: f"{stop.path}:{stop.line}")
def test_each_function_stands_there(stop: Stop) -> None:
    lines = lines_of(stop.path)
    first, *others = stop.functions
    assert lines[first] == stop.line
    owner = first.rpartition(".")[0]
    assert all(name in lines or f"{owner}.{name}" in lines for name in others)
