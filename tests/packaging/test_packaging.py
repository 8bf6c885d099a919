"""What users install holds all that the checkout holds, under the names that the code imports."""

import importlib.machinery
import json
import os
import re
import shutil
import sys
import sysconfig
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from programs import printed

from sglang_smc.upstream import SUPPORTED

ROOT = Path(__file__).parents[2]
MAPPED = {
    "kernels": "sglang_smc/kernels",
    "bench/pair": "sglang_smc/pair",
    "patches": "sglang_smc/patches",
}
MODEL = {"chat_template.jinja", "config.json", "model.safetensors"}
MODEL |= {"tokenizer.json", "tokenizer_config.json"}
GENERATES, HEAD = MODEL | {"generation_config.json"}, {"config.json", "model.safetensors"}
#: What is no code, by folder.
DATA = {
    ".": {"py.typed"},
    "kernels": {"README.md"},
    "tools/view/page": {"page.css", "page.html", "page.js", "picture.js"},
    "pair": {"README.md", "measurements.json", "provenance.json"},
    "pair/target": GENERATES,
    "pair/draft": GENERATES,
    "pair/tuned": GENERATES | {"distill.json"},
    "pair/reward": MODEL,
    "pair/eagle3": HEAD | {"distill.json"},
    "pair/mtp": HEAD | {"distill.json"},
    "pair/dflash": HEAD | {"distill.json"},
    "pair/dspark": HEAD | {"distill.json"},
}
ADDRESS, REVISION = "SGLANG_SMC_REPOSITORY", "SGLANG_SMC_REVISION"
REPOSITORY, TAG = "https://github.com/o/n", "v1.2"
ENTRY_POINTS = {
    "sglang.srt.plugins": {"smc": "sglang_smc.plugin:register"},
    "sglang.srt.platforms": {"smc_cpu": "sglang_smc.cpu.platform:activate"},
    "console_scripts": {"sglang-smc": "sglang_smc.command.cli:main"},
}


def expected_files() -> set[str]:
    """By the real folders: rglob does not follow the links."""
    package = Path("sglang_smc")
    files = {str(package / folder / name) for folder, names in DATA.items() for name in names}
    for folder, place in {"sglang_smc": "sglang_smc", **MAPPED}.items():
        sources = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py"))
        files |= {f"{place}/{path}" for path in sources}
    return files


def run(folder: Path, *command: object, **variables: str) -> str:
    """What a command prints in a folder; it must end well."""
    ours = ("PYTHONPATH", ADDRESS, REVISION)
    outside = {name: value for name, value in os.environ.items() if name not in ours}
    return printed(*command, cwd=folder, env=outside | variables)


def build(source: Path, *options: str, **variables: str) -> Path:
    """Build in this environment, without an index; return the wheel."""
    words = [sys.executable, "-m", "build", "--no-isolation", *options, source]
    run(source.parent, *words, **variables)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def copied(folder: Path) -> Path:
    """What a build needs of the checkout: building leaves files behind."""
    junk = shutil.ignore_patterns("__pycache__")
    for name in ("sglang_smc", *MAPPED):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=junk)
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as users of an index get it: a source distribution, and a wheel from that."""
    return build(copied(tmp_path_factory.mktemp("checkout")))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as an installer would lay them out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Any:
    (found,) = distributions(path=[str(wheel)])
    return found.metadata


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert contents(wheel) == expected_files()


def test_wheel_metadata_allows_the_supported_releases(wheel: Path) -> None:
    required = " ".join(metadata(wheel).get_all("Requires-Dist") or ())
    found = re.search(r"\bsglang([<>=!~][^\s;]*)", required)
    assert found is not None
    allowed = SpecifierSet(found[1])
    assert all(release in allowed for release in SUPPORTED)
    assert not any(f"0.5.{patch}" in allowed for patch in (16, 18, 19, 20, 21, 24))


LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def test_without_an_address_no_link_leads_nowhere(wheel: Path) -> None:
    text = " ".join(metadata(wheel).get_payload().split())
    assert all(re.match(r"\w+:", link) for _, link in LINK.findall(text))
    assert "](docs/" not in text and "docs/reference.md" not in text
    assert "what is tested where" in text


PROBE = """
import json, sys
from importlib.metadata import distribution
from importlib.util import find_spec
import sglang_smc
heavy = {"torch", "sglang", "msgspec", "pandas", "matplotlib"} & set(sys.modules)
points = {}
for point in distribution("sglang-smc").entry_points:
    points.setdefault(point.group, {})[point.name] = point.value
names = ["", ".plugin", ".patches.server_args", ".smc"]
print(json.dumps([list(heavy), points, [find_spec("sglang_smc" + name).origin for name in names]]))
"""


def test_the_wheels_files_work_from_an_empty_directory(site: Path, tmp_path: Path) -> None:
    told = run(tmp_path, sys.executable, "-c", PROBE, PYTHONPATH=str(site))
    heavy, points, origins = json.loads(told)
    assert (heavy, points) == ([], ENTRY_POINTS)
    assert all(Path(origin).is_relative_to(site) for origin in origins)
    for group in ENTRY_POINTS.values():
        for module, function in (value.split(":") for value in group.values()):
            source = (site / module.replace(".", "/")).with_suffix(".py").read_text()
            assert f"def {function}(" in source


def test_the_installed_doctor_finds_wheel_and_pair_sound(site: Path, tmp_path: Path) -> None:
    """As a user runs it: in a process of its own, which has the hooks put in force."""
    words = [sys.executable, "-m", "sglang_smc.command", "doctor", "--json"]
    words += [f"--{name}={site}/sglang_smc/pair/{name}" for name in ("target", "draft")]
    listed = json.loads(run(tmp_path, *words, PYTHONPATH=str(site)))
    found = {one["about"]: one for one in listed}
    assert {one["level"] for one in listed} <= {"ok", "warning"}
    assert all(one["do"] for one in listed if one["level"] == "warning")
    assert found["hooks"]["numbers"]["count"] > 20
    assert found["vocabulary"]["numbers"] == {"tokens": 512}
    assert found["server arguments"]["level"] == "ok"
    assert found["mode smc"]["numbers"]["arena"] == 105


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the release workflow builds it."""
    variables = {ADDRESS: REPOSITORY, REVISION: TAG}
    return build(copied(tmp_path_factory.mktemp("released")), **variables)


@pytest.mark.nightly
def test_links_of_a_release_lead_into_its_repository(released: Path) -> None:
    """Each to a file that is there; pictures as they are, and not the page about them."""
    found = LINK.findall(metadata(released).get_payload())
    in_tree = LINK.findall((ROOT / "README.md").read_text())
    assert len(found) == len(in_tree) > 20
    for (mark, link), (_, original) in zip(found, in_tree, strict=True):
        if re.match(r"\w+:", original):
            assert link == original
            continue
        raw = f"https://raw.githubusercontent.com/o/n/{TAG}/"
        assert link == (raw if mark else f"{REPOSITORY}/blob/{TAG}/") + original
        assert (ROOT / original.partition("#")[0]).exists()
    urls = dict(url.split(", ") for url in metadata(released).get_all("Project-URL") or ())
    assert urls["Repository"] == REPOSITORY and len(urls) == 5


@pytest.mark.nightly
def test_twine_takes_both(released: Path, tmp_path: Path) -> None:
    pytest.importorskip("twine", reason="twine is not installed: pip install '.[test]'")
    words = [sys.executable, "-m", "twine", "check", "--strict", *released.parent.iterdir()]
    assert run(tmp_path, *words).count("PASSED") == 2


@pytest.mark.nightly
def test_wheel_from_an_archive_that_lost_its_links(tmp_path: Path) -> None:
    """Zip archives and some file systems drop symbolic links; the wheel must not need them."""
    unlinked = copied(tmp_path)
    for package in MAPPED.values():
        (unlinked / package).unlink()
    assert contents(build(unlinked, "--wheel")) == expected_files()


@pytest.mark.nightly
@pytest.mark.engine
def test_the_installed_demo_runs_the_pair_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Two servers, from a folder that has nothing, in an environment that borrows all else."""
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    run(tmp_path, sys.executable, "-m", "venv", venv)
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    run(tmp_path, venv / "bin" / "python", *install)
    (packages,) = (venv / "lib").glob("python*/site-packages")
    # Behind its own, so that the wheel comes first; this one's own .pth files are not read.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    numbers = empty / "numbers.json"
    told = run(empty, venv / "bin" / "sglang-smc", "demo", "--quick", "--json", numbers)
    assert "The target alone:" in told and "The target with SMC:" in told
    rows = {row["row"]: row for row in json.loads(numbers.read_text())["rows"]}
    assert rows["AR, target alone"]["tokens_per_target_pass"] == 1
    for mode in ("smc", "auto", "exact"):
        assert 3 < rows[f"SMC, mode {mode}"]["tokens_per_target_pass"] <= 9
    assert list(empty.iterdir()) == [numbers], "its logs went with it"


def test_the_checkout_is_laid_out_for_both() -> None:
    """Links are relative, and no folder shadows a dependency where the checkout is first."""
    for folder, package in MAPPED.items():
        assert (ROOT / package).is_symlink() and os.readlink(ROOT / package) == f"../{folder}"
    for folder in (*MAPPED, "tests", "bench"):
        assert not (ROOT / folder / "__init__.py").exists()
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    for name in sorted(path.stem for path in ROOT.iterdir() if path.stem.isidentifier()):
        dependency = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        if dependency is None or dependency.origin is None or name == "sglang_smc":
            continue
        found = importlib.machinery.PathFinder.find_spec(name, [str(ROOT), *elsewhere])
        assert found is not None and found.origin == dependency.origin
