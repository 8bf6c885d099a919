"""What goes to a GPU machine, what runs there from the tree, and which kernels come back."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from gpu import run, travel
from programs import printed
from study import REPOSITORY, BenchError

from sglang_smc import __version__
from sglang_smc.command import extensions
from sglang_smc.command.machine import ENTRY_POINTS


def test_the_plugin_runs_from_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang finds its entry points, and another plugin is told."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $PYTHONPATH $@\n")  # in place of an engine
    python.chmod(0o755)
    site = tmp_path / "site"
    variables = {**os.environ, "PYTHON": str(python), "SG_SITE": str(site), "PYTHONPATH": ""}
    for _ in range(2):
        told = printed("bash", REPOSITORY / "bench" / "gpu" / "run.sh", "smoke", env=variables)
        assert told.startswith(
            f"{REPOSITORY}:{REPOSITORY}/tools:{site} bench/gpu --state {site}/state --spent "
        )
    named = {one.name: one for one in distributions(path=[str(site)])}
    assert {one.version for one in named.values()} == {__version__}
    groups = {point.group for point in named[extensions.PACKAGE].entry_points}
    assert groups == {extensions.COMMANDS, extensions.DOCTOR}
    found = named["sglang-smc"]
    points = {(point.group, point.name) for point in found.entry_points}
    assert points == {(group, name) for group, name, _ in ENTRY_POINTS}
    run.preflight(on_gpu=False)
    spec = type("Spec", (), {"origin": str(site / "sglang_smc" / "__init__.py")})
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(BenchError, match="not this tree's"):
        run.preflight(on_gpu=False)


def checkout_of(folder: Path, *names: str) -> Path:
    """Make a tree of git's with files of 1,000 bytes."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(1000))
    (folder / ".gitignore").write_text(".sg/\nignored\n")
    words = ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    for command in (("init", "-q"), ("add", "."), words):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def test_a_copy_for_a_gpu_machine_has_what_stages_read_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where what is carried goes uncounted, or a copy is made that is too large."""
    left_out = "bench/pair/reward/model"
    kept = ("bench/pair/reward_texts.py", "bench/pair/draft/m")
    tree = checkout_of(tmp_path / "tree", left_out, *kept, "gone")
    (tree / "gone").unlink()
    for name in ("new", "ignored", ".sg/part-00", ".sg/triton.tar.xz"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(bytes(1000))
    monkeypatch.setattr(travel, "REPOSITORY", tree)
    expected = {*kept, "new", ".gitignore", ".sg/part-00", ".sg/triton.tar.xz"}
    assert travel.sizes_of(tree).keys() == {left_out, *expected}
    told = travel.pack(tmp_path / "copy")
    assert travel.files_in(tmp_path / "copy") == {*expected, travel.COMMIT}
    assert len((tmp_path / "copy" / travel.COMMIT).read_text().strip()) == 40
    assert "0.0 MiB of 64: " in told and ".sg/part-00 0.0" in told
    with pytest.raises(BenchError, match="is not empty"):
        travel.pack(tmp_path / "copy")
    monkeypatch.setattr(travel, "MOST_CARRIED", 4500)
    with pytest.raises(BenchError, match=r"too many\. Leave out archives of kernels in \.sg"):
        travel.pack(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(BenchError, match="is no checkout"):
        travel.sizes_of(tmp_path)


def test_a_checkout_is_made_to_fit_or_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By git itself. Red where work is lost, or a checkout that is still too large is thinned."""
    left_out = "bench/pair/reward/model"
    kept = "bench/pair/reward_texts.py"
    tree = checkout_of(tmp_path / "tree", left_out, kept)
    monkeypatch.setattr(travel, "REPOSITORY", tree)
    monkeypatch.setattr(travel, "MOST_CARRIED", 900)
    with pytest.raises(BenchError, match="too many"):
        travel.checkout(make=True)
    monkeypatch.setattr(travel, "MOST_CARRIED", 2500)
    assert "'!/bench/pair/reward/'" in travel.checkout(make=False)
    for changed, content in ((left_out, b"changed"), (f"{left_out}.new", b"new")):
        (tree / changed).write_bytes(content)
        with pytest.raises(BenchError, match=r"differ from the commit.*\n.*reward"):
            travel.checkout(make=True)
        assert (tree / left_out).exists()
        subprocess.run(["git", "-C", str(tree), "checkout", "-q", "."], check=True)
    (tree / f"{left_out}.new").unlink()
    for _ in range(2):  # again where it is done
        assert "0.0 MiB of 64" not in travel.checkout(make=True)
        assert not (tree / left_out).exists() and (tree / kept).exists()
        assert len((tree / travel.COMMIT).read_text().strip()) == 40
    subprocess.run(["git", "-C", str(tree), "sparse-checkout", "disable"], check=True)
    assert (tree / left_out).exists()


#: Of SGLang 0.5.23 with what it needs, as one file.
PAYLOAD_BYTES = 37_250_000


def test_the_tree_leaves_room_for_a_payload_and_compiled_kernels() -> None:
    """Red where a stage is given large files without others being left out."""
    every = travel.sizes_of(REPOSITORY)
    kept = {n: s for n, s in every.items() if not n.startswith((*travel.UNREAD, ".sg/"))}
    assert sum(kept.values()) + PAYLOAD_BYTES + 10 * travel.MIB <= travel.MOST_CARRIED
    assert all(any(name.startswith(one) for name in every) for one in travel.UNREAD)


def test_kernels_compiled_on_one_machine_come_back_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's, as 0.5.23's payload compiles them where none were brought, and Triton's."""
    tree = tmp_path / "tree"
    folder = REPOSITORY / "bench" / "gpu"
    (tree / "bench" / "gpu").mkdir(parents=True)
    shutil.copy(folder / "run.sh", tree / "bench" / "gpu")
    for name in ("pyproject.toml", "sglang_smc", "tools"):
        (tree / name).symlink_to(REPOSITORY / name)
    (tree / ".sg").mkdir()
    (tree / ".sg" / "assemble.py").write_text(
        "import pathlib, sys\njit = pathlib.Path(sys.argv[3]) / '.jit'\n"
        "print(sys.argv[1:3], jit.is_dir())\njit.mkdir(exist_ok=True)\n(jit / 'rope.so').touch()\n"
    )
    (tmp_path / "python").write_text(
        f"#!/bin/sh\nif [ $1 = bench/gpu ]; then env; else {sys.executable} $@; fi\n"
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(travel, "REPOSITORY", tree)
    command = "bash", tree / "bench" / "gpu" / "run.sh", "smoke"
    for machine, compiles, told, brings in (
        ("one", "verify.cubin", "['.sg', '--site'] False", {"jit.tar.xz", "triton.tar.xz"}),
        ("two", "verify.cubin", "['.sg', '--site'] True", set()),
        ("two", "new.cubin", "", {"triton.tar.xz"}),  # assembled already
    ):
        site = tmp_path / machine
        out = tmp_path / f"{machine}-{compiles}"
        out.mkdir()
        environment = {"PYTHON": str(tmp_path / "python"), "SG_SITE": str(site)}
        lines = printed(*command, env={**os.environ, **environment}).splitlines()
        assert [line for line in lines if line.startswith("['.sg'")] == [told] * bool(told)
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        assert variables["TRITON_STORE_BINARY_ONLY"] == "1"
        for variable in travel.CACHES.values():
            monkeypatch.setenv(variable, variables[variable])
        (site / ".triton" / "hash").mkdir(parents=True, exist_ok=True)
        (site / ".triton" / "hash" / compiles).touch()
        travel.bring_back(out)
        assert {path.name for path in out.iterdir()} == brings
        for archive in brings:
            shutil.copy(out / archive, tree / ".sg")


def test_an_archive_of_kernels_that_is_too_large_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in nobody's way."""
    monkeypatch.setattr(travel, "REPOSITORY", tmp_path)
    monkeypatch.setattr(travel, "MOST_ARCHIVED", 10)
    monkeypatch.delenv("SGLANG_JIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one").touch()
    told: list[str] = []
    travel.bring_back(tmp_path, told.append)
    assert told == ["triton.tar.xz is not brought back: 0.0 MiB, of at most 0"]
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]
