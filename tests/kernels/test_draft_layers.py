"""Which layers of a draft are run in four products, when, and what they compute."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_llama import bare, decoder_layer, linear, norm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.models import llama_eagle, llama_eagle3
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from sglang.srt.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP
from sglang.srt.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_smc.models import draft_layers, head_parts
from sglang_smc.models.draft_layers import fuse_layers
from sglang_smc.ops import TORCH
from sglang_smc.options.server import SMCConfig
from sglang_smc.round import parts
from sglang_smc.upstream import IS_NEWER

Midlayer = llama_eagle3.LlamaDecoderLayer
KINDS: dict[str, tuple[type, type, type]] = {
    "llama": (LlamaDecoderLayer, LlamaAttention, LlamaMLP),
    "qwen2": (Qwen2DecoderLayer, Qwen2Attention, Qwen2MLP),
    "qwen3": (Qwen3DecoderLayer, Qwen3Attention, Qwen2MLP),
    "eagle3": (Midlayer, LlamaAttention, LlamaMLP),
}
SIZES: Any = {"hidden": 128, "wide": 128, "heads": (4, 2, 64), "dtype": torch.float32}
BACKEND: Any = object()


def make_layer(name: str = "llama", **sizes: Any) -> Any:
    """A layer with values, attention that mixes its inputs, and a forward that says its name."""
    layer = decoder_layer(*KINDS[name], **(SIZES | sizes))
    for nth, parameter in enumerate(layer.parameters()):
        generator = torch.Generator().manual_seed(nth)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8 + 0.1)
    own = layer.self_attn
    if name == "qwen2":
        own.qkv_proj.bias = torch.nn.Parameter(torch.randn(len(own.qkv_proj.weight)))
    own.q_norm = own.k_norm = norm(64, dtype=torch.float32)
    own.q_norm.forward = lambda x: 3 * x
    own.head_dim = 64
    own.alt_stream = None
    own.rotary_emb.forward = lambda positions, q, k: (q + positions.unsqueeze(1), k)
    own.attn.forward = attend
    layer.forward = lambda *_, **__: "SGLang's"
    return layer


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.tanh(q) + torch.cat([k + v, k - v], dim=1) * batch.scale


def by_hand(layer: Any, name: str, x: torch.Tensor, positions: Any, batch: Any) -> torch.Tensor:
    """What comes of a layer over complete ``x``; a head's reads ``x / 2`` as its embeddings."""

    def normed(rows: torch.Tensor, of: Any) -> torch.Tensor:
        return functional.rms_norm(rows, of.weight.shape, of.weight, of.variance_epsilon)

    own = layer.self_attn
    rows = normed(x, layer.input_layernorm)
    if name == "eagle3":
        embeds = normed(x / 2, layer.input_layernorm)
        rows = torch.cat([embeds, normed(x, layer.hidden_norm)], dim=1)
    qkv = functional.linear(rows, own.qkv_proj.weight, own.qkv_proj.bias)
    q, k, v = qkv.split([own.q_size, own.kv_size, own.kv_size], dim=1)
    q, k = (3 * q, 3 * k) if name == "qwen3" else (q, k)
    x = x + attend(q + positions.unsqueeze(1), k, v, batch) @ own.o_proj.weight.T
    gate, up = (normed(x, layer.post_attention_layernorm) @ layer.mlp.gate_up_proj.weight.T).chunk(
        2, dim=1
    )
    return x + functional.silu(gate) * up @ layer.mlp.down_proj.weight.T


def run(layer: Any, name: str, x: torch.Tensor, positions: Any, batch: Any) -> Any:
    """Call a layer as its model does."""
    if name == "eagle3":
        return layer(positions, x / 2, x, batch, None)
    return layer(positions, x, batch, None)


def complete(output: Any) -> torch.Tensor:
    """What the next layer takes for its input, or the last norm for its own."""
    first, second = output if isinstance(output, tuple) else (output, None)
    return first if second is None else first + second


@pytest.fixture(autouse=True)
def in_own_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Attention is that of the drafts' own passes."""

    def enter(backend: Any) -> None:
        monkeypatch.setattr(draft_layers, "get_attn_backend", lambda: backend)

    enter(BACKEND)
    return enter


@pytest.mark.parametrize("name", KINDS)
def test_layers_compute_what_sglangs_do_and_follow_new_weights(name: str) -> None:
    """Red where a norm, a bias or a residual is lost, or a copy of weights is kept."""
    layers = [make_layer(name) for _ in range(1 if name == "eagle3" else 2)]
    assert fuse_layers(torch.nn.ModuleList(layers), BACKEND, TORCH.skinny) == len(layers)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 128, generator=generator)
    positions = torch.arange(5)
    batch = SimpleNamespace(scale=0.5)
    for _ in range(2):
        expected = x
        found = x
        for layer in layers:
            expected = by_hand(layer, name, expected, positions, batch)
            output = run(layer, name, found, positions, batch)
            found = complete(output)
        torch.testing.assert_close(found, expected)
        ends_in_a_pair = name == "eagle3" or not IS_NEWER
        assert isinstance(output, tuple) == ends_in_a_pair  # which the model's last norm adds
        assert not ends_in_a_pair or output[1] is not None
        for parameter in layers[0].parameters():
            parameter.data.mul_(1.5)


@pytest.mark.parametrize("name", ["llama", "eagle3"])
def test_other_passes_are_sglangs(name: str, in_own_pass: Any) -> None:
    """Those of prompts, and of more rows than the kernel takes."""
    layer = make_layer(name)
    assert fuse_layers(torch.nn.ModuleList([layer]), BACKEND, TORCH.skinny) == 1
    batch = SimpleNamespace(scale=0.5)
    for num_rows, backend, is_sglangs in ((64, BACKEND, False), (65, BACKEND, True), (64, 1, True)):
        in_own_pass(backend)
        x = torch.zeros(num_rows, 128)
        output = run(layer, name, x, torch.arange(num_rows), batch)
        assert (output == "SGLang's") if is_sglangs else (complete(output).shape == x.shape)


class Made(TorchDispatchMode):
    """Notes the types and sizes of tensors that have memory of their own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.found += [(one.dtype, one.numel()) for one in tree_leaves(made)]
        return made

    found: list[tuple[torch.dtype, int]]


@pytest.mark.parametrize("result", [None, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 65, 128, 200, 256, 257, 300])
def test_products_in_8_bits_copy_no_weights(
    num_rows: int, result: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 256 rows are slices that the kernel takes; more are products of parts of the matrix."""
    monkeypatch.setattr(draft_layers, "_ROWS_AT_ONCE", 64)
    generator = torch.Generator().manual_seed(num_rows)
    outputs = 640
    inputs = 512
    weight, x, bias = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((outputs, inputs), (num_rows, inputs), (outputs,))
    )
    own = linear(ReplicatedLinear, inputs, outputs, dtype=torch.bfloat16)
    own.weight.data.copy_(weight)
    method = draft_layers.Int8Rows(own)
    taken: list[int] = []

    def skinny(rows: torch.Tensor, table: torch.Tensor, fused: Any) -> torch.Tensor:
        taken.append(len(rows))
        assert rows.is_contiguous() and table is own.weight
        return torch.full((len(rows), outputs), float(len(taken)), dtype=fused.dtype or rows.dtype)

    method.result, exact = result, own.weight.double() * method.scale.unsqueeze(1)
    for multiply, is_kernel in ((TORCH.skinny, True), (None, False)):
        method.skinny = multiply
        found = method.apply(own, x, bias)
        assert found.dtype == (result or torch.bfloat16)
        expected = x.double() @ exact.T + bias.double()
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=3e-1)
        method.skinny = skinny if is_kernel else None
        with Made() as made:
            made.found = []
            method.apply(own, x, bias)
        most = max(num_rows * outputs, 64 * inputs)  # the products, or a part of the matrix
        assert max(size for _, size in made.found) <= most
        assert all(size < weight.numel() for kind, size in made.found if kind != result)
    whole, rest = divmod(num_rows, 64)
    assert taken == ([] if num_rows > 256 else [64] * whole + [rest] * (rest > 0))


def _without(name: str, part: Any) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        *path, last = name.split(".")
        for one in path:
            layer = getattr(layer, one)
        setattr(layer, last, part)

    return change


OTHERS: dict[str, Callable[[Any], None]] = {
    "attention": _without("self_attn", bare(Qwen2Attention)),
    "MLP": _without("mlp", bare(Qwen2MLP)),
    "projection": _without("self_attn.o_proj", linear(ReplicatedLinear, 256, 128)),
    "quantized": _without("mlp.down_proj.quant_method", object()),
    "bias": _without("self_attn.o_proj.bias", torch.nn.Parameter(torch.zeros(128))),
    "norm": _without("input_layernorm", torch.nn.LayerNorm(128)),
    "part of a norm": _without("input_layernorm.variance_size_override", 64),
    "type": _without("post_attention_layernorm", norm(128, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_layers_with_other_parts_are_left_alone(name: str) -> None:
    """And with them all layers of the model, which hand on what they know."""
    layers = [make_layer(), make_layer()]
    own = layers[0].self_attn
    forward = layers[1].forward
    OTHERS[name](layers[1])
    for part in (
        "qkv_proj",
        "o_proj",
        "attn",
        "gate_up_proj",
        "down_proj",
    ):  # as their classes have
        for holder, source in ((layers[1].self_attn, own), (layers[1].mlp, layers[0].mlp)):
            if hasattr(source, part) and not hasattr(holder, part):
                setattr(holder, part, getattr(source, part))
    assert fuse_layers(torch.nn.ModuleList(layers), BACKEND, TORCH.skinny) == 0
    assert layers[1].forward is forward


def test_layers_of_other_types_and_sizes_are_left_alone() -> None:
    def fused(*layers: Any) -> int:
        return fuse_layers(torch.nn.ModuleList(layers), BACKEND, TORCH.skinny)

    other = make_layer()
    other.__class__ = llama_eagle.LlamaDecoderLayer  # whose first layer has no norm
    assert fused(other) == fused(make_layer(), other) == 0
    assert fused(make_layer(wide=120)) == fused(make_layer("eagle3"), make_layer("eagle3")) == 0
    assert fused(make_layer(), make_layer()) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"device": "cpu"}, "a draft in torch.bfloat16 on cpu"),
        ({"dtype": torch.float16}, "a draft in torch.float16 on cuda"),
        ({"tp_size": 2}, "2 ranks"),
        ({"kind": "torch"}, "torch operations"),
    ],
)
def test_layers_are_fused_for_drafts_in_bfloat16_on_one_gpu_if_asked(
    change: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"device": "cuda", "dtype": torch.bfloat16, "tp_size": 1, "kind": "triton", **change}
    monkeypatch.setattr(parts, "get_parallel", lambda: SimpleNamespace(tp_size=given["tp_size"]))
    runner = SimpleNamespace(device=given["device"], dtype=given["dtype"])
    worker: Any = SimpleNamespace(model_runner=runner)
    kernel: Any = lambda *_: None  # noqa: E731
    ops = TORCH._replace(kind=given["kind"], skinny=kernel)
    fused = SMCConfig(draft_layers="fused")
    assert parts.skinny_for(SMCConfig(), ops, worker) is None
    if said is None:
        assert parts.skinny_for(fused, ops, worker) is kernel
        replaced = ops._replace(skinny=TORCH.skinny)  # the kernel has failed its check
        assert parts.skinny_for(fused, replaced, worker) is None
        said = "no draft"
        worker = None
    with pytest.raises(ValueError, match=said):
        parts.skinny_for(fused, ops, worker)
    assert parts.skinny_for(SMCConfig(draft_layers="auto"), ops, worker) is None


# --- Norms that SGLang's class of EAGLE-3 heads has not


def complete_head(**told: Any) -> Any:
    """A head of one layer, completed by what its configuration says."""
    layer = make_layer("eagle3")
    head = torch.nn.Module()
    del layer.forward
    head.model = torch.nn.Module()
    head.model.layers = torch.nn.ModuleList([layer])
    head_parts.complete_eagle3(head, SimpleNamespace(to_dict=lambda: told, rms_norm_eps=1e-5))
    return head


def test_a_residual_is_what_is_normalized() -> None:
    """Red where the state itself is added, as in SGLang's class."""
    (layer,) = complete_head(norm_before_residual=True).model.layers
    assert fuse_layers(torch.nn.ModuleList([layer]), BACKEND, TORCH.skinny) == 0
    layer.hidden_norm.forward = lambda x: 10 * x
    layer.input_layernorm.forward = lambda x: x + 1
    layer.self_attn.forward = lambda positions, hidden_states, forward_batch: hidden_states[:, ::2]
    layer.post_attention_layernorm.forward = lambda x, residual: (x, x + residual)
    layer.mlp.forward = lambda x: 0 * x
    embeds = torch.randn(3, 128)
    states = torch.randn(3, 128)
    output, residual = layer(None, embeds, states, None, None)
    attended = torch.cat([embeds + 1, 10 * states], dim=1)[:, ::2]
    assert torch.equal(output + residual, attended + 10 * states)


def test_queries_and_keys_are_normalized_by_head() -> None:
    """Before they are rotated."""
    (layer,) = complete_head(use_qk_norm=True).model.layers
    assert fuse_layers(torch.nn.ModuleList([layer]), BACKEND, TORCH.skinny) == 0
    own = layer.self_attn
    own.q_norm.forward = lambda x: 3 * x
    own.k_norm.forward = lambda x: 5 * x
    rows = torch.randn(4, 256)
    positions = torch.arange(4)
    found = own.forward_prepare_native(positions, rows)
    q, k, v = own.qkv_proj(rows)[0].split([own.q_size, own.kv_size, own.kv_size], dim=-1)
    expected = 3 * q + positions.unsqueeze(1), 5 * k, v
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
