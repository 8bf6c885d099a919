"""SMC is always registered; where it cannot run, it says why. Hooks, where they are needed."""

import inspect
import pickle
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from resolved_args import field_names, resolve
from sglang import version
from sglang.srt.arg_groups import arg_utils
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import spec_registry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_smc import plugin, upstream
from sglang_smc.cpu.platform import PlainCpuPlatform
from sglang_smc.patches import server_args
from sglang_smc.server import algorithm, hooks
from sglang_smc.server.algorithm import SMCAlgorithm


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})


def test_name_resolves_in_any_case_and_registering_twice_changes_nothing() -> None:
    algorithm = SpeculativeAlgorithm.from_string("smc")
    assert isinstance(algorithm, SMCAlgorithm)
    plugin.register()
    assert SpeculativeAlgorithm.from_string("SMC") is algorithm


def test_name_held_by_another_plugin_is_an_error(unregistered: None) -> None:
    SpeculativeAlgorithm.register("SMC", supports_overlap=True)(lambda server_args: object)
    with pytest.raises(ValueError, match="'SMC' already registered"):
        plugin.register()


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets of hooks that SGLang's registry is given."""
    targets: list[str] = []
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_, **__: targets.append(target))
    return targets


def test_unsupported_sglang_is_told_to_those_who_select_smc(
    unregistered: None, monkeypatch: pytest.MonkeyPatch, smc: dict
) -> None:
    monkeypatch.setattr(version, "__version__", "9.9.9")
    plugin.register()
    with pytest.raises(ValueError) as error:
        resolve(**smc, speculative_smc_num_particles=4)
    for part in (
        "9.9.9",
        f"allowed: {', '.join(upstream.SUPPORTED)}.",
        "pip install",
        plugin.SKIP_VERSION_ENV,
    ):
        assert part in str(error.value)
    assert resolve(model_path=smc["model_path"]).speculative_algorithm is None


@pytest.mark.parametrize(
    ("installed", "is_loaded", "groups"),
    [
        (upstream.SUPPORTED[0], False, [hooks.FLAGS]),
        ("9.9.9", False, [hooks.FLAGS]),
        (upstream.SUPPORTED[0], True, [hooks.FLAGS, hooks.DRAFTS, hooks.DETOKENIZER]),
        ("9.9.9", True, [hooks.FLAGS]),
    ],
)
def test_hooks_that_are_handed_over_are_those_of_the_flags(
    unregistered: None,
    handed_over: list[str],
    monkeypatch: pytest.MonkeyPatch,
    installed: str,
    is_loaded: bool,
    groups: list[hooks.Group],
) -> None:
    """And of drafts where configurations are loaded: a scheduler asks for our worker only once it
    has sized the KV pool for a draft; and of the detokenizer where that is."""
    monkeypatch.setattr(version, "__version__", installed)
    for name in ("sglang.srt.configs.model_config", "sglang.srt.managers.detokenizer_manager"):
        assert import_module(name)
        if not is_loaded:
            monkeypatch.delitem(sys.modules, name)
    plugin.register()
    assert handed_over == [patch.target for patch in hooks.collect(*groups)]


def test_server_args_that_take_no_flags_get_none(
    unregistered: None, handed_over: list[str], monkeypatch: pytest.MonkeyPatch, smc: dict
) -> None:
    """On an unsupported release a server without SMC must hear nothing of it."""
    monkeypatch.setattr(version, "__version__", "9.9.9")
    if upstream.IS_NEWER:
        monkeypatch.delattr(upstream, "let_engines_build")
        plugin.register()
        assert handed_over == []
    else:
        monkeypatch.setattr(arg_utils, "namespace_of", object())
        before = field_names()
        for name in server_args.FLAG_FIELDS:
            monkeypatch.delitem(ServerArgs.__dataclass_fields__, name)
        plugin.register()
        assert handed_over == []
        assert set(field_names()) == set(before) - set(server_args.FLAG_FIELDS)
    with pytest.raises(ValueError, match=r"9\.9\.9"):
        resolve(**smc)


#: Asked by `create_worker` of builtin algorithms, and by SGLang's own adaptive, which SMC
#: refuses.
OF_BUILTIN = {"get_platform_worker_cls"}
BUILTIN_METHODS = [
    name
    for name, member in vars(SpeculativeAlgorithm).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in OF_BUILTIN
]


def test_algorithm_has_all_that_sglang_may_call() -> None:
    """SGLang calls all algorithms alike, but checks only `is_*` and `supports_*` of ours."""
    theirs, ours = (
        {name: list(inspect.signature(getattr(of, name)).parameters) for name in BUILTIN_METHODS}
        for of in (SpeculativeAlgorithm, SMCAlgorithm)
    )
    assert ours == theirs


def test_standalone_is_the_only_builtin_branch_taken() -> None:
    """It makes SGLang count the draft's layers when it sizes the KV pool, and no more."""
    algorithm = SpeculativeAlgorithm.from_string("SMC")
    true = {
        name for name in BUILTIN_METHODS if name.startswith("is_") and getattr(algorithm, name)()
    }
    assert true == {"is_some", "is_speculative", "is_standalone"}


def test_draft_decodes_while_target_verifies() -> None:
    algorithm = SpeculativeAlgorithm.from_string("SMC")
    width = algorithm.get_num_tokens_per_req_for_target_verify
    assert width(9, is_draft_worker=False) == 9
    assert width(9, is_draft_worker=True) == 1


@pytest.mark.parametrize(
    ("installed", "skip", "runs"),
    [
        *((release, "", True) for release in upstream.SUPPORTED),
        (f"{upstream.SUPPORTED[-1]}+cpu", "", True),
        *(
            (release, "", False)
            for release in (f"{upstream.SUPPORTED[0]}.post1", "0.5.18", "0.5.24")
        ),
        ("9.9.9", "1", True),
    ],
)
def test_version(monkeypatch: pytest.MonkeyPatch, installed: str, skip: str, runs: bool) -> None:
    monkeypatch.setattr(version, "__version__", installed)
    monkeypatch.setenv(plugin.SKIP_VERSION_ENV, skip)
    assert (plugin.problem() is None) is runs


# --- Hooks are listed, recorded, and missed when they are not there

ROOT = Path(__file__).parents[2]


def targets(group: hooks.Group) -> list[str]:
    return [patch.target for patch in hooks.collect(group)]


def test_every_patch_file_is_listed_once() -> None:
    folder = ROOT / "patches"
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    assert sorted(".".join(path.parts) for path in paths) == sorted(
        name for group in hooks.GROUPS for name in group.modules
    )


def test_the_catalogue_has_every_hook_and_what_it_says() -> None:
    text = runpy.run_path(str(ROOT / "docs" / "catalogue.py"))["catalogue"]()
    for patch in hooks.recorded(*hooks.GROUPS):
        assert f"`{patch.target.rpartition('srt.')[2]}`" in text
        assert patch.why in text and patch.retire_when in text


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
        (schedule, "SMC HEADS"),
    ],
    ids=["arguments resolved elsewhere", "without SMC", "a scheduler that asks for the worker"],
)
def test_hooks_are_installed_where_they_are_needed(
    smc: dict, monkeypatch: pytest.MonkeyPatch, act: Callable[[dict], None], groups: str
) -> None:
    """Where a test before has loaded SGLang's HTTP server, its routes are hooked, too."""
    asked_for: list[hooks.Group] = []
    monkeypatch.setattr(hooks, "install", asked_for.append)
    act(smc)
    wanted = [getattr(hooks, name) for name in groups.split()]
    assert [group for group in asked_for if group is not hooks.ROUTES] == wanted


#: What of a process notices that a hook of a group did not land; schedulers are their own.
NOTICED: dict[hooks.Group, tuple[Callable[[dict], Any], ...]] = {
    hooks.FLAGS: (lambda smc: resolve(**smc), schedule),
    hooks.DRAFTS: (lambda smc: resolve(**smc), schedule),
    hooks.SMC: (launch, schedule),
    hooks.CPU_PLATFORM: (lambda _: PlainCpuPlatform().init_backend(),),
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


def test_hook_on_what_another_plugin_has_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours come later than those that SGLang applies when it loads plugins."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    source = ModuleType("hooked")
    user = ModuleType("user")
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
        assert len(HookRegistry._hooks["hooked.f"]) == 2


def test_patch_that_does_not_import_is_told(monkeypatch: pytest.MonkeyPatch, smc: dict) -> None:
    monkeypatch.setattr(hooks, "SMC", hooks.SMC._replace(modules=("gone",)))
    with pytest.raises(ModuleNotFoundError, match=r"sglang_smc\.patches\.gone"):
        resolve(**smc).check_server_args()
