"""Hooks are listed, recorded, installed where they are needed, and missed when they are not."""

import pickle
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from resolved_args import resolve
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs

from sglang_smc.cpu.platform import PlainCpuPlatform
from sglang_smc.server import algorithm, hooks

ROOT = Path(__file__).parents[2]


def targets(group: hooks.Group) -> list[str]:
    return [patch.target for patch in hooks.collect(group)]


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[hooks.Group]:
    """The groups that are to be put in force; none is."""
    asked: list[hooks.Group] = []
    monkeypatch.setattr(hooks, "put_in_force", asked.append)
    return asked


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A target that SGLang fails to patch."""
    for group in hooks.GROUPS:
        hooks.put_in_force(group)
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {request.param})
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    return request.param


def test_every_patch_file_is_listed_once() -> None:
    files = sorted(path.stem for path in (ROOT / "patches").glob("*.py"))
    assert files == sorted(name for group in hooks.GROUPS for name in group.modules)


def test_catalogue_is_fresh() -> None:
    written = (ROOT / "patches" / "README.md").read_text()
    assert written == hooks.catalogue(), "run `make catalogue`"


def test_launching_smc_puts_its_hooks_in_force(smc: dict) -> None:
    resolve(**smc).check_server_args()
    assert hooks.missing(hooks.SMC) == []


def test_arguments_resolved_elsewhere_install_them_too(
    smc: dict, asked_for: list[hooks.Group]
) -> None:
    """A process may be handed its arguments by multiprocessing, and launch with them.

    Where a test before has loaded SGLang's HTTP server, its routes are hooked, too.
    """
    pickle.loads(pickle.dumps(resolve(**smc))).check_server_args()
    assert [group for group in asked_for if group is not hooks.ROUTES] == [hooks.DRAFTS, hooks.SMC]


def test_launching_without_smc_installs_none(model_path: str, asked_for: list[hooks.Group]) -> None:
    resolve(model_path=model_path).check_server_args()
    assert asked_for == []


def test_scheduler_installs_them_when_it_asks_for_the_worker(
    asked_for: list[hooks.Group],
) -> None:
    algorithm.worker_class(ServerArgs(model_path="dummy"))
    assert asked_for == [hooks.SMC]


@pytest.mark.parametrize("lost", targets(hooks.FLAGS), indirect=True)
def test_flag_hook_that_did_not_land_is_named(lost: str, smc: dict) -> None:
    with pytest.raises(RuntimeError, match=lost):
        resolve(**smc)
    with pytest.raises(RuntimeError, match=lost):  # the scheduler is a process of its own
        algorithm.worker_class(ServerArgs(model_path="dummy"))


@pytest.mark.parametrize("lost", targets(hooks.DRAFTS), indirect=True)
def test_hook_on_drafts_that_did_not_land_is_named(lost: str, smc: dict) -> None:
    with pytest.raises(RuntimeError, match=lost):
        resolve(**smc)
    with pytest.raises(RuntimeError, match=lost):
        algorithm.worker_class(ServerArgs(model_path="dummy"))


@pytest.mark.parametrize("lost", targets(hooks.SMC), indirect=True)
def test_hook_that_did_not_land_is_named(lost: str, smc: dict) -> None:
    with pytest.raises(RuntimeError, match=lost):
        resolve(**smc).check_server_args()
    with pytest.raises(RuntimeError, match=lost):
        algorithm.worker_class(ServerArgs(model_path="dummy"))


@pytest.mark.parametrize("lost", targets(hooks.CPU_PLATFORM), indirect=True)
def test_platform_hook_that_did_not_land_is_named(lost: str) -> None:
    with pytest.raises(RuntimeError, match=lost):
        PlainCpuPlatform().init_backend()


@pytest.mark.parametrize("lost", targets(hooks.CPU_SPECULATION), indirect=True)
def test_hook_for_stock_speculation_that_did_not_land_is_named(lost: str) -> None:
    with pytest.raises(RuntimeError, match=lost):
        PlainCpuPlatform().get_speculative_worker_cls("STANDALONE")


@pytest.mark.parametrize("target", targets(hooks.SMC))
def test_target_patched_by_others_does_not_count(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    hooks.put_in_force(hooks.SMC)
    monkeypatch.setitem(HookRegistry._hooks, target, [])
    assert set(hooks.missing(hooks.SMC)) == {target}


@pytest.mark.parametrize("group", hooks.GROUPS, ids=lambda group: group.modules[0])
def test_install_is_idempotent(group: hooks.Group) -> None:
    hooks.put_in_force(group)
    before = {target: list(found) for target, found in HookRegistry._hooks.items()}
    hooks.put_in_force(group)
    assert dict(HookRegistry._hooks) == before


def test_hook_on_what_another_plugin_has_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours come later than those that SGLang applies when it loads plugins."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    source, user = ModuleType("hooked"), ModuleType("user")
    source.f = user.f = lambda: ["f"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hooked", source)
    monkeypatch.setitem(sys.modules, "user", user)
    HookRegistry.register("hooked.f", lambda f: [*f(), "theirs"], HookType.AROUND)
    HookRegistry.apply_hooks()
    ours = hooks.Patch(
        target="hooked.f",
        hook_type=HookType.AROUND,
        function=lambda f: [*f(), "ours"],
        what="",
        why="",
        relies_on=(),
        retire_when="",
    )
    monkeypatch.setattr(hooks, "collect", lambda group: (ours,))
    for _ in range(2):
        hooks.put_in_force(hooks.SMC)
        assert source.f() == user.f() == ["f", "theirs", "ours"]


def test_patch_file_that_does_not_import_is_told(
    monkeypatch: pytest.MonkeyPatch, smc: dict
) -> None:
    monkeypatch.setattr(hooks, "SMC", hooks.SMC._replace(modules=("gone",)))
    with pytest.raises(ModuleNotFoundError, match=r"sglang_smc\.patches\.gone"):
        resolve(**smc).check_server_args()
