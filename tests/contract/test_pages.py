"""What the pages say of files, flags, keys and fields is so."""

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from figures import figures_of
from resolved_args import field_names
from transformers import AutoTokenizer

from sglang_smc.options import request, server
from sglang_smc.server import refusals
from sglang_smc.state import metrics
from sglang_smc_tools.plan import cli as plan
from sglang_smc_tools.testing import check_potential

ROOT = Path(__file__).parents[2]
FOLDERS_OF_PAGES = (".", "docs", "kernels", "patches", "bench", "deploy", "*/*")
PAGES = sorted(
    path
    for folder in FOLDERS_OF_PAGES
    for path in ROOT.glob(f"{folder}/*.md")
    if not any(part.startswith(".") or part in ("build", "dist") for part in path.parts)
)
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```(\w+)\n(.*?)```", re.S)
FOLDERS = "sglang_smc|kernels|patches|tests|bench|deploy|docs|examples"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose_of(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def blocks_of(page: Path, language: str) -> list[str]:
    return [code for kind, code in CODE.findall(page.read_text()) if kind == language]


def is_there(page: Path, link: str) -> bool:
    """Return whether a link leads to a file, and a line of it; `make docs` checks other anchors."""
    target, _, anchor = link.partition("#")
    path = (page.parent / target).resolve() if target else page
    if not path.exists():
        return False
    is_line = re.fullmatch(r"L\d+", anchor)
    return not is_line or int(anchor[1:]) <= len(path.read_text().splitlines())


def test_links_and_paths_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        prose = prose_of(page)
        links = [link for link in LINK.findall(prose) if not re.match(r"\w+:", link)]
        paths = re.findall(rf"`((?:{FOLDERS})/[\w./-]+\.\w+)`", prose)
        lost += [(name_of(page), link) for link in links if not is_there(page, link)]
        lost += [(name_of(page), path) for path in paths if not (ROOT / path).exists()]
    assert lost == []


def commands_of(page: Path) -> Iterator[list[str]]:
    """The command lines in its shell blocks, comments dropped."""
    for block in blocks_of(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if "curl" in block:
                break
            if words := shlex.split(line, comments=True):
                yield words


def test_flags_of_speculative_decoding_exist() -> None:
    known = {name.replace("_", "-") for name in field_names()}
    for page in PAGES:
        named = set(re.findall(r"--(speculative-[a-z-]*[a-z])", page.read_text()))
        assert named - known == set(), name_of(page)


def test_python_on_pages_compiles_and_names_real_keywords() -> None:
    known = set(field_names())
    trees = [ast.parse(code) for page in PAGES for code in blocks_of(page, "python")]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "sgl.Engine":
            assert {keyword.arg for keyword in node.keywords} <= known, ast.unparse(node)


def test_a_potential_is_checked_as_its_page_says() -> None:
    """Red where a `Text` is made of something else."""
    how = {"tokenizer": AutoTokenizer.from_pretrained(ROOT / "bench" / "pair" / "target")}
    how |= {"__name__": "my_rewards", "check_potential": check_potential}
    for code in blocks_of(ROOT / "docs" / "potentials.md", "python"):
        exec(code, how)
    assert how["texts"][0].output == " please come"


def test_following_one_round_leads_through_few_files() -> None:
    """Each link of CONTRIBUTING.md's path goes to the line of its name; others are in its files."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("\n## Follow one round\n")[2].partition("\n## ")[0]
    links = re.findall(r"\[`([\w.]+)`[^\]]*\]\((.+?)#L(\d+)\)", section)
    known = {path: lines_of(path) for _, path, _ in links}
    assert len(links) >= 8 and len(known) <= 7
    assert [(name, known[path].get(name)) for name, path, _ in links] == [
        (name, int(line)) for name, _, line in links
    ]
    full = [name for lines in known.values() for name in lines]
    names = {*full, *(name.rpartition(".")[2] for name in full), "smc"}
    assert set(re.findall(r"`([\w.]+)`", section)) <= names


def lines_of(path: str) -> dict[str, int]:
    """`function`, `Class` or `Class.method` -> its line."""
    found = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node.lineno
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                found[f"{node.name}.{inner.name}"] = inner.lineno
    return found


def items_below(heading: str) -> list[str]:
    """What the items of the list below a heading of the reference are about."""
    section = REFERENCE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [row.split(": ")[0] for row in section.splitlines() if row.startswith("- `")]


def test_the_tables_of_settings_are_what_these_give() -> None:
    """Red where settings have changed and `python docs/write_reference.py` was not run."""
    found = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))
    for name in found["PAGES"]:
        page = (ROOT / "docs" / name).read_text()
        assert found["written"](name, page) == page
    assert all(f"| `{server.flag_of(name)}` |" in REFERENCE for name in server.SETTINGS)
    assert all(f"| `{name}` |" in REFERENCE for name in request.KEYS)


@pytest.mark.parametrize("name", ["drafts.md", "families.md"])
def test_what_is_said_of_published_drafts_is_their_table(name: str) -> None:
    """Red where the table has changed and `python docs/write_drafts.py` was not run."""
    writer = runpy.run_path(str(ROOT / "docs" / "write_drafts.py"))
    page = (ROOT / "docs" / name).read_text()
    assert writer["MARK"] in page and writer["written"](name) == page


def test_all_are_named_in_their_places() -> None:
    """Refused fields, metrics, and kernels that have a reference."""
    kernels = {
        name: ROOT / "kernels" / "README.md"
        for path in (ROOT / "kernels").rglob("*.py")
        for name in (path.relative_to(ROOT / "kernels").as_posix(), *referring(path))
    }
    operations = ROOT / "docs" / "operations.md"
    shown = [f"{total.name}_total" for total in metrics.COUNTERS]
    shown += [one.name for one in (*metrics.GAUGES, metrics.USELESS_DRAFTS, *metrics.HISTOGRAMS)]
    section = REFERENCE.partition("\n## What is HTTP 400\n")[2]
    assert [r.field for r in refusals._FIELDS if f"`{r.field}`" not in section] == []
    named = kernels | dict.fromkeys(shown, operations)
    assert len(kernels) > 5 and len(shown) > 5
    assert [name for name, page in named.items() if f"`{name}`" not in page.read_text()] == []


def referring(path: Path) -> list[str]:
    """Functions of a file whose docstrings name their reference."""
    functions = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef))
    return [one.name for one in functions if "Reference:" in (ast.get_docstring(one) or "")]


def test_every_answer_field_has_a_row() -> None:
    config = request.RequestConfig()
    told = metrics.meta_info(metrics.zero_counters(1), config, 0)
    asked_for = {metrics.META_PREFIX + name for name in ("particles", "trace")}
    named = set(re.findall(r"`(\w+)`", "".join(items_below("Answer fields"))))
    assert named == {*told, *asked_for}


def test_every_environment_variable_is_listed() -> None:
    sources = [*(ROOT / "sglang_smc").rglob("*.py"), *(ROOT / "patches").glob("*.py")]
    text = "".join(path.read_text() for path in sources)
    read = set(re.findall(r'"(SGLANG_SMC_\w+)"', text))
    named = set(re.findall(r"`(SGLANG_SMC_\w+)", "".join(items_below("Environment variables"))))
    assert named == read


def test_the_plan_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "expect.md"
    (command,) = (words for words in commands_of(page) if "plan" in words)
    assert plan.main(command[2:]) == 0
    printed = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    after = page.read_text().partition("sglang-smc plan")[2]
    shown = after.partition("```text\n")[2].partition("```")[0].splitlines()
    assert len(shown) == 5
    assert {" ".join(line.split()) for line in shown} <= printed


def test_each_figure_of_readme_is_a_published_one() -> None:
    """A row's stand in one line of a results file that is named right below, as milliseconds do."""
    count = 0
    for block, below in pairwise((ROOT / "README.md").read_text().split("\n\n")):
        rows = [row for row in block.splitlines() if row.startswith("| ") and figures_of(row)]
        sources = re.findall(r"\]\((bench/results/\S+?)\)", below) if rows else []
        known = [figures_of(line) for source in sources for line in (ROOT / source).open()]
        assert [row for row in rows if not any(figures_of(row) <= one for one in known)] == []
        assert not rows or set(re.findall(r"([\d.]+) ms", below)) <= set().union(*known)
        count += len(rows)
    assert count > 5
