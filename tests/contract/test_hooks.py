"""Hooks are listed, recorded, in force, and missed when they are not."""

from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from sglang_smc.server import algorithm, hooks

ROOT = Path(__file__).parents[2]


def test_every_patch_file_is_listed() -> None:
    files = {path.stem for path in (ROOT / "patches").glob("*.py")}
    assert files == set(hooks.PATCH_MODULES)


def test_catalogue_is_fresh() -> None:
    written = (ROOT / "patches" / "README.md").read_text()
    assert written == hooks.catalogue(hooks.collect()), "run `make catalogue`"


def test_all_hooks_are_in_force() -> None:
    assert hooks.missing() == []


@pytest.mark.parametrize("target", [patch.target for patch in hooks.collect()])
def test_hook_that_did_not_land_is_named(
    monkeypatch: pytest.MonkeyPatch, smc: dict, target: str
) -> None:
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(RuntimeError, match=target):
        ServerArgs(**smc)
    with pytest.raises(RuntimeError, match=target):  # the scheduler is a process of its own
        algorithm.worker_class(ServerArgs(model_path="dummy"))


@pytest.mark.parametrize("target", [patch.target for patch in hooks.collect()])
def test_target_patched_by_others_does_not_count(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setitem(HookRegistry._hooks, target, [])
    assert set(hooks.missing()) == {target}


def test_install_is_idempotent() -> None:
    before = {target: list(found) for target, found in HookRegistry._hooks.items()}
    hooks.install(hooks.collect())
    assert dict(HookRegistry._hooks) == before


def test_patch_file_that_does_not_import_is_told(
    monkeypatch: pytest.MonkeyPatch, smc: dict
) -> None:
    """SGLang swallows the error when it loads plugins; selecting SMC must bring it back."""
    monkeypatch.setattr(hooks, "PATCH_MODULES", ("gone",))
    with pytest.raises(ModuleNotFoundError, match=r"sglang_smc\.patches\.gone"):
        ServerArgs(**smc)
