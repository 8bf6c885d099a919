"""Run models with linear attention on the plain-CPU platform: torch in place of Triton."""

from collections.abc import Callable

import torch
from torch.nn.functional import silu

from sglang_smc.server.hooks import Hooks
from sglang_smc.upstream import NEWEST

_KERNEL = (
    "It is a Triton kernel, which Qwen3.5 calls by its name on all devices but those that SGLang "
    "has another one for. No platform is asked."
)
_RETIRE = "SGLang asks platforms, or has a torch form of the layers of Qwen3.5."
PATCHES = Hooks(why=_KERNEL, retire_when=_RETIRE)


@PATCHES.on(
    "sglang.kernels.ops.attention.fla.layernorm_gated.rms_norm_gated",
    "kernels/ops/attention/fla/layernorm_gated.py (RMSNorm.forward calls it)",
    family=NEWEST,
)
def rms_norm_gated(
    original: Callable,
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """Return the RMS norm of ``x`` ``[..., N]``, times SiLU or sigmoid of the gate ``z``."""
    plain = is_rms_norm and norm_before_gate and group_size is None and bias is None
    assert z is not None and plain, "the norm of a gated delta net"
    own = x.float()
    normed = own * torch.rsqrt(own.square().mean(-1, keepdim=True) + eps) * weight.float()
    gate = z.float().view(x.shape)
    opened = gate.sigmoid() if activation == "sigmoid" else silu(gate)
    return (normed * opened).to(x.dtype)


@PATCHES.on(
    "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
    "srt/models/qwen3_5.py:1044",
    family=NEWEST,
)
def split_projections(
    original: Callable,
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, ...]:
    """Split ``[tokens, q | k | v | z]`` and ``[tokens, b | a]`` into qkv, z by head, b and a."""
    of_values = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + of_values, of_values], dim=1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


@PATCHES.on(
    "sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul",
    "srt/models/qwen3_5.py:1639",
    family=NEWEST,
)
def fused_sigmoid_mul(
    original: Callable,
    attn_output: torch.Tensor,
    gate: torch.Tensor,
    inplace: bool = False,
    quant: bool = False,
) -> torch.Tensor:
    """Return ``attn_output * sigmoid(gate)``; a gate by head is flattened."""
    assert not quant, "no 8-bit products on this platform"
    opened = gate.float().sigmoid().reshape(attn_output.shape)
    product = (attn_output.float() * opened).to(attn_output.dtype)
    return attn_output.copy_(product) if inplace else product
