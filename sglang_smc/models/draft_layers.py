"""Run decoder layers of a draft as four products and their attention, where few rows are run.

There launches cost as much as what they do, and SGLang's layer takes a dozen: norms, products, sums
of their parts, SiLU. Here a product (`skinny`) does what stands around it. All reads the layer's
own parameters, so that new weights take effect. Roundings differ from SGLang's, which changes the
draft's distribution alone, as it is drawn from. So do weights in 8 bits: int8 rows with a float32
factor each (W8A16), by which the kernel multiplies as well.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models import llama_eagle3
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from sglang.srt.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP
from sglang.srt.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer
from sglang.srt.models.utils import apply_qk_norm
from torch.nn import functional

from sglang_smc.models.attention import ParticleAttention
from sglang_smc.smc.ops import MOST_SKINNY_ROWS, Fused
from sglang_smc.upstream import IS_NEWER

_Midlayer = llama_eagle3.LlamaDecoderLayer  # of EAGLE-3 heads
# What each is made of. Their subclasses may compute something else.
_PARTS: dict[type, tuple[type, type]] = {
    LlamaDecoderLayer: (LlamaAttention, LlamaMLP),
    Qwen2DecoderLayer: (Qwen2Attention, Qwen2MLP),
    Qwen3DecoderLayer: (Qwen3Attention, Qwen2MLP),
    _Midlayer: (LlamaAttention, LlamaMLP),
}
_LINEAR = QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear
_ROWS_AT_ONCE = 4096  # of a matrix, in 16 or 32 bits, which bounds the memory that it takes
_MOST_SLICED_ROWS = 4 * MOST_SKINNY_ROWS


class Int8Rows(LinearMethodBase):
    """Multiply by the weights of a layer or an embedding, or look them up, in 8 bits.

    Its parameter holds int8 at one address from now on, which captured rounds read.
    """

    skinny: Callable[..., torch.Tensor] | None = None
    """What multiplies few rows, as `sglang_smc.smc.ops.skinny`; None: torch alone."""
    result: torch.dtype | None = None
    """Type of products, for an LM head float32; None: as the rows."""

    def __init__(self, layer: Any) -> None:
        table = layer.weight
        loaded = layer.weight.data
        self.dtype = loaded.dtype
        self.scale = loaded.new_zeros(len(loaded), dtype=torch.float32)
        self._load_rows = vars(table).get("weight_loader", default_weight_loader)
        table.data = torch.zeros_like(loaded, dtype=torch.int8)
        self._quantize(table, loaded)
        table.weight_loader = self._load
        layer.quant_method = self

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply rows ``[M, inputs]``: in slices by the kernel, or more by parts of the matrix.

        Weights are never copied whole: a captured round keeps the memory of all that it makes.
        """
        table: Any = layer.weight
        if self.skinny is not None and 0 < len(x) <= _MOST_SLICED_ROWS:
            fused = Fused(scale=self.scale, bias=bias, dtype=self.result)
            slices = [self.skinny(some, table, fused) for some in x.split(MOST_SKINNY_ROWS)]
            return slices[0] if len(slices) == 1 else torch.cat(slices)
        products = x.new_empty(len(x), len(table), dtype=self.result)  # [M, outputs]
        parts = (products.T, table, self.scale)
        for to, rows, scale in zip(*(one.split(_ROWS_AT_ONCE) for one in parts), strict=True):
            found = functional.linear(x, rows.to(x.dtype))
            torch.mul(found, scale, out=to.T)
        return products if bias is None else products.add_(bias)

    def embedding(self, layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Look up rows of a table that is an LM head, too."""
        table: Any = layer.weight
        return (table[ids] * self.scale[ids].unsqueeze(-1)).to(self.dtype)

    def _load(self, table: torch.nn.Parameter, weights: torch.Tensor, *shard: Any) -> None:
        """Take new weights of all rows or of some, as SGLang's loader of the table."""
        staged = torch.full_like(table, torch.nan, dtype=self.dtype, device=weights.device)
        whole: Any = torch.nn.Parameter(staged, requires_grad=False)
        vars(whole).update(vars(table))
        self._load_rows(whole, weights, *shard)
        self._quantize(table, whole.data)

    def _quantize(self, table: torch.nn.Parameter, weights: torch.Tensor) -> None:
        """Replace rows by those of ``weights`` ``[outputs, inputs]``, but where these are NaN."""
        parts = (table.data, self.scale, weights)
        for rows, scale, part in zip(*(one.split(_ROWS_AT_ONCE) for one in parts), strict=True):
            new = part.to(rows.device, torch.float32)  # [R, inputs]
            given = ~new.isnan().all(1)
            # A row of zeros, such as pads a vocabulary, has any factor.
            by = new.abs().amax(1).div(127).clamp_min(torch.finfo(torch.float32).tiny)
            scale.copy_(by.where(given, scale))
            rows.copy_(new.div(by.unsqueeze(1)).round().where(given.unsqueeze(1), rows))


def fuse_layers(
    model: torch.nn.Module,
    attention: ParticleAttention,
    skinny: Callable[..., torch.Tensor],
    fuses: Callable[[int], bool] | None = None,
) -> int:
    """Have all decoder layers of a model on one rank run so in passes of ``attention``, or none.

    Args:
        skinny: as `sglang_smc.smc.ops.skinny`.
        fuses: whether a pass over so many rows is to run so; None: all that ``skinny`` takes.

    Returns:
        How many they are; 0 where one has another type, other parts, or sizes that no kernel takes.
    """
    layers = _layers_of(model)
    for layer in layers:
        for method in (one.quant_method for one in _projections(layer)):
            if isinstance(method, Int8Rows):
                method.skinny = skinny
        own: Any = DraftLayer(layer, attention, skinny, fuses, is_last=layer is layers[-1])
        layer.forward = own.run_pairs if type(layer) is _Midlayer else own.run
    return len(layers)


def quantize_layers(model: torch.nn.Module) -> int:
    """Keep the projections of all layers in 8 bits, or none; return how many layers these are."""
    layers = _layers_of(model)
    for linear in (one for layer in layers for one in _projections(layer)):
        Int8Rows(linear)
    return len(layers)


def fuse_draft(
    model: Any, attention: ParticleAttention, skinny: Callable[..., torch.Tensor]
) -> None:
    """Fuse the layers of a draft, and its LM head if that is in 8 bits.

    Raises ValueError, naming the flag, for layers that do not fit.
    """
    if not fuse_layers(model, attention, skinny):
        raise _not_fused(model, "fused")
    if (head := vars(model).get("int8_head")) is not None:
        head.skinny = skinny


def quantize_draft(model: Any, head: Any) -> None:
    """Keep the layers of a draft in 8 bits, and its LM head if it is its own.

    Raises ValueError, naming the flag, for layers or an LM head that do not fit.
    """
    if not quantize_layers(model):
        raise _not_fused(model, "fused-int8")
    if head is None:
        return
    rows, width = head.weight.shape
    if rows % 16 or width % 64:
        raise ValueError(
            "--speculative-smc-draft-layers is 'fused-int8', and the draft's LM head has "
            f"{rows} rows of {width} numbers; allowed: multiples of 16 and of 64. Shorten "
            "--speculative-token-map, or pass fused."
        )
    model.int8_head = Int8Rows(head)
    model.int8_head.result = torch.float32


def _not_fused(model: Any, given: str) -> ValueError:
    return ValueError(
        f"--speculative-smc-draft-layers is {given!r}, and the draft is a "
        f"{type(model).__name__}; allowed: layers of Llama, Qwen 2, Qwen 3 and EAGLE-3, not "
        "quantized, in sizes that 128 divides. Leave it out."
    )


def _layers_of(model: torch.nn.Module) -> list[Any]:
    """Return all decoder layers of a model, or none where one cannot be fused."""
    layers = [one for one in model.modules() if type(one) in _PARTS]
    num_attentions = sum(isinstance(one, RadixAttention) for one in model.modules())
    if len(layers) != num_attentions or not all(map(_is_plain, layers)):
        return []
    if _Midlayer in map(type, layers) and len(layers) > 1:  # the others hand on pairs
        return []
    return layers


def _is_plain(layer: Any) -> bool:
    """Return whether a layer has no parts but those that `DraftLayer` knows, of fitting sizes."""
    parts = type(layer.self_attn), type(layer.mlp)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [layer.hidden_norm] if type(layer) is _Midlayer else []
    linears = _projections(layer)
    if parts != _PARTS[type(layer)] or tuple(map(type, linears)) != _LINEAR:
        return False
    return (
        all(type(one.quant_method) in (UnquantizedLinearMethod, Int8Rows) for one in linears)
        and all(one.bias is None for one in linears[1:])
        and all(one.weight.shape[0] % 32 == one.weight.shape[1] % 128 == 0 for one in linears)
        and all(type(one) is RMSNorm and one.variance_size_override is None for one in norms)
        and len({_dtype_of(one) for one in (*norms, *linears)}) == 1
    )


def _dtype_of(part: Any) -> torch.dtype:
    method = vars(part).get("quant_method")
    return method.dtype if isinstance(method, Int8Rows) else part.weight.dtype


def _projections(layer: Any) -> tuple[Any, ...]:
    own = layer.self_attn
    mlp = layer.mlp
    return own.qkv_proj, own.o_proj, mlp.gate_up_proj, mlp.down_proj


class DraftLayer:
    """A decoder layer's forward: its own for more rows, and in passes of other attention."""

    def __init__(
        self,
        layer: Any,
        attention: ParticleAttention,
        skinny: Callable[..., torch.Tensor],
        fuses: Callable[[int], bool] | None = None,
        *,
        is_last: bool,
    ) -> None:
        self._fuses = fuses
        self._layer = layer
        self._forward = layer.forward
        self._attention = attention
        self._skinny = skinny
        self._is_last = is_last
        # Layers of 0.5.17, and of heads, return an output and what it is yet to be added to.
        self._returns_pairs = type(layer) is _Midlayer or not IS_NEWER

    def run(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        *rest: Any,
        **more: Any,
    ) -> Any:
        """Run the layer over ``[M, hidden]``; arguments and result as of SGLang's `forward`."""
        if not self._is_asked(hidden_states):
            return self._forward(positions, hidden_states, forward_batch, *rest, **more)
        given = (*rest, *more.values())
        assert all(one is None for one in given), "all layers are fused, and none is captured"
        qkv = self._product(0, hidden_states, norm=self._layer.input_layernorm)
        return self._rest(qkv, hidden_states, positions, forward_batch)

    def run_pairs(
        self,
        positions: torch.Tensor,
        embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        residual: torch.Tensor | None,
    ) -> Any:
        """Run an EAGLE-3 head's layer, which reads embeddings and states side by side."""
        if not self._is_asked(hidden_states):
            return self._forward(positions, embeds, hidden_states, forward_batch, residual)
        beside = {"beside": hidden_states, "beside_norm": self._layer.hidden_norm.weight}
        qkv = self._product(0, embeds, norm=self._layer.input_layernorm, **beside)
        return self._rest(qkv, hidden_states, positions, forward_batch)

    def _is_asked(self, hidden_states: torch.Tensor) -> bool:
        num_rows = len(hidden_states)
        if get_attn_backend() is not self._attention or not 0 < num_rows <= MOST_SKINNY_ROWS:
            return False
        return self._fuses is None or self._fuses(num_rows)

    def _product(
        self, nth: int, rows: torch.Tensor, norm: RMSNorm | None = None, **around: Any
    ) -> torch.Tensor:
        """Multiply normalized rows by a projection, the ``nth`` of `_projections`."""
        linear = _projections(self._layer)[nth]
        method = linear.quant_method
        scale = method.scale if isinstance(method, Int8Rows) else None
        if norm is not None:
            around |= {"norm": norm.weight, "eps": norm.variance_epsilon}
        return self._skinny(rows, linear.weight, Fused(scale=scale, bias=linear.bias, **around))

    def _rest(
        self,
        qkv: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> Any:
        own = self._layer.self_attn
        query, key, value = qkv.split([own.q_size, own.kv_size, own.kv_size], dim=-1)
        if type(own) is Qwen3Attention:
            heads = {"q_norm": own.q_norm, "k_norm": own.k_norm, "head_dim": own.head_dim}
            query, key = apply_qk_norm(q=query, k=key, alt_stream=own.alt_stream, **heads)
        query, key = own.rotary_emb(positions, query, key)
        attended = own.attn(query, key, value, forward_batch)
        hidden = self._product(1, attended, residual=residual, fetches_more=True)
        gated = self._product(2, hidden, norm=self._layer.post_attention_layernorm, gated=True)
        is_pair = self._returns_pairs and self._is_last
        output = self._product(3, gated, residual=None if is_pair else hidden)
        return (output, hidden if is_pair else None) if self._returns_pairs else output
