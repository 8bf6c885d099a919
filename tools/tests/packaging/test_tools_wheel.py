"""The tools' wheel holds all that the checkout holds, goes with the plugin's, and works there."""

import json
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest
from wheels import ROOT, build, contents, copied, copy_of, metadata, run, unpacked

from sglang_smc import __version__
from sglang_smc.command import cli, extensions

PAIR = "bench/pair"
MODEL = {"chat_template.jinja", "config.json", "model.safetensors"}
MODEL |= {"tokenizer.json", "tokenizer_config.json"}
GENERATES = MODEL | {"generation_config.json"}
HEAD = {"config.json", "model.safetensors"}
#: What is no code, by folder.
DATA = {
    ".": {"py.typed"},
    "view/page": {"page.css", "page.html", "page.js", "picture.js"},
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


def expected_files() -> set[str]:
    """By the real folders: rglob does not follow the links."""
    package = Path("sglang_smc_tools")
    files = {str(package / folder / name) for folder, names in DATA.items() for name in names}
    for folder, place in ((ROOT / "tools" / package, package), (ROOT / PAIR, package / "pair")):
        files |= {str(place / path.relative_to(folder)) for path in folder.rglob("*.py")}
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as users of an index get it: a source distribution, and a wheel from that."""
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "bench").mkdir()
    copy_of(checkout, "tools", PAIR, "LICENSE")
    return build(checkout / "tools")


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(wheel, tmp_path_factory.mktemp("site"))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert contents(wheel) == expected_files()


def test_it_is_of_the_plugins_version_and_needs_that(wheel: Path) -> None:
    told = metadata(wheel)
    required = told.get_all("Requires-Dist")
    assert told["Version"] == __version__ and f"sglang-smc=={__version__}" in required


def test_commands_join_the_plugins(site: Path) -> None:
    (found,) = distributions(path=[str(site)])
    groups: dict[str, dict[str, str]] = {}
    for point in found.entry_points:
        groups.setdefault(point.group, {})[point.name] = point.value
    assert set(groups) == {extensions.COMMANDS, extensions.DOCTOR}
    own = {cli.DOCTOR, cli.COMPILE}
    assert own | {*groups[extensions.COMMANDS]} == set(cli.COMMANDS)
    for name in (value for group in groups.values() for value in group.values()):
        assert (site / name.replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.nightly
@pytest.mark.engine
def test_the_installed_demo_runs_the_pair_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Two servers, from a folder that has nothing, in an environment that borrows all else."""
    venv = tmp_path / "venv"
    empty = tmp_path / "empty"
    empty.mkdir()
    run(tmp_path, sys.executable, "-m", "venv", venv)
    (source := tmp_path / "plugin").mkdir()
    both = build(copied(source)), wheel
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *both]
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
