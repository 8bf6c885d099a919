"""The SGLang releases that this package runs on, and all that differs between them.

No other file of the package knows a release. What has changed its place or its shape has a function
here, in our words; hooks that only some releases need name a `Family`. To drop 0.5.17, delete what
stands under `OLDER` and `not IS_NEWER`.

Imported wherever the plugin is loaded, so it imports nothing heavy.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
from packaging.version import Version
from sglang import version

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

#: Server arguments, or a view of them. Their fields stand in no class that a type checker reads.
Arguments: TypeAlias = Any

SUPPORTED = ("0.5.17", "0.5.22", "0.5.23")

# The package itself has its number only once its platform is imported, which may be ours.
#: The first release whose server arguments take no fields; no supported one stands between.
IS_NEWER = Version(version.__version__) >= Version("0.5.20")

#: The first release that asks platforms about all of its own speculative decoding.
IS_NEWEST = Version(version.__version__) >= Version("0.5.23")


#: Whether SGLang's n-gram cache compiles: 0.5.17 leaves out a header that GCC 13 and later ask for.
HAS_NGRAM_CACHE = IS_NEWER


def release() -> str:
    """The installed release; a local suffix (0.5.17+cpu) names a build of the same source."""
    return version.__version__.partition("+")[0]


class Family(NamedTuple):
    """Supported releases that are alike in something."""

    name: str
    is_installed: bool


EVERY = Family("every release", True)
OLDER = Family("0.5.17", not IS_NEWER)
NEWER = Family("0.5.22 and later", IS_NEWER)
NEWEST = Family("0.5.23 and later", IS_NEWEST)


# Server arguments. In 0.5.17 they are a dataclass that resolves itself as it is built, and hold
# what was resolved. Later they are a sealed struct of what the operator gave; what was resolved
# stands beside it.


def resolved(server_args: "ServerArgs") -> Any:
    """The arguments as SGLang has resolved them, to be read."""
    if not IS_NEWER:
        return server_args
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def resolve_now(server_args: "ServerArgs") -> None:
    """Have SGLang fill in and check the arguments, which 0.5.17 does as they are built."""
    if IS_NEWER:
        server_args.resolve_once()


def model_config_of(server_args: "ServerArgs") -> "ModelConfig":
    """The target's configuration."""
    if not IS_NEWER:
        return server_args.get_model_config()  # pyright: ignore[reportAttributeAccessIssue] -- 0.5.17
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def is_gated_delta(model: "ModelConfig") -> bool:
    """Whether some layers attend linearly, by a gated delta rule, and the release has the seams."""
    if not IS_NEWEST:
        return False
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    return hybrid_gdn_config(model) is not None


def kv_layers(pool: Any) -> tuple[int, int]:
    """The first layer whose keys stand in a KV pool, and how many: not all of hybrid models."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    if isinstance(pool, HybridLinearKVPool):
        layers = pool.full_attention_layer_id_mapping
        return min(layers), len(layers)
    return pool.start_layer, pool.layer_num


def first_layer(pool: Any) -> int:
    """The first layer whose keys stand in a KV pool."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return kv_layers(pool)[0] if isinstance(pool, HybridLinearKVPool) else pool.start_layer


def add_fields(server_args: type, annotations: Mapping[str, Any]) -> None:
    """Make None-able fields of the dataclass that server arguments are; again changes nothing.

    The generated ``__init__`` knows nothing of them.
    """
    from sglang.srt.arg_groups import arg_utils

    # Both remember their answer per class. First, since only this can fail on another SGLang, and
    # fields without the hook would break servers without SMC.
    arg_utils.namespace_of.cache_clear()
    arg_utils.resolvable_fields.cache_clear()
    fields = [(name, kind, dataclasses.field(default=None)) for name, kind in annotations.items()]
    for field in dataclasses.fields(dataclasses.make_dataclass("_", fields, kw_only=True)):
        server_args.__dataclass_fields__[field.name] = field
        server_args.__annotations__[field.name] = field.type
        setattr(server_args, field.name, None)


def struct_with(
    server_args: type, annotations: Mapping[str, Any], post_init: Callable, module: str
) -> type:
    """A subclass of the struct that server arguments are, with None-able fields.

    ``module`` is where pickles find the class, under the name ``SMCServerArgs``.
    """
    fields = [(name, kind, None) for name, kind in annotations.items()]
    return msgspec.defstruct(
        "SMCServerArgs",
        fields,
        bases=(server_args,),
        namespace={"__post_init__": post_init},
        module=module,
        kw_only=True,
        dict=True,
    )


def let_engines_build(server_args: type) -> None:
    """Have `sgl.Engine` build this class: it keeps its own as an attribute, which no hook reaches.

    Where the engine's module comes later, it imports the class that a hook has put in place.
    """
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        engine.Engine.server_args_class = server_args


# Requests, and what admission keeps free for them.


def kv_of(req: "Req") -> "ReqKvInfo":
    """Whose req_pool_idx, kv_committed_len and cache_protected_len are the request's."""
    return req.kv if IS_NEWER else req  # pyright: ignore[reportReturnType] -- 0.5.17


def holds_kv(req: "Req") -> bool:
    """Whether a request owns a row, and with it slots."""
    return req.kv.holds_kv if IS_NEWER else req.kv is not None


def allocated(req: "Req") -> int:
    """The end of a request's slots, which hold its text's KV and, behind that, its arena."""
    assert req.kv is not None, "set as a request gets its row, until it gives that back"
    return req.kv.kv_allocated_len


def owner_of_slots(req: "Req") -> Any:
    """How a streaming session names whose slots it frees."""
    return req.kv if IS_NEWER else kv_of(req).req_pool_idx


def charge(adder: "PrefillAdder", num_slots: int) -> None:
    """Keep KV slots out of what an admission may still give away."""
    if IS_NEWER:
        adder.memory_budget.total_offset += num_slots
        adder.memory_budget.current_offset += num_slots
    else:
        adder.rem_total_token_offset += num_slots  # pyright: ignore[reportAttributeAccessIssue] -- 0.5.17
        adder.cur_rem_token_offset += num_slots  # pyright: ignore[reportAttributeAccessIssue] -- 0.5.17


# New weights. In 0.5.17 our worker hands them on; later SGLang loads them into the models that the
# request selects, and within a session that was opened for some.

#: Whether a request for new weights selects the model that they are of.
SELECTS_MODELS = IS_NEWER


def select_one_model(manager: "SchedulerWeightUpdaterManager", recv_req: Any) -> None:
    """Have the "all" of an update select one model, since no two have their tensors in common.

    It is the one that the session was opened for; the target, if that was for both.
    """
    if not IS_NEWER:
        return
    if recv_req.selector == "all":
        session = manager._session
        is_drafts = session is not None and session.selector == "draft"
        recv_req.selector = "draft" if is_drafts else "target"


# Workers. In 0.5.17 a process's place among ranks is handed on as ``ps``; later it is asked for.


def build_draft(
    target: "TpModelWorker", server_args: "ServerArgs", placement: Mapping[str, Any]
) -> "TpModelWorker":
    """A worker for the draft model; ``placement`` is what else SGLang builds ours with."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    if IS_NEWER:
        from sglang.srt.layers.moe.utils import draft_model_build_scope

        # The draft runs at the target's positions, with what was resolved for its own layers.
        length = target.model_runner.model_config.context_len
        asked = {**placement, "is_draft_worker": True, "context_length": length}
        with draft_model_build_scope():
            return TpModelWorker(server_args, **asked)
    first_stage = {"ps": dataclasses.replace(placement["ps"], pp_rank=0)}
    return TpModelWorker(server_args, **{**placement, **first_stage}, is_draft_worker=True)


def replica_of(placement: Mapping[str, Any]) -> int | None:
    """Which data-parallel replica a worker belongs to."""
    if IS_NEWER:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().dp_rank
    return placement["ps"].dp_rank


def refresh_tables(runner: "ModelRunner") -> None:
    """Tell a model runner that its pool holds another ``req_to_token`` than when it was built.

    Attention backends take theirs from it: with the former they would read other tokens' KV.
    """
    if IS_NEWER:
        runner.init_kv_index_translator()


def num_bound_processes(*, tp_size: int, dp_size: int) -> int:
    """How many shares of the cores are listed: replicas are bound apart, except in 0.5.17."""
    return tp_size * dp_size if IS_NEWER else tp_size
