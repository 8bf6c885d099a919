"""Run SGLang's models on the plain CPU, with SMC or without.

The hooks cover tensor-parallel heads, rotary embeddings, capped logits, hybrid models, shared
experts, grammars and weights in 8 bits.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_smc import upstream
from sglang_smc.cpu import quantized
from sglang_smc.server.hooks import Hooks

if TYPE_CHECKING:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_loader.loader import DefaultModelLoader


PATCHES = Hooks()


@PATCHES.on(
    "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
    "srt/model_executor/model_runner.py:1301 (calls it where the device is cpu)",
    "srt/layers/linear.py (QKVParallelLinear replicates key heads, as on a GPU)",
    why="SGLang pads them for every device called cpu, and weights to match only where its own "
    "CPU engine runs (SGLANG_USE_CPU_ENGINE=1): a model with one key head would fail under "
    "--tp-size 2 as its weights are loaded. No platform is asked.",
    retire_when="SGLang pads heads only where it pads their weights.",
)
def adjust_config_with_unaligned_cpu_tp(
    original: Callable, model_config: "ModelConfig", load_config: "LoadConfig", tp_size: int
) -> "ModelConfig":
    """Keep numbers of heads, and widths: layers replicate key heads for tensor parallelism."""
    return model_config


@PATCHES.on(
    "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu",
    "srt/layers/rotary_embedding/factory.py:541 (get_rope_wrapper calls it)",
    why="For every device called cpu SGLang makes the one that its own CPU engine has a kernel "
    "for, and asserts that the model's is of that kind: GLM-4.7-Flash, whose positions are "
    "not scaled, would fail. No platform is asked.",
    retire_when="SGLang's get_rope_cpu takes embeddings of all kinds.",
)
def get_rope_cpu(
    original: Callable,
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> torch.nn.Module:
    """Return the rotary embedding that layers of latent attention get on a GPU."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(
        head_size=head_size,
        rotary_dim=rotary_dim,
        max_position=max_position,
        base=base,
        is_neox_style=is_neox_style,
        rope_scaling=rope_scaling,
        dtype=dtype,
        partial_rotary_factor=partial_rotary_factor,
    )


@PATCHES.on(
    "sglang.srt.model_loader.loader._get_quantization_config",
    "srt/model_loader/weight_utils.py:275 (asks the platform for a class by format)",
    why="A platform's class for a format makes layers of that format; where hf_quant_config.json "
    "says it, 0.5.17 takes SGLang's own. Here weights reach layers in 16 or 32 bits.",
    retire_when="A platform may have weights dequantized as they are read.",
)
def quantization_of_layers(
    original: Callable, model_config: "ModelConfig", load_config: "LoadConfig"
) -> None:
    """Return none, after a check that a quantized checkpoint's weights can be dequantized."""
    method = model_config.quantization
    if method is None:
        return
    quantized.check(method, model_config._parse_quant_hf_config())
    quantized.announce(model_config.model_path, method, model_config.dtype)


@PATCHES.on(
    "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator",
    "srt/model_loader/loader.py:766 (all tensors of a checkpoint, as the model gets them)",
    "srt/model_executor/model_runner_components/weight_updater.py:206 (new weights, likewise)",
    why="SGLang's layers in 8 bits launch kernels. No platform sees weights as they are read.",
    retire_when="A platform may have weights dequantized as they are read.",
)
def dequantized_weights(
    original: Callable, loader: "DefaultModelLoader", source: Any, **resolved: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the weights of a quantized checkpoint in float32."""
    weights = original(loader, source, **resolved)
    model_config = source.model_config
    if model_config is None or model_config.quantization is None:
        return weights
    block = quantized.block_of(model_config._parse_quant_hf_config())
    return quantized.dequantized(weights, block)


@PATCHES.on(
    "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask",
    "srt/constrained/xgrammar_backend.py:60",
    why="Without one, pinning raises, and takes the scheduler with it. A grammar backend of "
    "our own (register_grammar_backend) would lose the reasoning parser's wrapper.",
    retire_when="A release that serves grammars on a CPU is the oldest supported.",
    family=upstream.OLDER,
)
def allocate_token_bitmask(original: Callable, vocab_size: int, batch_size: int) -> torch.Tensor:
    """Allocate a grammar's bitmask, in pinned memory only where there is an accelerator."""
    if torch.accelerator.is_available():
        return original(vocab_size, batch_size)
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)


@PATCHES.on(
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
    "srt/constrained/xgrammar_backend.py:137",
    why="SGLang has kernels for accelerators alone, and raises.",
    retire_when="A release that serves grammars on a CPU is the oldest supported.",
    family=upstream.OLDER,
)
def apply_vocab_mask(
    original: Callable, grammar: "XGrammarGrammar", logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """Apply a grammar's mask to logits that are on a CPU, by xgrammar's own kernel."""
    if logits.device.type != "cpu":
        return original(grammar, logits, vocab_mask)
    from xgrammar import apply_token_bitmask_inplace

    return apply_token_bitmask_inplace(logits, vocab_mask)


class _Unpinned(TorchFunctionMode):
    """Leave memory pageable where code asks for pinned memory, which needs an accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        asked = kwargs or {}
        return func(*args, **{name: asked[name] for name in asked if name != "pin_memory"})


_PINS: dict[str, Any] = {
    "why": "SGLang's LoRA layers, and its torch backend, pin memory on every machine.",
    "retire_when": "SGLang pins where it can (is_pin_memory_available).",
}


@PATCHES.on(
    "sglang.srt.lora.lora_manager.LoRAManager.__init__",
    "srt/lora/layers.py:473 (offsets of each layer)",
    **_PINS,
)
@PATCHES.on(
    "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
    "srt/lora/backend/torch_backend.py:237",
    **_PINS,
)
def without_pinned_memory(original: Callable, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Run SGLang's torch backend of LoRA adapters without pinned memory."""
    with _Unpinned():
        original(manager, *args, **kwargs)


@PATCHES.on(
    "sglang.srt.layers.logits_processor.fused_softcap",
    "srt/layers/logits_processor.py:1066",
    why="SGLang has torch's own formula where its CPU engine runs, and a Triton kernel for all "
    "other devices.",
    retire_when="SGLang asks where the logits are.",
)
def softcap_in_place(original: Callable, logits: torch.Tensor, cap: float) -> None:
    """Cap logits ``[rows, V]`` that are on a CPU, as those of Gemma 2: cap * tanh(logit / cap)."""
    if logits.device.type != "cpu":
        return original(logits, cap)
    logits.div_(cap).tanh_().mul_(cap)
    return None


@PATCHES.on(
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
    "srt/layers/attention/attention_registry.py:392 (wraps hybrid models)",
    why="Platforms and the registry of backends give the full one alone; SGLang wraps it with "
    "its own linear one, of Triton kernels.",
    retire_when="SGLang has a registry of linear-attention backends that platforms reach.",
    family=upstream.NEWEST,
)
def attn_backend_wrapper(
    original: Callable, runner: "ModelRunner", full_attn_backend: "AttentionBackend"
) -> "AttentionBackend":
    """Return a hybrid backend of torch's linear attention and the full attention."""
    if not upstream.is_gated_delta(runner.model_config):
        return original(runner, full_attn_backend)
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.platforms import current_platform

    from sglang_smc.server import hooks

    hooks.install(hooks.CPU_RECURRENT)
    config: Any = runner.model_config.hf_text_config
    platform: Any = current_platform  # ours
    linear = platform.linear_attention(runner)
    return HybridLinearAttnBackend(full_attn_backend, linear, config.full_attention_layer_ids)


@PATCHES.on(
    "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
    "srt/models/qwen2_moe.py:731 and :877",
    why="It launches a Triton kernel, which Qwen2-MoE and Qwen3.5 MoE call on all devices but "
    "those that SGLang has another one for. No platform is asked.",
    retire_when="SGLang asks platforms, or has a torch form of gated shared experts.",
    family=upstream.NEWEST,
)
def fused_gate_sigmoid_mul(
    original: Callable,
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """Write the shared expert's output ``[tokens, H]``, times its gate, or add it."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid().unsqueeze(1)  # [tokens, 1]
    gated = shared_output.float() * gate
    output.copy_(output.float() + gated if do_add else gated)


@PATCHES.on(
    "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__",
    "srt/mem_cache/pool_host/mha.py:65 and mla.py:58 (import the copy where there is CUDA)",
    "srt/mem_cache/pool_host/common.py:349 (registers pinned memory with CUDA)",
    why="Host pools of the hierarchical cache are pinned on every machine, and copied by functions "
    "of a CUDA wheel. No platform is asked.",
    retire_when="SGLang asks platforms for the memory and the copies of host pools.",
    family=upstream.NEWER,
)
def host_pool(original: Callable, pool: Any, *, pin_memory: bool, **geometry: Any) -> None:
    """Build a host pool of pageable memory, which torch copies from and to."""
    from sglang.srt.mem_cache.pool_host import mha, mla

    for module in (mha, mla):
        vars(module)["transfer_kv_direct"] = copy_slots
    original(pool, pin_memory=False, **geometry)


def copy_slots(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy slots of KV from one pool to another, each a tensor ``[slots, ...]`` for each layer."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]
