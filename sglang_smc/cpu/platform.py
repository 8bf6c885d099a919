"""Provide a plain-torch CPU platform for stock SGLang.

SGLang's own CPU engine needs Intel's AMX kernels (a special build of ``sgl-kernel``). This platform
runs the same scheduler, radix cache and HTTP server with torch operators alone, for Llama-type
models on any x86 CPU: laptops and continuous integration.

SGLang finds ``activate`` through the entry point ``smc_cpu`` of group ``sglang.srt.platforms``, and
calls it in every process, on machines with an accelerator too. So nothing heavy is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_smc import upstream
from sglang_smc.cpu import threads
from sglang_smc.dtype import AUTO_DTYPE_ENV, default_dtype

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_smc.cpu.attention import CpuAttentionBackend
    from sglang_smc.upstream import Arguments

PLATFORM_NAME = "smc_cpu"

# SGLang sizes its KV cache for a device of its own: 85 % of the memory, for any model. A host also
# serves the rest of the system, and every page of the cache is written at start.
MEM_FRACTION = 0.7
MAX_TOTAL_TOKENS = 1 << 17

# The batched attention replaces SGLang's row loop under the loop's own name: by this name SGLang
# avoids Triton kernels (`support_triton`, `get_last_loc`).
ATTENTION_BACKEND = "torch_native"

# SGLang's own algorithms, which launch kernels; `bench/baselines` has those in torch.
OWN_ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "NGRAM")

# What fields of server arguments may be; first what runs here, then defaults of SGLang's.
_ALLOWED = {
    "enable_torch_compile": (False,),
    "enable_memory_saver": (False,),
    "hicache_mem_layout": ("layer_first", "page_first"),
}
# The same, unless Triton's kernels are interpreted.
_ALLOWED_BACKENDS = {"lora_backend": ("torch_native", "csgmv")} | dict.fromkeys(
    ("attention_backend", "prefill_attention_backend", "speculative_draft_attention_backend"),
    (ATTENTION_BACKEND, None, "intel_amx", "flex_attention"),
)


def activate() -> str | None:
    """Return the platform's qualified name where it should be used, else None.

    ``SGLANG_PLATFORM=smc_cpu`` forces it. Otherwise it yields to any accelerator that torch
    detects, and to SGLang's own CPU engine where that is selected.
    """
    import torch

    forced = os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME
    stock_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
    if forced or not (stock_cpu or torch.accelerator.is_available()):
        return "sglang_smc.cpu.platform:PlainCpuPlatform"
    return None


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU platform of SGLang that needs no kernels but torch's."""

    # OOT, not CPU: SGLang takes pools and backends from out-of-tree platforms only.
    _enum = PlatformEnum.OOT
    _runs_smc = False  # of the server arguments that were last resolved

    def get_device(self, device_id: int | None = None, **_: Any) -> str:
        """Return the device as a string: SGLang splits off an index and compares names."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: Arguments) -> None:
        """Fill in defaults; raise ValueError for what is not supported here."""
        _check_server_args(server_args, self)
        self._runs_smc = server_args.speculative_algorithm == "SMC"
        # SGLang has just set its AMX backend as the default.
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.lora_backend == "csgmv":  # SGLang's default, of Triton kernels
            server_args.lora_backend = "torch_native"
        # As torch copies host pools; SGLang's defaults are for kernels.
        server_args.hicache_io_backend = "direct"
        server_args.hicache_mem_layout = "layer_first"
        dtype = default_dtype() if server_args.dtype == "auto" else str(server_args.dtype)
        if os.environ.get(AUTO_DTYPE_ENV) != "1":
            server_args.dtype = dtype
        if server_args.max_total_tokens is None and server_args.mem_fraction_static is None:
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = MEM_FRACTION
        threads.set_default_environment(
            tp_size=server_args.tp_size, dp_size=server_args.dp_size, dtype=dtype
        )

    def init_backend(self) -> None:
        """Register the batched attention, and the hooks, in each process that may run a model."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_smc.server import hooks

        register_attention_backend(ATTENTION_BACKEND)(_create_attention_backend)
        hooks.install(hooks.CPU_PLATFORM)
        upstream.allocate_pageable("cpu")

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Return the pool for ordinary attention; None for SGLang's own, all torch or refused."""
        return self.get_mha_kv_pool_cls() if kind == "mha" else None

    def get_mla_kv_pool_cls(self) -> type:
        """Return SGLang's own pool, all torch, on releases without `get_kv_pool_cls`."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_mha_kv_pool_cls(self) -> type:
        """Return the pool for ordinary attention, on releases without `get_kv_pool_cls`."""
        from sglang_smc.cpu.pool import CpuKVPool

        return CpuKVPool

    def get_paged_allocator_cls(self) -> Any:
        """Return None for SGLang's allocator of pages; on releases where this is for pages of 1."""
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        from sglang_smc.upstream import IS_NEWEST

        if IS_NEWEST:
            return None
        return lambda size, *, page_size, **how: TokenToKVPoolAllocator(size, **how)

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return whether an algorithm of SGLang's own runs here: none does."""
        return False

    def linear_attention(self, runner: ModelRunner) -> Any:
        """Return the backend of linear-attention layers, for `patches/cpu/platform.py`."""
        from sglang_smc.cpu.recurrent import CpuRecurrentBackend

        return CpuRecurrentBackend(runner)

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Raise ValueError for snapshots of recurrent states; False would fail an assertion.

        SGLang calls this where its radix cache is to keep them, which is its default. Servers with
        SMC are refused later, by their own checks, which know whether the model runs at all.
        """
        if self._runs_smc:
            return True
        raise ValueError(
            "The model has layers with linear attention, and the radix cache keeps snapshots of "
            f"their states, which the {PLATFORM_NAME} platform does not make. Pass "
            "--disable-radix-cache."
        )

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Return the backend of SGLang's compiled helpers: inductor would take minutes."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        """Return the activity that /start_profile can record here."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return the activity that /start_profile can record here, for torch's profiler."""
        import torch

        return torch.profiler.ProfilerActivity.CPU


def _create_attention_backend(model_runner: ModelRunner) -> CpuAttentionBackend:
    from sglang_smc.cpu.attention import CpuAttentionBackend
    from sglang_smc.models.latent_attention import absorb

    if model_runner.use_mla_backend:
        absorb(ATTENTION_BACKEND)  # in prefill, too
    return CpuAttentionBackend(model_runner)


def _check_server_args(server_args: Arguments, platform: PlainCpuPlatform) -> None:
    from sglang_smc.upstream import IS_NEWEST  # which imports SGLang, and that this module

    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    found = []
    fields = _ALLOWED | ({} if is_interpreted else _ALLOWED_BACKENDS)
    if server_args.device != "cpu":
        found.append(
            f"device={server_args.device!r} (pass --device cpu and hide the accelerator, "
            "for example with CUDA_VISIBLE_DEVICES='')"
        )
    algorithm = server_args.speculative_algorithm
    if algorithm in OWN_ALGORITHMS and not platform.supports_speculative_algorithm(algorithm):
        found.append(f"speculative_algorithm={algorithm!r} (allowed: 'SMC')")
    if not IS_NEWEST:
        fields |= {"page_size": (1, None)}
    refuse(server_args, fields, *found)


def refuse(server_args: Arguments, fields: Mapping[str, tuple[Any, ...]], *found: str) -> None:
    """Raise ValueError for what was ``found``, and for fields that have another value than these.

    Args:
        fields: what each may be; the first is told.
    """
    wrong = list(found)
    for field, allowed in fields.items():
        value = getattr(server_args, field, allowed[0])  # each release lacks some
        if value not in allowed:
            wrong.append(f"{field}={value!r} (allowed: {allowed[0]!r})")
    if wrong:
        raise ValueError(f"the {PLATFORM_NAME} platform does not support {', '.join(wrong)}")
