"""Add the `--speculative-smc-*` flags, as fields of SGLang's `ServerArgs`.

SGLang derives everything from the fields of `ServerArgs`: `--help`, `--config` files,
`from_cli_args`, the namespace bags, `/server_info`. So the flags become fields of a subclass that
replaces the class; in 0.5.17, of the class itself, which is a dataclass there. Its `__init__` was
generated before, and rejects unknown keywords, hence a hook.

A flag that is not given is None, as for SGLang's own `speculative_num_steps`; `server.arguments`
fills in the default when SMC is selected. A value without SMC is refused, never ignored.

Selecting SMC installs all other hooks in the process that launches the server. This module is
imported wherever the plugin is loaded, so it imports nothing heavy.
"""

import sys
from typing import Annotated, Any, get_type_hints

from sglang.srt.arg_groups.arg_utils import NS, Arg
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.server_args import ServerArgs

from sglang_smc import upstream
from sglang_smc.options import server
from sglang_smc.options.server import ALGORITHM, DEFAULTS
from sglang_smc.server import hooks
from sglang_smc.server.hooks import Patch
from sglang_smc.upstream import Arguments


class SMCFlags:
    """The flags, declared as SGLang declares its own."""

    speculative_smc_mode: Annotated[
        str | None,
        Arg(
            help="SMC only. 'smc' weighs and resamples particles: approximate, and keeps every "
            "drafted token. 'exact' verifies them as one multi-draft: the output follows the "
            "target. 'mixed' keeps a block where its evidence is high and verifies it elsewhere. "
            "'auto' is 'mixed' with a threshold near the target's own distribution, or by the tilt "
            f"that is asked for (default {DEFAULTS.mode}).",
            choices=list(server.MODES),
        ),
        NS("spec"),
    ]
    speculative_smc_num_particles: Annotated[
        int | None,
        Arg(
            help="SMC only. Particles: continuations kept alive per request "
            f"(1 to {server.MAX_PARTICLES}, default {DEFAULTS.num_particles})."
        ),
        NS("spec"),
    ]
    speculative_smc_ess_threshold: Annotated[
        float | None,
        Arg(
            help="SMC only. Resample when the effective sample size falls below this fraction of "
            f"the particles (0 never, 1 always, default {DEFAULTS.ess_threshold})."
        ),
        NS("spec"),
    ]
    speculative_smc_resampling_method: Annotated[
        str | None,
        Arg(
            help=f"SMC only. How ancestors are drawn (default {DEFAULTS.resampling_method}).",
            choices=list(server.RESAMPLING_METHODS),
        ),
        NS("spec"),
    ]
    speculative_smc_resample_at: Annotated[
        str | None,
        Arg(
            help="SMC only. 'block' resamples after a round, 'token' at the first drafted token "
            f"where the threshold is crossed (default {DEFAULTS.resample_at}).",
            choices=list(server.RESAMPLE_AT),
        ),
        NS("spec"),
    ]
    speculative_smc_selection: Annotated[
        str | None,
        Arg(
            help="SMC only. The particle to answer with: 'sample' draws it by weight, 'argmax' "
            f"takes the heaviest (default {DEFAULTS.selection}).",
            choices=list(server.SELECTIONS),
        ),
        NS("spec"),
    ]
    speculative_smc_power: Annotated[
        float | None,
        Arg(
            help="SMC only. Sample whole texts from the target's law to this power, in mode 'smc' "
            f"(above 0, default {DEFAULTS.power:g})."
        ),
        NS("spec"),
    ]
    speculative_smc_evidence_threshold: Annotated[
        float | None,
        Arg(
            help="SMC only. In modes 'smc' and 'mixed', a round keeps drafted columns while their "
            "evidence (mean weight) exceeds the threshold times a uniform. 0 keeps all, as the "
            "paper does; large values verify nearly all "
            f"(at least 0, default {server.EVIDENCE_THRESHOLD:g})."
        ),
        NS("spec"),
    ]
    speculative_smc_tilt: Annotated[
        float | None,
        Arg(
            help="SMC only. How far answers may lean from the target to the draft, as the server "
            "measures it: 0 is exact. Implies mode 'auto', whose evidence threshold follows it "
            f"(at least 0, default: that of a threshold of {server.AUTO_EVIDENCE_THRESHOLD:g})."
        ),
        NS("spec"),
    ]
    speculative_smc_draft_temperature: Annotated[
        float | None,
        Arg(help="SMC only. Temperature of the draft model (above 0, default: the request's own)."),
        NS("spec"),
    ]
    speculative_smc_ngram_weight: Annotated[
        float | None,
        Arg(
            help="SMC only. Weight w of n-gram matches in what is drafted: (1 - w) times the "
            "draft's law plus w times that of what followed the same tokens before, in prompts and "
            "answers. 1 needs no draft model, and a mode that verifies "
            f"(0 to 1, default {DEFAULTS.ngram_weight:g})."
        ),
        NS("spec"),
    ]
    speculative_smc_max_lag: Annotated[
        int | None,
        Arg(
            help="SMC only. Tokens that particles may differ in before the oldest are drawn by "
            "weight; bounds KV memory and the silence of a stream. Requests may ask for less "
            f"(at least 1, default {server.LAG}, but {server.LONG_LAG} for other targets than p "
            "and with return_particles)."
        ),
        NS("spec"),
    ]
    speculative_smc_kernels: Annotated[
        str | None,
        Arg(
            help="SMC only. What runs a round beside the models: 'triton' kernels or 'torch' "
            "functions, which give the same tokens, to compare or debug. 'auto' takes kernels on "
            f"a GPU and torch elsewhere (default {DEFAULTS.kernels}).",
            choices=list(server.KERNELS),
        ),
        NS("spec"),
    ]
    speculative_smc_round_graph: Annotated[
        str | None,
        Arg(
            help="SMC only. Whether whole rounds are captured as CUDA graphs and launched at once. "
            "'auto' captures them on a GPU unless --disable-cuda-graph is given "
            f"(default {DEFAULTS.round_graph}).",
            choices=list(server.ROUND_GRAPH),
        ),
        NS("spec"),
    ]
    speculative_smc_adaptive: Annotated[
        bool | None,
        Arg(
            help="SMC only. Particles and steps follow the load and the measured cost of rounds: "
            "where speculation does not pay, requests get fewer than they ask for, down to one "
            "verified chain, or none "
            f"(default {DEFAULTS.adaptive})."
        ),
        NS("spec"),
    ]
    speculative_smc_potential: Annotated[
        list[str] | None,
        Arg(
            help="SMC only. Potentials that requests may name, which multiply the target: "
            "NAME=package.module:factory, where factory is the class of a "
            "sglang_smc.potentials.Potential or a function that returns one. Literal keyword "
            "arguments may follow it, in parentheses. Several values, or the flag several times "
            "(default none).",
            action="extend",
            action_kwargs={"nargs": "+"},
        ),
        NS("spec"),
    ]
    speculative_smc_potential_timeout: Annotated[
        float | None,
        Arg(
            help="SMC only. Seconds that a potential may take for all texts of a round; where it "
            "takes longer, the requests that it was asked about end with HTTP 503 "
            f"(above 0, default {DEFAULTS.potential_timeout:g})."
        ),
        NS("spec"),
    ]
    speculative_smc_presets: Annotated[
        str | None,
        Arg(
            help="SMC only. Settings that requests choose by name, as 'NAME' in the model "
            "'served-model-name:NAME': a JSON object, or the path of a file with one, of names "
            "and objects with the keys of custom_params['smc'] (default none)."
        ),
        NS("spec"),
    ]


FLAGS = get_type_hints(SMCFlags, include_extras=True)
FLAG_FIELDS = tuple(FLAGS)


def add_fields() -> None:
    """Add the flags to SGLang's server arguments; a second call changes nothing."""
    if upstream.IS_NEWER:
        upstream.let_engines_build(SMCServerArgs)
    else:
        upstream.add_fields(ServerArgs, FLAGS)


def init_with_flags(original: Any, self: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """Set SMC's keywords before the generated `__init__`, since its `__post_init__` reads them."""
    for name in FLAG_FIELDS:
        setattr(self, name, kwargs.pop(name, None))
    original(self, *args, **kwargs)
    _refuse_flags_without_smc(self)


def check_with_hooks(original: Any, self: ServerArgs) -> None:
    """Install the other hooks of an SMC server in this process, before any of it is used."""
    original(self)
    if _selects_smc(self):
        hooks.install(hooks.SMC)
        if "sglang.srt.entrypoints.http_server" in sys.modules:
            hooks.install(hooks.ROUTES)


def _selects_smc(server_args: Arguments) -> bool:
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM


def _refuse_flags_without_smc(server_args: Arguments) -> None:
    if _selects_smc(server_args):
        return
    algorithm = server_args.speculative_algorithm
    values = {name: getattr(server_args, name) for name in FLAG_FIELDS}
    given = [f"--{k.replace('_', '-')} {v}" for k, v in values.items() if v is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} given, but --speculative-algorithm is {algorithm}. These flags "
            f"act with --speculative-algorithm {ALGORITHM} only: add it, or leave them out."
        )


def _post_init(self: ServerArgs) -> None:
    super(SMCServerArgs, self).__post_init__()  # pyright: ignore[reportAttributeAccessIssue] -- a struct has one
    _refuse_flags_without_smc(self)


# Pickles find the class by this name, in processes that load no plugins or have not yet.
SMCServerArgs: type = ServerArgs
if upstream.IS_NEWER:
    SMCServerArgs = upstream.struct_with(ServerArgs, FLAGS, _post_init, __name__)

PATCHES = (
    Patch(
        target="sglang.srt.server_args.ServerArgs",
        hook_type=HookType.REPLACE,
        function=SMCServerArgs,
        what="A subclass with the fields speculative_smc_*, which refuses them unless "
        "speculative_algorithm is SMC. Without them nothing changes.",
        why="A plugin can register an algorithm, but not flags for it.",
        relies_on=(
            "srt/server_args.py:569 (a struct, which takes no fields once it is made)",
            "srt/plugins/hook_registry.py:282 (whoever has imported the class gets ours)",
            "srt/entrypoints/engine.py:264 (Engine keeps it: upstream.let_engines_build)",
        ),
        retire_when="SpeculativeAlgorithm.register takes flag declarations.",
        family=upstream.NEWER,
    ),
    Patch(
        target="sglang.srt.server_args.ServerArgs.__init__",
        hook_type=HookType.AROUND,
        function=init_with_flags,
        what="Accepts the keywords speculative_smc_*, which `add_fields` has made fields; refuses "
        "them unless speculative_algorithm is SMC. Without them nothing changes.",
        why="A plugin can register an algorithm, but not flags for it.",
        relies_on=(
            "srt/server_args.py:439 (ServerArgs is a plain dataclass)",
            "srt/server_args.py:8214 (add_cli_args reads dataclasses.fields)",
            "srt/server_args.py:8463 (from_cli_args does too)",
            "srt/server_args.py:8582 (__setattr__ is open until resolution ends)",
            "srt/arg_groups/arg_utils.py:103 (namespace_of reads NS markers)",
        ),
        retire_when="SpeculativeAlgorithm.register takes flag declarations.",
        family=upstream.OLDER,
    ),
    Patch(
        target="sglang.srt.server_args.ServerArgs.check_server_args",
        hook_type=HookType.AROUND,
        function=check_with_hooks,
        what="Installs the hooks of an SMC server in the process that launches it. Without SMC "
        "nothing changes.",
        why="Loaded plugins are not told the arguments. `validate_server_args` is, but not in a "
        "process that was handed its arguments resolved, as by multiprocessing.",
        relies_on=(
            "srt/entrypoints/engine.py:1165 (every launch, right after plugins are loaded, and "
            "before the tokenizer manager and the schedulers)",
        ),
        retire_when="SGLang tells the algorithm in every process that its server starts.",
    ),
)
