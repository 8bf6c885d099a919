"""Time a draft's 16 layers of Llama 3.2 1B as one CUDA graph: as SGLang runs them, and fused.

    python bench/gpu/layers.py 8        # rows; one line of JSON
    python bench/gpu/layers.py lm-head  # its product, two ways

``stock`` are torch's products between SGLang's own kernels, ``fused`` is `kernels/skinny.py`,
``overlapped`` with launches that begin while the one before ends, ``int8`` with weights in 8 bits.
All attend over 256 tokens of a prompt. Overlapped results must be the fused ones bit for bit;
others are compared with stock layers, int8's with those of the weights that its 8 bits stand for.

The product of an LM head is timed as SGLang has it by default, in bfloat16 before a cast, and as
SMC asks for it, with results in float32. Without a GPU torch's references run, at a small size.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from sglang_smc.ops import TORCH
from sglang_smc.smc.ledger import AttentionContext, KVLocations
from sglang_smc.smc.ops import Fused

EPS = 1e-5
ROPE_BASE = 500_000.0
PROMPT = 256
REPLAYS = 20
TURNS = 5
TOLERANCE = 0.1  # of bfloat16, over layers: relative to the largest output
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
Attend = Callable[[torch.Tensor], torch.Tensor]
Kinds = dict[str, "CapturedPass"]
LAYERS = 16
HIDDEN = 2048
MLP = 8192
Q_HEADS = 32
KV_HEADS = 8
DIM = 64
#: Rows and width before an LM head: the draft's of one request with 8 particles, of 8 requests, and
#: the target's of one request.
LM_HEAD = "lm-head"
TOKENS = 128_256
LM_HEADS = ((8, 2048), (64, 2048), (72, 4096))
if DEVICE == "cpu":
    LAYERS = 2
    HIDDEN = 256
    MLP = 512
    Q_HEADS = 4
    KV_HEADS = 1
    TOKENS = 1024
    LM_HEADS = ((8, 256),)


class LayerWeights(NamedTuple):
    """Weights: matrices ``[outputs, inputs]``, of factors by output where they are in 8 bits."""

    norms: tuple[torch.Tensor, torch.Tensor]
    matrices: tuple[torch.Tensor, ...]  # qkv, o, gate and up, down
    scales: tuple[torch.Tensor | None, ...] = (None,) * 4


def make_layer() -> LayerWeights:
    """Make a layer of random weights, under which rows keep their size."""
    shapes = [((Q_HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, Q_HEADS * DIM)]
    shapes += [(2 * MLP, HIDDEN), (HIDDEN, MLP)]
    matrices = [torch.randn(s, device=DEVICE, dtype=DTYPE) / s[1] ** 0.5 for s in shapes]
    one, other = (torch.ones(HIDDEN, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return LayerWeights((one, other), tuple(matrices))


def in_8_bits(layer: LayerWeights) -> LayerWeights:
    scales = [one.abs().amax(1).float() / 127 for one in layer.matrices]
    pairs = zip(layer.matrices, scales, strict=True)
    whole = [(one / scale.unsqueeze(1)).round().to(torch.int8) for one, scale in pairs]
    return layer._replace(matrices=tuple(whole), scales=tuple(scales))


def dequantized(layer: LayerWeights) -> LayerWeights:
    """Return a layer with the 16-bit weights that 8 bits stand for."""
    pairs = zip(layer.matrices, layer.scales, strict=True)
    whole = [one if by is None else (one * by.unsqueeze(1)).to(DTYPE) for one, by in pairs]
    return LayerWeights(layer.norms, tuple(whole))


class Cache(NamedTuple):
    """The keys and values of a layer: prompts of `PROMPT` tokens, and a slot for each new token.

    The R rows of a pass are the particles of G requests, in order.
    """

    keys: torch.Tensor  # [slots, kv_heads, dim]
    values: torch.Tensor  # [slots, kv_heads, dim]
    prompts: torch.Tensor  # [G, PROMPT] int32 slots
    new: torch.Tensor  # [R] int32 slots
    cos_sin: torch.Tensor  # [PROMPT + 1, dim] cosines, then sines, of RoPE


def make_cache(num_rows: int) -> Cache:
    """Make a cache of random prompts for ``num_rows`` particles, eight of a request."""
    size = max(1, num_rows // 8)
    slots = torch.arange(1 + size * PROMPT + num_rows, device=DEVICE, dtype=torch.int32)
    prompts, new = slots[1:].tensor_split([size * PROMPT])
    keys, values = torch.randn(2, len(slots), KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)
    powers = torch.arange(0, DIM, 2, device=DEVICE, dtype=torch.float32) / DIM
    positions = torch.arange(PROMPT + 1, device=DEVICE, dtype=torch.float32)
    angles = torch.outer(positions, ROPE_BASE**-powers)  # [PROMPT + 1, dim / 2]
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    return Cache(keys, values, prompts.view(size, PROMPT), new, cos_sin)


def attend_by_torch(cache: Cache, qkv: torch.Tensor) -> torch.Tensor:
    """Attend to the prompts and to each row's own token, without writing it; ``[R, q_heads dim]``.

    The reference of `attend_by_kernel`.
    """
    heads = qkv.view(len(qkv), -1, DIM).float()
    first, second = heads[:, :-KV_HEADS].chunk(2, dim=2)
    cos, sin = cache.cos_sin[PROMPT].chunk(2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
    query, key = turned.to(qkv.dtype).float().tensor_split([Q_HEADS], dim=1)
    own = cache.prompts.repeat_interleave(len(qkv) // len(cache.prompts), dim=0)  # [R, PROMPT]
    keys = torch.cat([cache.keys[own].float(), key.unsqueeze(1)], dim=1)
    values = torch.cat([cache.values[own].float(), heads[:, -KV_HEADS:].unsqueeze(1)], dim=1)
    wide = (one.transpose(1, 2) for one in (query.unsqueeze(1), keys, values))
    attended = functional.scaled_dot_product_attention(*wide, enable_gqa=True)  # [R, heads, 1, dim]
    return attended.flatten(1).to(qkv.dtype)


def attend_by_kernel(cache: Cache) -> Attend:
    """Return attention of particles to a prompt and to their own token, as drafts have it."""
    from sglang_smc.kernels.attention.particle_attention import (
        New,
        new_arrivals,
        particle_attention,
    )

    size = len(cache.prompts)
    num_rows = len(cache.new)
    groups, rows = (torch.arange(count, device=DEVICE) for count in (size, num_rows))
    ends = torch.full_like(groups, PROMPT)
    place = KVLocations(groups, ends, rows.view(size, -1), max_tail=2)
    starts = ends.unsqueeze(1).expand(-1, num_rows // size).contiguous()
    context = AttentionContext(cache.prompts, cache.new.unsqueeze(1).repeat(1, 2), place, starts)
    arrivals = new_arrivals(size, KV_HEADS, DEVICE)
    places = cache.new.long(), starts.flatten(), cache.cos_sin
    fixed: dict[str, Any] = {"max_prefix": PROMPT, "scaling": DIM**-0.5, "arrivals": arrivals}

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv.view(num_rows, -1, DIM)
        query = heads[:, :Q_HEADS].unflatten(0, (size, -1, 1))
        new = New.of(*heads[:, Q_HEADS:].chunk(2, dim=1), *places)
        found = particle_attention(query, cache.keys, cache.values, context, new=new, **fixed)
        return found.view(num_rows, -1)

    return attend


def attention_over(num_rows: int) -> Attend:
    cache = make_cache(num_rows)
    return partial(attend_by_torch, cache) if DEVICE == "cpu" else attend_by_kernel(cache)


def stock(layers: list[LayerWeights], attend: Attend, x: torch.Tensor) -> torch.Tensor:
    """Run layers as SGLang does."""
    hidden = x
    residual = torch.zeros_like(x)
    for (first, second), (qkv, o, gate_up, down), _ in layers:
        hidden, residual = add_and_norm(hidden, residual, first)
        hidden = functional.linear(attend(functional.linear(hidden, qkv)), o)
        hidden, residual = add_and_norm(hidden, residual, second)
        hidden = functional.linear(silu_and_mul(functional.linear(hidden, gate_up)), down)
    return hidden + residual


def add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if DEVICE == "cpu":
        total = x + residual
        return functional.rms_norm(total, weight.shape, weight, EPS), total
    import sgl_kernel

    sgl_kernel.fused_add_rmsnorm(x, residual, weight, EPS)  # both in place
    return x, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if DEVICE == "cpu":
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate) * up
    import sgl_kernel

    return sgl_kernel.silu_and_mul(gate_up)


def fused(
    skinny: Callable[..., torch.Tensor], layers: list[LayerWeights], attend: Attend, x: torch.Tensor
) -> torch.Tensor:
    """Run layers in four products each, and attention."""
    for (first, second), (qkv, o, gate_up, down), scales in layers:
        rows = attend(skinny(x, qkv, Fused(norm=first, eps=EPS, scale=scales[0])))
        x = skinny(rows, o, Fused(residual=x, scale=scales[1], fetches_more=True))
        rows = skinny(x, gate_up, Fused(norm=second, eps=EPS, gated=True, scale=scales[2]))
        x = skinny(rows, down, Fused(residual=x, scale=scales[3]))
    return x


class CapturedPass(NamedTuple):
    """A pass over rows in place, and its result in place."""

    x: torch.Tensor  # [R, hidden]
    replay: Callable[[], Any]
    result: torch.Tensor  # [R, hidden]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return a pass's result over other rows."""
        self.x.copy_(x)
        self.replay()
        return self.result.clone()


def captured(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> CapturedPass:
    """Capture a pass over rows like ``x``; on a CPU, replaying runs it."""
    x = x.clone()
    result = run(x.clone())  # compiles
    if DEVICE == "cpu":
        return CapturedPass(x, lambda: result.copy_(run(x.clone())), result)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x.clone())
    return CapturedPass(x, graph.replay, result)


def milliseconds(replay: Callable[[], Any]) -> float:
    """Return the time of a replay, the mean of `REPLAYS`."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPLAYS if DEVICE == "cuda" else 1):
        replay()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / (REPLAYS if DEVICE == "cuda" else 1)


def capture_kinds(layers: list[LayerWeights], attend: Attend, x: torch.Tensor) -> Kinds:
    """Capture a pass of each kind."""
    small = list(map(in_8_bits, layers))
    kinds = {
        "stock": captured(partial(stock, layers, attend), x),
        "dequantized": captured(partial(stock, list(map(dequantized, small)), attend), x),
    }
    skinny = TORCH.skinny
    waiting = contextlib.nullcontext()
    if DEVICE == "cuda":
        from sglang_smc.ops import triton_ops

        skinny = triton_ops.TRITON.skinny
        waiting = triton_ops.in_order()
    with waiting:
        kinds["fused"] = captured(partial(fused, skinny, layers, attend), x)
    kinds["overlapped"] = captured(partial(fused, skinny, layers, attend), x)
    kinds["int8"] = captured(partial(fused, skinny, small, attend), x)
    return kinds


#: What a kind's results are compared with, and how far they may be apart.
COMPARED = {
    "fused": ("stock", TOLERANCE),
    "overlapped": ("fused", 0.0),
    "int8": ("dequantized", TOLERANCE),
}


def gaps(kinds: Kinds, like: torch.Tensor) -> dict[str, float]:
    """Return how far each of `COMPARED` is apart at most, in `REPLAYS` over changing rows.

    Relative to the largest output. What races is not found by one.
    """
    apart = dict.fromkeys(COMPARED, 0.0)
    for _ in range(REPLAYS):
        x = torch.randn_like(like)
        found = {name: one.of(x).float() for name, one in kinds.items()}
        for name, (other, _) in COMPARED.items():
            gap = (found[name] - found[other]).abs().max() / found[other].abs().max()
            apart[name] = max(apart[name], float(gap.nan_to_num(nan=math.inf)))
    return apart


def measure(num_rows: int) -> dict[str, Any]:
    """Return the milliseconds of each kind, its medians of `TURNS` in turns, and what is wrong."""
    torch.manual_seed(0)
    layers = [make_layer() for _ in range(LAYERS)]
    x = torch.randn(num_rows, HIDDEN, device=DEVICE, dtype=DTYPE)
    began = time.perf_counter()
    kinds = capture_kinds(layers, attention_over(num_rows), x)
    seconds = time.perf_counter() - began
    apart = gaps(kinds, x)
    turns = [{name: milliseconds(one.replay) for name, one in kinds.items()} for _ in range(TURNS)]
    found = {f"{name}_ms": statistics.median(turn[name] for turn in turns) for name in kinds}
    wrong = [
        f"{name} differs from {other} by {apart[name]:.2g}, more than {most:g}"
        for name, (other, most) in COMPARED.items()
        if apart[name] > most
    ]
    told = {"rows": num_rows, "layers": LAYERS, "capture_seconds": seconds}
    return {**told, **found, "apart": apart, "wrong": wrong}


# --- The LM head


def cast(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return logits in float32 of a product in bfloat16."""
    return functional.linear(x, weight).float()


def in_float32(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return logits in float32 as SGLang's `--enable-fp32-lm-head` computes them."""
    if DEVICE == "cpu":  # where torch has no `out_dtype`
        return functional.linear(x.float(), weight.float())
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def measure_lm_heads() -> dict[str, Any]:
    """Return rows, width and ms of each way to compute logits, and what is wrong."""
    torch.manual_seed(0)
    found = []
    wrong = []
    for rows, width in LM_HEADS:
        weight = torch.randn(TOKENS, width, device=DEVICE, dtype=DTYPE) / width**0.5
        x = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
        kinds = [captured(partial(way, weight), x) for way in (cast, in_float32)]
        one, other = (kind.of(x) for kind in kinds)
        gap = float((one - other).abs().max() / other.abs().max())
        if not gap <= TOLERANCE:
            wrong.append(f"logits of {rows} rows differ by {gap:.2g}, more than {TOLERANCE:g}")
        turns = [[milliseconds(kind.replay) for kind in kinds] for _ in range(TURNS)]
        found.append((rows, width, *map(statistics.median, zip(*turns, strict=True))))
    *_, cast_ms, float32_ms = found[0]
    return {"cast_ms": cast_ms, "float32_ms": float32_ms, "lm_heads": found, "wrong": wrong}


if __name__ == "__main__":
    (what,) = sys.argv[1:]
    print(json.dumps(measure_lm_heads() if what == LM_HEAD else measure(int(what))))
