"""Each command that a page, a benchmark's docstring or the Makefile names is started."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from programs import OFFLINE, printed
from resolved_args import resolved_of
from support.families import FAMILIES

from tests.contract.test_pages import PAGES, ROOT, blocks_of, prose_of

BENCHMARKS = sorted(path.parent.name for path in (ROOT / "bench").glob("*/__main__.py"))
TARGETS = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
LAUNCH = ["-m", "sglang.launch_server"]
PROGRAM = Path(__file__).with_name("start_commands.py")
SPAN = re.compile(r"`((?:make|sglang-smc|bash|python3?|\.venv/bin/python) [^`]+)`")
#: Of the shell, and of other projects.
OTHERS = {"cd", "docker", "echo", "export", "find", "hf", "kubectl", "mkdir", "pip", "rm", "sed"}
OTHERS |= {"ruff", "pyright", "test", "touch"}
OTHER_MODULES = {"build", "mkdocs", "pip", "pytest", "sglang_router", "twine", "venv"}
#: It makes its servers of a table of faults, which are torch's.
IMPORTS_TORCH = "audit"


# --- What is named


def lines_of(script: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell script, without their settings of variables."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set(";&|"):
                words.append(word)
                continue
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []


def named_by(page: Path) -> Iterator[list[str]]:
    """Yield the commands of a page's shell blocks, but of those with `curl`, and of its prose."""
    for script in blocks_of(page, "bash"):
        if "curl " not in script:
            yield from lines_of(script)
    for span in SPAN.findall(prose_of(page)):
        words = span.split()
        is_name = words[0] == "sglang-smc" and len(words) == 2  # which arguments may follow
        yield from lines_of(" ".join([*words, *["--help"] * is_name]))


def named_by_benchmark(name: str) -> Iterator[list[str]]:
    """Yield the commands of the docstring that says how a benchmark is started."""
    doc = (ROOT / "bench" / name / "run.py").read_text().split('"""')[1]
    for line in re.findall(r"^    (?=make|bash|python|\.venv)(.+)$", doc, re.M):
        yield from lines_of(re.split(r"  +", line)[0])


def made_by(words: Iterable[str]) -> Iterator[list[str]]:
    """Yield what `make` would run, on a machine without an environment."""
    yield from lines_of(
        printed("make", "--no-print-directory", "-n", *words, "VENV=/none/venv", cwd=ROOT)
    )


def behind_python(words: list[str]) -> list[str] | None:
    """Return what a command gives Python or is of ours; None for one of another project."""
    name = words[0].rpartition("/")[2]
    if words[0] == "bash":
        return [str(Path(words[1]).parent), *words[2:]]  # bench/gpu/run.sh is a shell around it
    if re.fullmatch(r"python[\d.]*|\$python", name):
        words = words[3:] if words[1] == "-W" else words[1:]
        if words[0] == "-m" and words[1].partition(".")[0] in OTHER_MODULES:
            return None
        return words
    if name == "sglang-smc":
        return [name, *words[1:]]
    if name not in OTHERS:
        raise AssertionError(f"{words} is of no known program; start it here, or list it.")
    return None


def started(commands: list[list[str]]) -> list[tuple[list[str], object, str, list[str]]]:
    """Start commands in a new process, and return each with what became of it."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    return [(words, *one) for words, one in zip(commands, found, strict=True)]


def all_commands() -> list[list[str]]:
    """Return all that are named, each once, those of `make` as what it runs."""
    named = [words for page in PAGES for words in named_by(page)]
    named += [words for name in BENCHMARKS for words in named_by_benchmark(name)]
    named += [["make", name] for names in TARGETS for name in names.split()]
    found: dict[tuple[str, ...], None] = {}
    for words in named:
        for each in made_by(words[1:]) if words[0] == "make" else [words]:
            if behind := behind_python(each):
                found[tuple(behind)] = None
    return [list(words) for words in found]


# --- They start


def test_the_help_of_every_benchmark_waits_for_nothing_heavy() -> None:
    names = sorted(BENCHMARKS, key=lambda name: name == IMPORTS_TORCH)  # that one last
    results = started([[f"bench/{name}", "--help"] for name in names])
    assert len(results) > 10
    assert [one for one in results if one[1] != 0] == []
    assert [(words, heavy) for words, _, _, heavy in results[:-1] if heavy] == []
    assert "sglang" not in results[-1][3]


def test_every_command_of_ours_starts() -> None:
    """Red where a module has moved, a flag is gone, or a value of it is refused."""
    commands = [words for words in all_commands() if words[:2] != LAUNCH]
    scripts = [words[0] for words in commands if words[0].endswith(".py")]
    assert [path for path in scripts if not (ROOT / path).is_file()] == []
    others = [words for words in commands if words[0] not in scripts]
    tools = [words for words in others if words[:2] == ["-m", "contract.upstream"]]
    assert tools and importlib.util.find_spec("contract.upstream") is not None
    results = started([words for words in others if words not in tools])
    assert len(results) > 40
    assert [one for one in results if one[1] != 0] == []


#: A target with an MTP layer, as far as its configuration goes; it stands in for others, too.
MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
}


def with_models_here(words: list[str], folder: Path) -> list[str]:
    """Let the shipped pair stand in for models of a hub, and for a page's own words for them."""
    found = list(words)
    for flag, kind in (("--model-path", "target"), ("--speculative-draft-model-path", "draft")):
        if flag in found:
            place = found.index(flag) + 1
            head = "eagle3" if "eagle3" in found[place].lower() else kind
            path = (
                folder
                if re.search("MiMo|Qwen3.5", found[place])
                else ROOT / "bench" / "pair" / head
            )
            found[place] = str(path)
    return found


#: But for SGLang's own speculation, which needs a GPU.
POTENTIALS = ROOT / "docs" / "potentials.md"
LAUNCHES = [
    words[2:]
    for words in all_commands()
    if words[:2] == LAUNCH and words[2:] != ["--help"] and not {"EAGLE3", "EAGLE"} & {*words}
]


@pytest.mark.parametrize("words", LAUNCHES, ids=" ".join)
def test_every_launch_is_one_that_the_server_takes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as no model is loaded: parsed, resolved and checked."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (rewards,) = (c for c in blocks_of(POTENTIALS, "python") if c.startswith("# my_rewards.py"))
    (tmp_path / "my_rewards.py").write_text(rewards)
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    resolved_of(with_models_here(words, tmp_path))


#: Of benchmarks that start servers of the shipped pair, the least that they measure.
SMALLEST = {
    "fidelity": ["--only", "ar-target-t0.7", "--problems", "2"],
    "drafts": ["--only", "ar-target-t0.7", "--problems", "2"],
    "steering": ["--only", "smc-target-steps-n4", "--problems", "2"],
    "support": ["--only", FAMILIES[0].name],
    "audit": ["--only", "ar", "--answers", "20", "--copies", "3"],
}


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_measures_its_least(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = [f"bench/{name}", *SMALLEST[name], "--output-dir", folder]
    printed(sys.executable, *words, cwd=ROOT, env=OFFLINE)
    assert any(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".json", ".md"))


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_command_of_the_readme_does_all_set_up(target: str) -> None:
    quickstart = (ROOT / "README.md").read_text().partition("\n## Start\n")[2]
    assert re.search(rf"^make {target}\b", quickstart.partition("\n## ")[0], re.M)
    run = [" ".join(words) for words in made_by([target])]
    assert any(line.endswith("-m venv /none/venv") for line in run)
    (installed,) = (i for i, line in enumerate(run) if "-m pip install --editable" in line)
    uses = [i for i, line in enumerate(run) if line.startswith("/none/venv/bin/")]
    assert min(uses) == installed < max(uses)
