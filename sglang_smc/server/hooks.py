"""Define the records of this package's hooks on SGLang, and install them.

Each file in `patches/` covers one part of SGLang and exports `PATCHES`, the records that its
`@PATCHES.on(...)` makes of functions. `GROUPS` lists those files by the processes that need them;
the others never import them. SGLang's own `HookRegistry` applies the records; it only logs a hook
that fails, so `verify_installed` checks it afterwards.

`make catalogue` (docs/catalogue.py) prints all of them.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import msgspec
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_smc import upstream
from sglang_smc.upstream import Family


class Group(NamedTuple):
    """Files of `patches/`, or of another package, with hooks that are installed together."""

    modules: tuple[str, ...]
    where: str
    when: str
    package: str = "sglang_smc.patches"


FLAGS = Group(
    ("server_args",),
    where="In every process that loads plugins",
    when="By `plugin.register`, before arguments are parsed, whether SMC is selected or not.",
)
DRAFTS = Group(
    ("drafts",),
    where="In the processes that read a draft's configuration",
    when="By `plugin.register` in schedulers, which have SGLang's configurations loaded by then, "
    "whether SMC is selected or not; by `algorithm.validate_server_args` in the process that "
    "starts an SMC server.",
)
DETOKENIZER = Group(
    ("detokenizer",),
    where="In the process of an SMC server that turns tokens into text",
    when="By `plugin.register`, where SGLang's detokenizer is loaded, whether SMC is selected or "
    "not.",
)
SMC = Group(
    (
        "ingress",
        "admission",
        "decode_memory",
        "batch_result",
        "request_state",
        "metrics",
        "weights",
    ),
    where="In the processes of an SMC server",
    when="By the hook on `ServerArgs.check_server_args` in the process that launches it and holds "
    "the tokenizer manager; by `algorithm.worker_class` in its schedulers, before they build the "
    "worker.",
)
HEADS = Group(
    ("draft_weights",),
    where="In the schedulers of an SMC server",
    when="By `algorithm.worker_class`, before they build the worker.",
)
ROUTES = Group(
    ("routes",),
    where="In the process of an SMC server that answers HTTP",
    when="By the hook on `ServerArgs.check_server_args`, where SGLang's HTTP server is loaded; an "
    "engine has none.",
)
CPU_PLATFORM = Group(
    ("cpu.platform",),
    where="In processes that run models on the platform `smc_cpu`",
    when="By `PlainCpuPlatform.init_backend`, with SMC or without.",
)
CPU_RECURRENT = Group(
    ("cpu.recurrent",),
    where="In processes that run a model with linear attention on the platform `smc_cpu`",
    when="By the hook on `attn_backend_wrapper`, once the model is loaded.",
)
GROUPS = (FLAGS, DRAFTS, DETOKENIZER, SMC, HEADS, ROUTES, CPU_PLATFORM, CPU_RECURRENT)

# The source in SGLang's log lines about hooks.
_SOURCE = HookSource("smc", "sglang-smc")


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """One hook on one SGLang function. The texts make up the catalogue."""

    target: str  # dotted path of the function; tests/contract/upstream/relied.py has its signature
    function: Callable[..., Any]
    hook_type: HookType = HookType.AROUND
    what: str = ""  # the change; without it the function's docstring says it
    why: str  # the reason why no extension point of SGLang suffices
    relies_on: tuple[str, ...]  # the SGLang lines that the hook depends on
    retire_when: str  # the change in SGLang after which the hook can be removed
    family: Family = upstream.EVERY  # the releases that need the hook


Hook = TypeVar("Hook", bound=Callable[..., Any])


class Hooks(list[Patch]):
    """The records of one file, in their order; fields that all share may be given at first."""

    def __init__(self, **shared: Any) -> None:
        super().__init__()
        self._shared = shared

    def on(self, target: str, *relies_on: str, **fields: Any) -> Callable[[Hook], Hook]:
        """Record a function as the hook on a target; arguments are fields of `Patch`."""

        def record(function: Hook) -> Hook:
            patch = Patch(
                target=target, function=function, relies_on=relies_on, **(self._shared | fields)
            )
            self.append(patch)
            return function

        return record


def collect(*groups: Group) -> tuple[Patch, ...]:
    """Return the records of these groups that the installed release needs, in their order."""
    return tuple(patch for patch in recorded(*groups) if patch.family.is_installed)


def recorded(*groups: Group) -> tuple[Patch, ...]:
    """Return the records of these groups for all releases, in their order."""
    names = (f"{group.package}.{name}" for group in groups for name in group.modules)
    modules = map(import_module, names)
    return tuple(patch for module in modules for patch in module.PATCHES)


def register(patches: tuple[Patch, ...]) -> None:
    """Register the records with SGLang's registry, each once; it applies them after plugins."""
    for patch in patches:
        if not _is_registered(patch):
            HookRegistry.register(patch.target, patch.function, patch.hook_type, source=_SOURCE)


def install(group: Group) -> None:
    """Install a group of hooks in this process, now; raise RuntimeError if one fails.

    This works even for names that are imported already: the registry replaces those too.
    """
    for patch in collect(group):
        is_taken = patch.target in HookRegistry._patched and not _is_registered(patch)
        register((patch,))
        if is_taken:  # the registry skips what another plugin has hooked
            HookRegistry._apply_target(patch.target, HookRegistry._hooks[patch.target][-1:])
    HookRegistry.apply_hooks()
    verify_installed(group)


def missing(group: Group) -> list[str]:
    """Return the targets of hooks that are not installed in this process."""
    return [
        patch.target
        for patch in collect(group)
        if not (_is_registered(patch) and patch.target in HookRegistry._patched)
    ]


def verify_installed(group: Group) -> None:
    """Raise RuntimeError, naming them, if hooks are not installed in this process."""
    targets = missing(group)
    if targets:
        raise RuntimeError(
            "sglang-smc cannot start: SGLang did not apply the hook(s) on "
            f"{', '.join(targets)}. The log line 'Failed to apply hooks to ...' has the cause; "
            "without one, load_plugins() did not run before the server arguments were built."
        )


def _is_registered(patch: Patch) -> bool:
    # .get: indexing the defaultdict would add an empty entry, which apply_hooks would then patch.
    hooks = HookRegistry._hooks.get(patch.target, ())
    return any(function is patch.function for _type, function, _source in hooks)
