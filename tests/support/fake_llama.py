"""A decoder layer of Llama 3.2 1B on the fake GPU, as SGLang runs it there, and its launches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import PROMPT, Account, fake_cuda
from particle_cases import runner_of
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models import llama_eagle3
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.skinny import skinny
from sglang_smc.models.chains import Chains
from sglang_smc.models.draft_layers import fuse_layers, quantize_layers
from sglang_smc.models.forward import ParticleForward

HIDDEN = 2048
MLP = 8192
Q_HEADS = 32
KV_HEADS = 8
HEAD_DIM = 64
VOCAB_SIZE = 512
SLOTS = 1000
MAX_TAIL = 265
DTYPE = torch.bfloat16


def bare(kind: type) -> Any:
    """An object of exactly a class of SGLang's, which has nothing yet."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


def linear(kind: type, inputs: int, outputs: int, **how: Any) -> Any:
    """A projection of SGLang's, whose own product is torch's."""
    own = bare(kind)
    own.weight = torch.nn.Parameter(torch.empty(outputs, inputs, **how), requires_grad=False)
    own.bias = None
    own.quant_method = UnquantizedLinearMethod()
    own.forward = lambda rows: (torch.nn.functional.linear(rows, own.weight), None)
    return own


def norm(width: int, **how: Any) -> Any:
    own = bare(RMSNorm)
    own.weight = torch.nn.Parameter(torch.empty(width, **how), requires_grad=False)
    own.variance_epsilon = 1e-5
    own.variance_size_override = None
    return own


def decoder_layer(
    kind: type = LlamaDecoderLayer,
    attention: type = LlamaAttention,
    mlp: type = LlamaMLP,
    *,
    hidden: int = HIDDEN,
    wide: int = MLP,
    heads: tuple[int, int, int] = (Q_HEADS, KV_HEADS, HEAD_DIM),
    **how: Any,
) -> Any:
    """A decoder layer without values, of the parts that SGLang's has."""
    layer = bare(kind)
    own = bare(attention)
    gates = bare(mlp)
    q_heads, kv_heads, dim = heads
    own.q_size = q_heads * dim
    own.kv_size = kv_heads * dim
    inputs = hidden * (2 if kind is llama_eagle3.LlamaDecoderLayer else 1)
    own.qkv_proj = linear(QKVParallelLinear, inputs, own.q_size + 2 * own.kv_size, **how)
    own.o_proj = linear(RowParallelLinear, own.q_size, hidden, **how)
    rotary = RotaryEmbedding(dim, dim, PROMPT, 500_000, True, how["dtype"])
    own.rotary_emb = rotary.to(how.get("device", "cpu"))
    own.attn = RadixAttention(q_heads, dim, 0.125, kv_heads, layer_id=0)
    gates.gate_up_proj = linear(MergedColumnParallelLinear, hidden, 2 * wide, **how)
    gates.down_proj = linear(RowParallelLinear, wide, hidden, **how)
    layer.self_attn = own
    layer.mlp = gates
    for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
        setattr(layer, name, norm(hidden, **how))
    return layer


class FakeLlama(torch.nn.Module):
    """One layer. SGLang's own kernels are names in the account; products are torch's."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account
        self.layer = decoder_layer(dtype=DTYPE, device="cuda")
        self.layer.forward = self._stock

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        with self._account.in_model():
            hidden = torch.empty(len(tokens), HIDDEN, dtype=DTYPE, device="cuda")
        begin = len(self._account.calls)
        self.layer(positions, hidden, batch)
        self.launches = self._account.calls[begin:]
        logits = torch.empty(batch.batch_size, VOCAB_SIZE, device="cuda")
        return SimpleNamespace(next_token_logits=logits, hidden_states=None)

    def _stock(self, positions: torch.Tensor, hidden: torch.Tensor, batch: Any) -> Any:
        attention = self.layer.self_attn
        mlp = self.layer.mlp
        hidden = attention(positions, self._norm(hidden), batch)
        gate_up, _ = mlp.gate_up_proj(self._norm(hidden))
        self._account.calls.append("silu_and_mul")
        return mlp.down_proj(gate_up[:, :MLP])

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        self._account.calls.append("fused_add_rmsnorm")
        return hidden


def layer_pass(
    monkeypatch: pytest.MonkeyPatch, num_columns: int, size: int, *, layers: str
) -> tuple[list[str], int, int]:
    """Launches of one layer, the bytes of weights that its products read, launches that overlap.

    As a draft of 8 particles of each of ``size`` requests runs it.
    """
    read: list[int] = []
    overlaps: list[bool] = []

    def note(_: Any, *args: Any, **options: Any) -> None:
        """Of all that a kernel is given, parameters of two dimensions are read whole."""
        overlaps.append(options.get("launch_pdl", False))
        weights = (one for one in args if isinstance(one, torch.nn.Parameter) and one.dim() == 2)
        read.extend(one.nbytes for one in weights)

    def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        read.append(weight.nbytes)
        return product(rows, weight)

    product = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", multiply)
    with fake_cuda(monkeypatch, note) as (gpu, account):

        def rotate(_: Any, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
            account.calls.append("apply_rope_with_cos_sin_cache_inplace")
            return q, k

        monkeypatch.setattr(RotaryEmbedding, "forward", rotate)
        monkeypatch.setattr(work, "chip_of", lambda _: work.H100)
        cache = torch.empty(SLOTS, KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        pool = SimpleNamespace(
            dtype=DTYPE,
            start_layer=0,
            layer_num=1,
            get_key_buffer=lambda _: cache,
            get_kv_buffer=lambda _: (cache, cache),
            set_kv_buffer=lambda *_: account.calls.append("store_cache"),
        )
        table = torch.zeros(1 + size, PROMPT, dtype=torch.int32, device="cuda")
        tails = torch.zeros(8 * len(table), 512, dtype=torch.int32, device="cuda")
        runner = runner_of(table, pool, DTYPE, (Q_HEADS, KV_HEADS), context_len=PROMPT)
        runner.model = model = FakeLlama(account)
        forward = ParticleForward(runner, tails, "triton", max_columns=9)
        if layers == "fused-int8":
            assert quantize_layers(model) == 1
            account.calls.clear()
        if layers != "sglang":
            assert fuse_layers(model, forward.attn_backend, skinny) == 1
        chains = Chains.of_padding((size, 8, num_columns), MAX_TAIL, "cuda")
        with gpu.no_waiting(), account:
            forward.next_logits(chains)
        return model.launches, sum(read), sum(overlaps)
