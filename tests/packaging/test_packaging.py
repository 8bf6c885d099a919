"""What users install holds all that the checkout holds, under the names that the code imports."""

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from sglang_smc.upstream import SUPPORTED

ROOT = Path(__file__).parents[2]
MAPPED = {
    "kernels": "sglang_smc/kernels",
    "bench/pair": "sglang_smc/pair",
    "patches": "sglang_smc/patches",
}
DATA = [
    "sglang_smc/py.typed",
    "sglang_smc/kernels/README.md",
    "sglang_smc/patches/README.md",
    *(
        f"sglang_smc/view/page/{name}"
        for name in ("page.css", "page.html", "page.js", "picture.js")
    ),
    *(f"sglang_smc/pair/{name}" for name in ("README.md", "measurements.json", "provenance.json")),
    *(
        f"sglang_smc/pair/{model}/{name}"
        for model in ("target", "draft", "tuned")
        for name in (
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    ),
    "sglang_smc/pair/tuned/distill.json",
    *(
        f"sglang_smc/pair/reward/{name}"
        for name in (
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    ),
    *(
        f"sglang_smc/pair/{head}/{name}"
        for head in ("eagle3", "dflash")
        for name in ("config.json", "distill.json", "model.safetensors")
    ),
]
ADDRESS, REVISION = "SGLANG_SMC_REPOSITORY", "SGLANG_SMC_REVISION"
REPOSITORY, TAG = "https://github.com/o/n", "v1.2"
ENTRY_POINTS = {
    "sglang.srt.plugins": {"smc": "sglang_smc.plugin:register"},
    "sglang.srt.platforms": {"smc_cpu": "sglang_smc.cpu.platform:activate"},
    "console_scripts": {"sglang-smc": "sglang_smc.command.cli:main"},
}


def expected_files() -> set[str]:
    """By the real folders: rglob does not follow the links."""
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "sglang_smc").rglob("*.py")}
    for folder, package in MAPPED.items():
        sources = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py"))
        files |= {f"{package}/{path}" for path in sources}
    return files | set(DATA)


def build(source: Path, *options: str, **variables: str) -> Path:
    """Build in this environment, without an index; return the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, str(source)]
    environment = {name: os.environ[name] for name in os.environ if name not in (ADDRESS, REVISION)}
    subprocess.run(command, env=environment | variables, check=True, capture_output=True, text=True)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since building leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout") / "sglang-smc"
    junk = shutil.ignore_patterns("__pycache__")
    for folder in ("sglang_smc", *MAPPED):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=junk)
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """Built as users of an index get it: a source distribution, and a wheel from that."""
    return build(checkout)


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def released(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the release workflow builds it."""
    copy = tmp_path_factory.mktemp("released") / "sglang-smc"
    junk = shutil.ignore_patterns("dist", "build")
    shutil.copytree(checkout, copy, symlinks=True, ignore=junk)
    return build(copy, **{ADDRESS: REPOSITORY, REVISION: TAG})


def test_source_archive_holds_what_the_wheel_is_built_from(wheel: Path) -> None:
    (archive,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {
            name.partition("/")[2] for name in opened.getnames() if opened.getmember(name).isfile()
        }
    sources = set(expected_files())
    for folder, package in MAPPED.items():
        sources = {re.sub(f"^{package}/", f"{folder}/", name) for name in sources}
    beside = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    assert {name for name in names if ".egg-info/" not in name} == sources | beside


def test_twine_takes_both(released: Path) -> None:
    pytest.importorskip("twine", reason="twine is not installed: pip install '.[test]'")
    files = map(str, released.parent.iterdir())
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.count("PASSED") == 2, found.stdout


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def test_links_of_a_release_lead_into_its_repository(released: Path) -> None:
    """Each to a file that is there; pictures as they are, and not the page about them."""
    found = LINK.findall(metadata(released).get_payload())
    in_tree = LINK.findall((ROOT / "README.md").read_text())
    assert len(found) == len(in_tree) > 20
    for (mark, link), (_, original) in zip(found, in_tree, strict=True):
        if re.match(r"\w+:", original):
            assert link == original
            continue
        start = (
            f"https://raw.githubusercontent.com/o/n/{TAG}/" if mark else f"{REPOSITORY}/blob/{TAG}/"
        )
        assert link == start + original
        assert (ROOT / original.partition("#")[0]).exists()
    urls = dict(url.split(", ") for url in metadata(released).get_all("Project-URL") or ())
    assert urls["Repository"] == REPOSITORY and len(urls) == 5


def test_without_an_address_no_link_leads_nowhere(wheel: Path) -> None:
    text = " ".join(metadata(wheel).get_payload().split())
    assert all(re.match(r"\w+:", link) for _, link in LINK.findall(text))
    assert "](docs/" not in text and "docs/reference.md" not in text
    for words in ("All flags, request keys and answer fields", "all pages"):
        assert words in text


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert contents(wheel) == expected_files()


def test_wheel_from_an_archive_that_lost_its_links(
    checkout: Path, tmp_path: Path, wheel: Path
) -> None:
    """Zip archives and some file systems drop symbolic links; the wheel must not need them."""
    unlinked = tmp_path / "sglang-smc"
    shutil.copytree(
        checkout, unlinked, symlinks=True, ignore=shutil.ignore_patterns("dist", "build")
    )
    for package in MAPPED.values():
        (unlinked / package).unlink()
    assert contents(build(unlinked, "--wheel")) == contents(wheel)


def test_installed_wheel_works_from_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    empty = tmp_path / "empty"
    empty.mkdir()
    found = subprocess.run(
        [sys.executable, "-c", _PROBE],
        cwd=empty,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
    )
    report = json.loads(found.stdout)
    assert report["entry_points"] == ENTRY_POINTS
    assert report["heavy"] == []
    for origin in report["origins"]:
        assert Path(origin).is_relative_to(tmp_path / "site")


_PROBE = """
import json, sys
from importlib.metadata import distribution
from importlib.util import find_spec
import sglang_smc
heavy = [name for name in ("torch", "sglang", "msgspec") if name in sys.modules]
entry_points = {}
for point in distribution("sglang-smc").entry_points:
    entry_points.setdefault(point.group, {})[point.name] = point.value
names = ["sglang_smc", "sglang_smc.plugin", "sglang_smc.patches.server_args", "sglang_smc.smc"]
origins = [find_spec(name).origin for name in names]
print(json.dumps({"heavy": heavy, "entry_points": entry_points, "origins": origins}))
"""


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed command, in an environment that borrows all else from this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, env=without_path())
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Behind its own, so that the wheel comes first; this one's own .pth files are not read.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent / "sglang-smc"


def without_path() -> dict[str, str]:
    """The environment, without the checkout that it may lead to."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(command: Path, folder: Path, *words: str) -> str:
    """What the installed command prints in an empty folder; it must end well."""
    found = subprocess.run(
        [str(command), *words], cwd=folder, env=without_path(), capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_installed_doctor_finds_the_wheel(command: Path, tmp_path: Path) -> None:
    found = {one["about"]: one for one in json.loads(run(command, tmp_path, "doctor", "--json"))}
    assert {one["level"] for one in found.values()} <= {"ok", "warning"}
    assert found["hooks"]["numbers"]["count"] > 20


@pytest.mark.engine
def test_the_installed_demo_runs_the_pair_of_the_wheel(command: Path, tmp_path: Path) -> None:
    """Two servers, from a folder that has nothing."""
    numbers = tmp_path / "numbers.json"
    printed = run(command, tmp_path, "demo", "--quick", "--json", str(numbers))
    assert "The target alone:" in printed and "The target with SMC:" in printed
    rows = {row["row"]: row for row in json.loads(numbers.read_text())["rows"]}
    assert rows["AR, target alone"]["tokens_per_target_pass"] == 1
    for mode in ("smc", "auto", "exact"):
        assert 3 < rows[f"SMC, mode {mode}"]["tokens_per_target_pass"] <= 9
    assert list(tmp_path.iterdir()) == [numbers], "its logs went with it"


def test_entry_points_name_existing_functions() -> None:
    for group in ENTRY_POINTS.values():
        for value in group.values():
            module, function = value.split(":")
            source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
            assert f"def {function}(" in source


def test_wheel_metadata_allows_the_supported_releases(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        found = re.search(r"^Requires-Dist: sglang(\S+)$", archive.read(metadata).decode(), re.M)
        assert found is not None
        allowed = SpecifierSet(found[1])
        assert all(release in allowed for release in SUPPORTED)
        assert not any(f"0.5.{patch}" in allowed for patch in (16, 18, 19, 20, 21, 24))
        (points,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        parser = ConfigParser()
        parser.read_string(archive.read(points).decode())
    assert {name: dict(parser[name]) for name in parser.sections()} == ENTRY_POINTS


@pytest.mark.parametrize("folder", MAPPED)
def test_links_stay_relative_links(folder: str) -> None:
    link = ROOT / MAPPED[folder]
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("folder", ["tests", "bench"])
def test_top_level_folder_is_no_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_nothing_here_shadows_a_dependency() -> None:
    """With the checkout first on the path, as in `python -m sglang.launch_server` run from it."""
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    for name in sorted(path.stem for path in ROOT.iterdir() if path.stem.isidentifier()):
        dependency = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        if dependency is None or dependency.origin is None or name == "sglang_smc":
            continue
        found = importlib.machinery.PathFinder.find_spec(name, [str(ROOT), *elsewhere])
        assert found is not None
        assert found.origin == dependency.origin
