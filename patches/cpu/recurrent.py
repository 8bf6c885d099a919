"""Run models with linear attention on the plain-CPU platform: torch in place of Triton."""

from collections.abc import Callable

import torch
from torch.nn.functional import silu

from sglang_smc import upstream
from sglang_smc.server.hooks import Patch


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


_KERNEL = (
    "It is a Triton kernel, which Qwen3.5 calls by its name on all devices but those that SGLang "
    "has another one for. No platform is asked."
)
_RETIRE = "SGLang asks platforms, or has a torch form of the layers of Qwen3.5."

PATCHES = (
    Patch(
        target="sglang.kernels.ops.attention.fla.layernorm_gated.rms_norm_gated",
        function=rms_norm_gated,
        why=_KERNEL,
        relies_on=("kernels/ops/attention/fla/layernorm_gated.py (RMSNorm.forward calls it)",),
        retire_when=_RETIRE,
        family=upstream.NEWEST,
    ),
    Patch(
        target="sglang.kernels.ops.attention.triton_gdn_fused_proj."
        "fused_qkvzba_split_reshape_cat_contiguous",
        function=split_projections,
        why=_KERNEL,
        relies_on=("srt/models/qwen3_5.py:1044",),
        retire_when=_RETIRE,
        family=upstream.NEWEST,
    ),
    Patch(
        target="sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul",
        function=fused_sigmoid_mul,
        why=_KERNEL,
        relies_on=("srt/models/qwen3_5.py:1639",),
        retire_when=_RETIRE,
        family=upstream.NEWEST,
    ),
)
