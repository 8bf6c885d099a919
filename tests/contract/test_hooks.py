"""Hooks are listed, recorded, installed where they are needed, and missed when they are not."""

import pickle
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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
    monkeypatch.setattr(hooks, "install", asked.append)
    return asked


def test_every_patch_file_is_listed_once() -> None:
    folder = ROOT / "patches"
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    assert sorted(".".join(path.parts) for path in paths) == sorted(
        name for group in hooks.GROUPS for name in group.modules
    )


def test_the_catalogue_has_every_hook_and_what_it_says() -> None:
    text = hooks.catalogue()
    for patch in hooks._recorded(*hooks.GROUPS):
        assert f"`{patch.target.rpartition('srt.')[2]}`" in text
        assert patch.why in text and patch.retire_when in text


def test_launching_smc_puts_its_hooks_in_force(smc: dict) -> None:
    resolve(**smc).check_server_args()
    assert hooks.missing(hooks.SMC) == []


def launch(smc: dict) -> None:
    resolve(**smc).check_server_args()


def schedule(_: dict) -> None:
    algorithm.worker_class(ServerArgs(model_path="dummy"))


@pytest.mark.parametrize(
    ("act", "groups"),
    [
        # A process may be handed its arguments by multiprocessing, and launch with them.
        (lambda smc: pickle.loads(pickle.dumps(resolve(**smc))).check_server_args(), "DRAFTS SMC"),
        (lambda smc: launch({"model_path": smc["model_path"]}), ""),
        (schedule, "SMC"),
    ],
    ids=["arguments resolved elsewhere", "without SMC", "a scheduler that asks for the worker"],
)
def test_hooks_are_installed_where_they_are_needed(
    smc: dict, asked_for: list[hooks.Group], act: Callable[[dict], None], groups: str
) -> None:
    """Where a test before has loaded SGLang's HTTP server, its routes are hooked, too."""
    act(smc)
    wanted = [getattr(hooks, name) for name in groups.split()]
    assert [group for group in asked_for if group is not hooks.ROUTES] == wanted


#: What of a process notices that a hook of a group did not land; schedulers are their own.
NOTICED: dict[hooks.Group, tuple[Callable[[dict], Any], ...]] = {
    hooks.FLAGS: (lambda smc: resolve(**smc), schedule),
    hooks.DRAFTS: (lambda smc: resolve(**smc), schedule),
    hooks.SMC: (launch, schedule),
    hooks.CPU_PLATFORM: (lambda _: PlainCpuPlatform().init_backend(),),
    hooks.CPU_SPECULATION: (lambda _: PlainCpuPlatform().get_speculative_worker_cls("STANDALONE"),),
}


@pytest.mark.parametrize(
    ("group", "lost"),
    [(group, target) for group in NOTICED for target in targets(group)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hook_that_did_not_land_is_named(
    smc: dict, monkeypatch: pytest.MonkeyPatch, group: hooks.Group, lost: str
) -> None:
    for each in hooks.GROUPS:
        hooks.install(each)
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {lost})
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    for notice in NOTICED[group]:
        with pytest.raises(RuntimeError, match=lost):
            notice(smc)


def test_target_patched_by_others_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks.install(hooks.SMC)
    for target in targets(hooks.SMC):
        with monkeypatch.context() as patched:
            patched.setitem(HookRegistry._hooks, target, [])
            assert set(hooks.missing(hooks.SMC)) == {target}


def test_install_is_idempotent() -> None:
    for group in hooks.GROUPS:
        hooks.install(group)
        before = {target: list(found) for target, found in HookRegistry._hooks.items()}
        hooks.install(group)
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
    nothing: dict[str, Any] = {"what": "", "why": "", "relies_on": (), "retire_when": ""}
    ours = hooks.Patch(
        target="hooked.f", hook_type=HookType.AROUND, function=lambda f: [*f(), "ours"], **nothing
    )
    monkeypatch.setattr(hooks, "collect", lambda group: (ours,))
    for _ in range(2):
        hooks.install(hooks.SMC)
        assert source.f() == user.f() == ["f", "theirs", "ours"]


def test_patch_file_that_does_not_import_is_told(
    monkeypatch: pytest.MonkeyPatch, smc: dict
) -> None:
    monkeypatch.setattr(hooks, "SMC", hooks.SMC._replace(modules=("gone",)))
    with pytest.raises(ModuleNotFoundError, match=r"sglang_smc\.patches\.gone"):
        resolve(**smc).check_server_args()
