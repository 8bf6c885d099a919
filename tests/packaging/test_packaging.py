"""What users install holds all that the checkout holds, under the names that the code imports."""

import importlib.machinery
import json
import os
import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from wheels import (
    ADDRESS,
    MAPPED,
    REVISION,
    ROOT,
    build,
    contents,
    copied,
    metadata,
    run,
    unpacked,
)

from sglang_smc.upstream import SUPPORTED

#: What is no code, by folder.
DATA = {".": {"py.typed"}, "kernels": {"README.md"}}
MOST_BYTES = 1_500_000  # of the wheel
REPOSITORY = "https://github.com/o/n"
TAG = "v1.2"
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as users of an index get it: a source distribution, and a wheel from that."""
    return build(copied(tmp_path_factory.mktemp("checkout")))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(wheel, tmp_path_factory.mktemp("site"))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert contents(wheel) == expected_files()
    assert wheel.stat().st_size < MOST_BYTES


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


def test_the_installed_doctor_finds_the_wheel_sound(site: Path, tmp_path: Path) -> None:
    """As a user runs it: in a process of its own, which has the hooks put in force."""
    words = [sys.executable, "-m", "sglang_smc.command", "doctor", "--json"]
    listed = json.loads(run(tmp_path, *words, PYTHONPATH=str(site)))
    found = {one["about"]: one for one in listed}
    assert {one["level"] for one in listed} <= {"ok", "warning"}
    assert all(one["do"] for one in listed if one["level"] == "warning")
    assert found["hooks"]["numbers"]["count"] > 20


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


def test_the_checkout_is_laid_out_for_both() -> None:
    """Links are relative, and no folder shadows a dependency where the checkout is first."""
    for folder, package in MAPPED.items():
        assert (ROOT / package).is_symlink() and os.readlink(ROOT / package) == f"../{folder}"
    for folder in (*MAPPED, "tests", "bench", "tools", "tools/tests"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert os.readlink(ROOT / "tools" / "sglang_smc_tools" / "pair") == "../../bench/pair"
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    for name in sorted(path.stem for path in ROOT.iterdir() if path.stem.isidentifier()):
        dependency = importlib.machinery.PathFinder.find_spec(name, elsewhere)
        if dependency is None or dependency.origin is None or name == "sglang_smc":
            continue
        found = importlib.machinery.PathFinder.find_spec(name, [str(ROOT), *elsewhere])
        assert found is not None and found.origin == dependency.origin
