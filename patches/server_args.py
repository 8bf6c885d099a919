"""Add the flags that `options.server` declares, as fields of SGLang's `ServerArgs`.

SGLang derives everything from the fields of `ServerArgs`: `--help`, `--config` files,
`from_cli_args`, the namespace bags, `/server_info`. So the flags become fields of a subclass that
replaces the class; in the oldest release, of the class itself, which is a dataclass there. Its
`__init__` was generated before, and rejects unknown keywords, hence a hook.

A flag that is not given is None, as for SGLang's own `speculative_num_steps`; `server.arguments`
fills in the default when SMC is selected. A value without SMC is refused, never ignored.

Selecting SMC installs all other hooks in the process that launches the server. This module is
imported wherever the plugin is loaded, so it imports nothing heavy.
"""

import logging
import sys
from typing import Annotated, Any

from sglang.srt.arg_groups.arg_utils import NS, Arg
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import ServerArgs

from sglang_smc import upstream
from sglang_smc.options.server import (
    ALGORITHM,
    FIELDS,
    SETTINGS,
    WHOLE_TEXT,
    is_smc,
    values_of,
)
from sglang_smc.server import hooks
from sglang_smc.server.hooks import Hooks
from sglang_smc.upstream import Arguments

PATCHES = Hooks()


def _declared(name: str) -> Any:
    """Return the type of a setting's field, with its flag declared as SGLang declares its own."""
    setting = SETTINGS[name]
    allowed = setting.allowed
    several = {"action": "extend", "action_kwargs": {"nargs": "+"}} if allowed.kind is list else {}
    bare: dict[str, Any] = {} if setting.bare is None else {"nargs": "?", "const": setting.bare}
    flag = Arg(help=f"SMC only. {setting.help} ({values_of(name)}).", **several, **bare)
    kind: Any = list[str] if allowed.kind is list else allowed.kind
    return Annotated[kind | None, flag, NS("spec")]


OURS = [name for name, setting in SETTINGS.items() if not setting.sglang_field]
FLAGS = {FIELDS[name]: _declared(name) for name in OURS}
FLAG_FIELDS = tuple(FLAGS)
_DRAFT_WINDOW = "speculative_draft_window_size"


def add_fields() -> None:
    """Add the flags to SGLang's server arguments; a second call changes nothing."""
    if upstream.IS_NEWER:
        upstream.let_engines_build(SMCServerArgs)
    else:
        upstream.add_fields(ServerArgs, FLAGS)


@PATCHES.on(
    "sglang.srt.server_args.ServerArgs.__init__",
    "srt/server_args.py:439 (ServerArgs is a plain dataclass)",
    "srt/server_args.py:8214 (add_cli_args reads dataclasses.fields)",
    "srt/server_args.py:8463 (from_cli_args does too)",
    "srt/server_args.py:8582 (__setattr__ is open until resolution ends)",
    "srt/arg_groups/arg_utils.py:103 (namespace_of reads NS markers)",
    why="A plugin can register an algorithm, but not flags for it.",
    retire_when="SpeculativeAlgorithm.register takes flag declarations.",
    family=upstream.OLDER,
)
def init_with_flags(original: Any, self: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """Accept the keywords speculative_smc_*, and refuse them unless SMC is selected.

    They are set before the generated `__init__`, since its `__post_init__` reads them. Without them
    nothing changes.
    """
    for name in FLAG_FIELDS:
        setattr(self, name, kwargs.pop(name, None))
    if kwargs.get("speculative_algorithm") == ALGORITHM and kwargs.get(_DRAFT_WINDOW) == 0:
        kwargs[_DRAFT_WINDOW] = WHOLE_TEXT
    original(self, *args, **kwargs)
    _refuse_flags_without_smc(self)


@PATCHES.on(
    "sglang.srt.server_args.ServerArgs.check_server_args",
    "srt/entrypoints/engine.py:1165 (every launch, right after plugins are loaded, and "
    "before the tokenizer manager and the schedulers)",
    why="Loaded plugins are not told the arguments. `validate_server_args` is, but not in a "
    "process that was handed its arguments resolved, as by multiprocessing.",
    retire_when="SGLang tells the algorithm in every process that its server starts.",
)
def check_with_hooks(original: Any, self: ServerArgs) -> None:
    """Install the other hooks of an SMC server in the process that launches it; compile kernels.

    Without SMC nothing changes.

    Raises ValueError for an adapter, resolved by now, with the name of a preset.
    """
    original(self)
    if is_smc(self):
        from sglang_smc.server import ahead, presets

        view = upstream.resolved(self)
        for adapter in view.lora_paths if view.enable_lora else ():
            if adapter.lora_name in presets.of(self):
                raise ValueError(presets.same_name(adapter.lora_name))
        hooks.install(hooks.SMC)
        if "sglang.srt.entrypoints.http_server" in sys.modules:
            hooks.install(hooks.ROUTES)
        ahead.start(self)


@PATCHES.on(
    "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility",
    "srt/arg_groups/lora_hook.py:240 (a list of names)",
    why="SGLang lists the algorithms that go with LoRA adapters by name.",
    retire_when="SGLang asks the algorithm.",
    family=upstream.NEWER,
)
def check_lora_speculative_compatibility(original: Any, server_args: Arguments) -> None:
    """Accept SMC: rounds route rows to adapters; its other conditions are among our own checks."""
    if not is_smc(server_args):
        original(server_args)


@PATCHES.on(
    "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias",
    "srt/arg_groups/speculative_hook.py:92 (get_config, before an algorithm validates anything)",
    why="SGLang reads the draft's configuration for aliases of EAGLE, whatever the algorithm is: "
    "of a format that it does not know, its own error is all that a user sees.",
    retire_when="SGLang reads the draft's configuration for EAGLE and NEXTN alone.",
)
def resolve_alias(original: Any, algorithm: str | None, *args: Any, **kwargs: Any) -> Any:
    """Return SMC as it is: it has no alias. For others nothing changes."""
    return algorithm if algorithm == ALGORITHM else original(algorithm, *args, **kwargs)


@PATCHES.on(
    "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
    "srt/arg_groups/speculative_hook.py:213 (a list of names)",
    why="SGLang lists the algorithms that have a window of the draft by name, and warns of others "
    "that it has no effect.",
    retire_when="SGLang asks the algorithm.",
)
def resolve_without_a_false_warning(original: Any, server_args: Arguments) -> None:
    """Leave out a warning of SGLang's, with SMC, that a window of the draft has no effect."""
    logger = logging.getLogger("sglang.srt.arg_groups.speculative_hook")
    logger.addFilter(_is_no_false_warning)
    try:
        original(server_args)
    finally:
        logger.removeFilter(_is_no_false_warning)


def _is_no_false_warning(record: logging.LogRecord) -> bool:
    return "has no effect with" not in record.msg or record.args != (ALGORITHM,)


def _refuse_flags_without_smc(server_args: Arguments) -> None:
    if is_smc(server_args):
        return
    algorithm = server_args.speculative_algorithm
    values = {name: getattr(server_args, name) for name in FLAG_FIELDS}
    given = [f"--{k.replace('_', '-')} {v}" for k, v in values.items() if v is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} given, but --speculative-algorithm is {algorithm}. These flags "
            f"act with --speculative-algorithm {ALGORITHM} only: add it, or leave them out."
        )


def _post_init(self: Any) -> None:
    super(SMCServerArgs, self).__post_init__()  # pyright: ignore[reportAttributeAccessIssue] -- a struct has one
    _refuse_flags_without_smc(self)
    if is_smc(self) and self.speculative_draft_window_size == 0:
        self.speculative_draft_window_size = WHOLE_TEXT
    if upstream.IS_NEWEST and is_smc(self) and self.speculative_eagle_topk is None:
        # Particles are chains. On sm_100 SGLang takes the attention of plain decoding where it
        # knows so before an algorithm resolves anything; that has pages, as none before 0.5.23.
        self.speculative_eagle_topk = 1


# Pickles find the class by this name, in processes that load no plugins or have not yet.
SMCServerArgs: type = ServerArgs
if upstream.IS_NEWER:
    SMCServerArgs = upstream.struct_with(ServerArgs, FLAGS, _post_init, __name__)


PATCHES.on(
    "sglang.srt.server_args.ServerArgs",
    "srt/server_args.py:569 (a struct, which takes no fields once it is made)",
    "srt/plugins/hook_registry.py:282 (whoever has imported the class gets ours)",
    "srt/entrypoints/engine.py:264 (Engine keeps it: upstream.let_engines_build)",
    hook_type=HookType.REPLACE,
    what="A subclass with the fields speculative_smc_*, which refuses them unless "
    "speculative_algorithm is SMC, and then has speculative_eagle_topk 1, and takes 0 as "
    "speculative_draft_window_size. Without them nothing changes.",
    why="A plugin can register an algorithm, but not flags for it.",
    retire_when="SpeculativeAlgorithm.register takes flag declarations.",
    family=upstream.NEWER,
)(SMCServerArgs)
