"""Define the supported SGLang releases, and hide the differences between them.

No other module depends on a release number. An SGLang name or signature that changes has a function
here; hooks that only some releases need name a `Family`. To drop 0.5.17, delete all code under
`OLDER` and `not IS_NEWER`.

This module is imported wherever the plugin is loaded, so it imports nothing heavy.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
from packaging.version import Version
from sglang import version

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

#: Server arguments, or a view of them. No class that a type checker reads declares their fields.
Arguments: TypeAlias = Any

SUPPORTED = ("0.5.17", "0.5.22", "0.5.23")

# `sglang.__version__` exists only once SGLang's platform is imported, which may be this package's.
#: 0.5.20 or later, where server arguments accept no new fields, and the n-gram cache compiles.
IS_NEWER = Version(version.__version__) >= Version("0.5.20")

#: Whether the release queries platforms for all of its own speculative decoding.
IS_NEWEST = Version(version.__version__) >= Version("0.5.23")


def release() -> str:
    """Return the installed release without its local suffix (0.5.17+cpu), a build variant."""
    return version.__version__.partition("+")[0]


class Family(NamedTuple):
    """Group of supported releases that need the same hooks."""

    name: str
    is_installed: bool


EVERY = Family("every release", True)
OLDER = Family("0.5.17", not IS_NEWER)
NEWER = Family("0.5.22 and later", IS_NEWER)
NEWEST = Family("0.5.23 and later", IS_NEWEST)


# Server arguments. In 0.5.17 they are a dataclass that resolves itself when it is built, and hold
# the resolved values. Later they are a sealed struct of the given values, and the resolved values
# are in a separate view.


def resolved(server_args: "ServerArgs") -> Any:
    """Return a view of the arguments as SGLang has resolved them."""
    if not IS_NEWER:
        return server_args
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def draft_sink(view: Arguments) -> int:
    """Return --speculative-draft-sink-size, 0 where it is not given, or not there: in 0.5.17."""
    return (view.speculative_draft_sink_size or 0) if IS_NEWER else 0


def resolve_now(server_args: "ServerArgs") -> None:
    """Resolve and validate the arguments, which 0.5.17 does when they are built."""
    if IS_NEWER:
        server_args.resolve_once()


def argument_defaults() -> dict[str, Any]:
    """Return the defaults of server arguments by field."""
    from sglang.srt.server_args import ServerArgs

    fields: Any = msgspec.structs.fields if IS_NEWER else dataclasses.fields
    return {field.name: field.default for field in fields(ServerArgs)}


class ReplacedArguments:
    """Server arguments, resolved or not, with other values of some fields."""

    def __init__(self, server_args: Arguments, **fields: Any) -> None:
        vars(self).update(fields, _server_args=server_args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server_args, name)


def model_config_of(server_args: "ServerArgs") -> "ModelConfig":
    if not IS_NEWER:
        return server_args.get_model_config()  # pyright: ignore[reportAttributeAccessIssue] -- 0.5.17
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


@contextmanager
def any_quantization() -> Iterator[None]:
    """Let configurations be read whose quantization this machine has no kernels for."""
    from sglang.srt.configs.model_config import ModelConfig

    checked: Any = ModelConfig
    verify = checked._verify_quantization
    checked._verify_quantization = lambda self: None
    try:
        yield
    finally:
        checked._verify_quantization = verify


def is_gated_delta(model: "ModelConfig") -> bool:
    """Return whether some layers have gated delta rules, and the release has the hooks for them."""
    if not IS_NEWEST:
        return False
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    return hybrid_gdn_config(model) is not None


def kv_layers(pool: Any) -> Sequence[int]:
    """Return the layers with keys in a KV pool, in order. Hybrid models have others."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    if isinstance(pool, HybridLinearKVPool):
        return sorted(pool.full_attention_layer_id_mapping)
    return range(pool.start_layer, pool.start_layer + pool.layer_num)


def add_fields(server_args: type, annotations: Mapping[str, Any]) -> None:
    """Add optional fields, None by default, to the dataclass of server arguments; idempotent.

    The generated ``__init__`` does not take them.
    """
    from sglang.srt.arg_groups import arg_utils

    # Both functions cache per class. This comes first, since only it can fail on another SGLang,
    # and fields without the hook would break servers without SMC.
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
    """Return a subclass of the struct of server arguments, with optional fields, None by default.

    ``module`` is the module in which pickle finds the class, as ``SMCServerArgs``.
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
    """Set the class of server arguments that `sgl.Engine` builds, which no hook reaches.

    If the engine's module is imported later, it imports the class that a hook has put in place.
    """
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        engine.Engine.server_args_class = server_args


# Requests, and the KV slots that admission reserves for them.


def kv_of(req: "Req") -> "ReqKvInfo":
    """Return the object with a request's req_pool_idx, kv_committed_len and cache_protected_len."""
    return req.kv if IS_NEWER else req  # pyright: ignore[reportReturnType] -- 0.5.17


def holds_kv(req: "Req") -> bool:
    """Return whether a request owns a row of `req_to_token`, and thus KV slots."""
    return req.kv.holds_kv if IS_NEWER else req.kv is not None


def allocated(req: "Req") -> int:
    """Return the end of a request's KV slots, those of its sequence and then of its arena."""
    assert req.kv is not None, "set as a request gets its row, until it gives that back"
    return req.kv.kv_allocated_len


def owner_of_slots(req: "Req") -> Any:
    """Return the key by which a streaming session identifies the owner of slots that it frees."""
    return req.kv if IS_NEWER else kv_of(req).req_pool_idx


def charge(adder: "PrefillAdder", num_slots: int) -> None:
    """Reserve KV slots in the budget of an admission."""
    if IS_NEWER:
        adder.memory_budget.total_offset += num_slots
        adder.memory_budget.current_offset += num_slots
    else:
        adder.rem_total_token_offset += num_slots  # pyright: ignore[reportAttributeAccessIssue] -- 0.5.17
        adder.cur_rem_token_offset += num_slots  # pyright: ignore[reportAttributeAccessIssue] -- 0.5.17


# New weights. In 0.5.17 this package's worker passes them on; later SGLang loads them into the
# models that the request selects, and within a session that was opened for some models.

#: Whether a request for new weights selects the model to update.
SELECTS_MODELS = IS_NEWER


def select_one_model(manager: "SchedulerWeightUpdaterManager", recv_req: Any) -> None:
    """Replace the selector "all" of an update by one model, since models share no tensors.

    It is the session's model; the target, if the session is for both.
    """
    if IS_NEWER and recv_req.selector == "all":
        session = manager._session
        is_drafts = session is not None and session.selector == "draft"
        recv_req.selector = "draft" if is_drafts else "target"


# Workers. In 0.5.17 a process's ranks are passed as ``ps``; later `get_parallel` returns them.


def build_draft(
    target: "TpModelWorker", server_args: "ServerArgs", placement: Mapping[str, Any]
) -> "TpModelWorker":
    """Build a worker for the draft model; ``placement`` has SGLang's other arguments."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    # The draft runs at the target's positions.
    length = target.model_runner.model_config.context_len
    asked = {**placement, "is_draft_worker": True, "context_length": length}
    if IS_NEWER:
        from sglang.srt.layers.moe.utils import draft_model_build_scope

        with draft_model_build_scope():  # with the arguments resolved for its own layers
            return TpModelWorker(server_args, **asked)
    first_stage = {"ps": dataclasses.replace(placement["ps"], pp_rank=0)}
    return TpModelWorker(server_args, **{**asked, **first_stage})


def replica_of(placement: Mapping[str, Any]) -> int | None:
    """Return the rank of a worker's data-parallel replica."""
    if IS_NEWER:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().dp_rank
    return placement["ps"].dp_rank


def refresh_tables(runner: "ModelRunner") -> None:
    """Update a model runner after its pool's ``req_to_token`` was replaced.

    Attention backends take the table from it: with the old one they would read other tokens' KV.
    """
    if IS_NEWER:
        runner.init_kv_index_translator()


def lora_manager(runner: "ModelRunner") -> "LoRAManager | None":
    """Return what runs a model's LoRA adapters; None without any, and in 0.5.17."""
    return runner.lora_manager if IS_NEWER else None


def without_lora(layer: Any) -> Any:
    """Return the base layer of one that may have LoRA adapters."""
    if not IS_NEWER:
        return layer
    from sglang.srt.lora.layers import unwrap_lora_layer

    return unwrap_lora_layer(layer)


# The experts that tokens were routed to, which trainers replay. SGLang keeps them by KV slot.


def experts_of_passes(num_rows: int) -> "torch.Tensor | None":
    """Return where SGLang leaves the experts of the target's last pass, with room for all tokens.

    Args:
        num_rows: the most tokens of a pass.

    Returns:
        ``[rows, layers, experts a token]`` int32; None without --enable-return-routed-experts.
    """
    if (capturer := _experts_capturer()) is None:
        return None
    buffer = capturer.device_cache.buffer
    if len(buffer) < num_rows:
        buffer = buffer.new_zeros(num_rows, *buffer.shape[1:])
        capturer.device_cache.buffer = buffer
    return buffer[:, :, : capturer.topk_size]


def experts_by_slot(slots: "torch.Tensor", experts: "torch.Tensor") -> Any:
    """Return the experts of tokens at some KV slots as SGLang stores them with a batch's result."""
    from sglang.srt.state_capturer.base import TopkCaptureOutput

    return TopkCaptureOutput(slots, experts, _experts_capturer().host_cache)


def allocate_pageable(device: str) -> None:
    """Have what a device keeps on the host, such as experts, be memory that is not pinned."""
    if IS_NEWER:
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        def allocate(dims: Any, dtype: Any, device: str, *_: Any, allocator: Any, **__: Any) -> Any:
            return allocator.allocate(dims, dtype=dtype, device=device)

        functions: Any = ALLOC_MEMORY_FUNCS
        functions[device] = allocate


def _experts_capturer() -> Any:
    if not IS_NEWER:
        return None
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return get_global_experts_capturer()


def tool_close_tokens(parser: str | None, tokenizer: Any) -> frozenset[int]:
    """Return the stop tokens that SGLang leaves in a text, since they close a tool call."""
    if not IS_NEWEST:
        return frozenset()
    from sglang.srt.parser.response_template import tool_close_token_ids

    return tool_close_token_ids(parser, tokenizer)


def num_bound_processes(*, tp_size: int, dp_size: int) -> int:
    """Return the number of listed core shares: replicas have their own, except in 0.5.17."""
    return tp_size * dp_size if IS_NEWER else tp_size
