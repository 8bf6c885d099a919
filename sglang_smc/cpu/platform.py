"""A plain-torch CPU platform for stock SGLang.

SGLang's own CPU engine needs Intel's AMX kernels (a special build of ``sgl-kernel``). This
platform runs the same scheduler, radix cache and HTTP server with torch operators alone, for
Llama-type models on any x86 CPU: laptops and continuous integration.

SGLang finds ``activate`` through the entry point ``smc_cpu`` of group ``sglang.srt.platforms``, and
calls it in every process, on machines with an accelerator too. So nothing heavy is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_smc.cpu import threads
from sglang_smc.dtype import default_dtype

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_smc.cpu.attention import CpuAttentionBackend
    from sglang_smc.upstream import Arguments

PLATFORM_NAME = "smc_cpu"

# SGLang sizes its KV cache for a device that it has to itself: 85 % of the memory, whatever the
# model. A host also serves the rest of the system, and every page of the cache is written at start.
MEM_FRACTION = 0.7
MAX_TOTAL_TOKENS = 1 << 17

# The batched attention takes the place of SGLang's row loop under the loop's own name: SGLang
# tells by this name (`support_triton`, `get_last_loc`) that Triton kernels are out of reach.
ATTENTION_BACKEND = "torch_native"

# SGLang's own, where it asks a platform for them; and their options that do not run here, with the
# value that asks for nothing.
SPECULATIVE_ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "NGRAM")
SPECULATIVE_OPTIONS = {
    "speculative_use_rejection_sampling": False,
    "speculative_use_block_verification": False,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "speculative_draft_window_size": None,
    "speculative_adaptive": False,
    "enable_multi_layer_eagle": False,
}


def activate() -> str | None:
    """Return the platform's qualified name where it should serve, else None.

    ``SGLANG_PLATFORM=smc_cpu`` forces it. Otherwise it steps back for any accelerator that
    torch sees, and for a user who asked for SGLang's own CPU engine.
    """
    import torch

    forced = os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME
    stock_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
    if forced or not (stock_cpu or torch.accelerator.is_available()):
        return "sglang_smc.cpu.platform:PlainCpuPlatform"
    return None


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU platform of SGLang that needs no kernels but torch's."""

    # OOT, not CPU: only out-of-tree platforms are asked for their pools and backends.
    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = None, **_: Any) -> str:
        """The device as a string: SGLang splits off an index and compares names."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: Arguments) -> None:
        """Fill in what the user left open; refuse what cannot run here."""
        _check_server_args(server_args)
        # SGLang has just put its AMX backend where the user named none.
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.dtype == "auto":
            server_args.dtype = default_dtype()
        if server_args.max_total_tokens is None and server_args.mem_fraction_static is None:
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = MEM_FRACTION
        threads.set_default_environment(
            tp_size=server_args.tp_size, dp_size=server_args.dp_size, dtype=str(server_args.dtype)
        )

    def init_backend(self) -> None:
        """Register the batched attention, and our hooks, in each process that may run a model."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_smc.server import hooks

        register_attention_backend(ATTENTION_BACKEND)(_create_attention_backend)
        hooks.put_in_force(hooks.CPU_PLATFORM)

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Ours for ordinary attention; SGLang's own for the others, refused or all torch."""
        return self.get_mha_kv_pool_cls() if kind == "mha" else None

    def get_mla_kv_pool_cls(self) -> type:
        """What a release asks for that has no `get_kv_pool_cls`: SGLang's own, all torch."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_mha_kv_pool_cls(self) -> type:
        """What a release asks for that has no `get_kv_pool_cls`."""
        from sglang_smc.cpu.pool import CpuKVPool

        return CpuKVPool

    def get_paged_allocator_cls(self) -> type:
        """What a release asks for whose platforms allocate pages of one slot, too."""
        from sglang_smc.cpu.pool import CpuTokenAllocator

        return CpuTokenAllocator

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Whether SGLang's own algorithm runs here."""
        return algorithm in SPECULATIVE_ALGORITHMS

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sglang_smc.cpu.trees import slots_between

        return slots_between

    def get_speculative_worker_cls(self, algorithm: str) -> None:
        """SGLang's own worker; asked in the process that will run it, so our hooks are in time."""
        from sglang_smc.cpu.speculation import stand_in_for_wheel
        from sglang_smc.server import hooks

        if algorithm in SPECULATIVE_ALGORITHMS:
            stand_in_for_wheel()
            hooks.put_in_force(hooks.CPU_SPECULATION)

    def draft_attention(self, runner: ModelRunner, topk: int, num_steps: int, each: bool) -> Any:
        """For `patches/cpu_speculation.py`: of each pass of a draft, or of what it reads then."""
        from sglang_smc.cpu.speculation import DraftExtend, DraftSteps

        return DraftSteps(runner, topk, num_steps) if each else DraftExtend(runner)

    def linear_attention(self, runner: ModelRunner) -> Any:
        """For `patches/cpu_platform.py`: of layers that attend linearly."""
        from sglang_smc.cpu.recurrent import CpuRecurrentBackend

        return CpuRecurrentBackend(runner)

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Refuse snapshots of recurrent states; a plain False would be SGLang's bare assertion.

        SGLang asks where its radix cache is to keep them, which is its default.
        """
        raise ValueError(
            "The model has layers with linear attention, and the radix cache keeps snapshots of "
            f"their states, which the {PLATFORM_NAME} platform does not make. Pass "
            "--disable-radix-cache, as SMC asks for with such models on any device."
        )

    def get_compile_backend(self, mode: str | None = None) -> str:
        """The backend of SGLang's compiled helpers; inductor would need a compiler and minutes."""
        return "eager"

    def get_dispatch_key_name(self) -> str:
        """Operators run their ``forward_native``: torch only."""
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """What /start_profile can record here."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """What /start_profile can record here, as torch's profiler takes it."""
        import torch

        return torch.profiler.ProfilerActivity.CPU


def _create_attention_backend(model_runner: ModelRunner) -> CpuAttentionBackend:
    from sglang_smc.cpu.attention import CpuAttentionBackend
    from sglang_smc.cpu.latent import CpuLatentBackend

    if model_runner.use_mla_backend:
        return CpuLatentBackend(model_runner, ATTENTION_BACKEND)
    return CpuAttentionBackend(model_runner)


def _check_server_args(server_args: Arguments) -> None:
    refused = {
        f"device={server_args.device!r} (pass --device cpu and hide the accelerator, "
        "for example with CUDA_VISIBLE_DEVICES='')": server_args.device != "cpu",
        f"page_size={server_args.page_size}": server_args.page_size not in (None, 1),
        "enable_torch_compile": server_args.enable_torch_compile,
    }
    if server_args.speculative_algorithm in (*SPECULATIVE_ALGORITHMS, "NEXTN"):
        for field, nothing in SPECULATIVE_OPTIONS.items():
            value = getattr(server_args, field, nothing)  # no release has them all
            refused[f"{field}={value!r} (allowed: {nothing!r})"] = value != nothing
    found = [what for what, present in refused.items() if present]
    if found:
        raise ValueError(f"the {PLATFORM_NAME} platform does not support {', '.join(found)}")
