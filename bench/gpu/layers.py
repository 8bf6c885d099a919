"""Time a draft's 16 layers of Llama 3.2 1B as one CUDA graph: as SGLang runs them, and fused.

    python bench/gpu/layers.py 8        # rows; one line of JSON

``stock`` are torch's products between SGLang's own kernels, ``fused`` is `kernels/skinny.py`,
``overlapped`` with launches that begin while the one before ends, ``int8`` with weights in 8 bits.
All attend over 256 tokens of a prompt. Without a GPU torch's reference runs, at a small size.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn import functional

from sglang_smc.ops import TORCH
from sglang_smc.smc.ledger import AttentionContext, KVLocations
from sglang_smc.smc.ops import Fused

EPS, PROMPT, REPLAYS, TURNS = 1e-5, 256, 20, 5
TOLERANCE = 0.1  # of bfloat16, over layers: relative to the largest output
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
Attend = Callable[[torch.Tensor], torch.Tensor]
LAYERS, HIDDEN, MLP, Q_HEADS, KV_HEADS, DIM = 16, 2048, 8192, 32, 8, 64
if DEVICE == "cpu":
    LAYERS, HIDDEN, MLP, Q_HEADS, KV_HEADS = 2, 256, 512, 4, 1


class Layer(NamedTuple):
    """Weights: matrices ``[outputs, inputs]``, of factors by output where they are in 8 bits."""

    norms: tuple[torch.Tensor, torch.Tensor]
    matrices: tuple[torch.Tensor, ...]  # qkv, o, gate and up, down
    scales: tuple[torch.Tensor | None, ...] = (None,) * 4


def make_layer() -> Layer:
    """Make a layer of random weights, under which rows keep their size."""
    shapes = [((Q_HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, Q_HEADS * DIM)]
    shapes += [(2 * MLP, HIDDEN), (HIDDEN, MLP)]
    matrices = [torch.randn(s, device=DEVICE, dtype=DTYPE) / s[1] ** 0.5 for s in shapes]
    one, other = (torch.ones(HIDDEN, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return Layer((one, other), tuple(matrices))


def in_8_bits(layer: Layer) -> Layer:
    scales = [one.abs().amax(1).float() / 127 for one in layer.matrices]
    pairs = zip(layer.matrices, scales, strict=True)
    whole = [(one / scale.unsqueeze(1)).round().to(torch.int8) for one, scale in pairs]
    return layer._replace(matrices=tuple(whole), scales=tuple(scales))


def attention_over(num_rows: int) -> Attend:
    """Return attention of particles to a prompt and to their own token, as drafts have it."""
    if DEVICE == "cpu":
        return lambda qkv: qkv[:, : Q_HEADS * DIM].contiguous()
    from sglang_smc.kernels.attention.particle_attention import New, particle_attention

    size, rows = max(1, num_rows // 8), torch.arange(num_rows, device=DEVICE)
    groups = torch.arange(size, device=DEVICE)
    slots = 1 + torch.arange(size * PROMPT, device=DEVICE).int().view(size, PROMPT)
    own = (size * PROMPT + 1 + rows).int()
    cache = [torch.zeros(len(own) + slots.numel() + 1, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)]
    cache.append(torch.zeros_like(cache[0]))
    ends = torch.full_like(groups, PROMPT)
    place = KVLocations(groups, ends, rows.view(size, -1), max_tail=2)
    starts = ends.unsqueeze(1).expand(-1, num_rows // size).contiguous()
    context = AttentionContext(slots, own.unsqueeze(1).repeat(1, 2), place, starts)
    arrivals = torch.zeros(size * KV_HEADS, device=DEVICE, dtype=torch.int32)
    angles, written = torch.zeros(PROMPT + 1, DIM, device=DEVICE), own.long()

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv.view(num_rows, -1, DIM)
        query = heads[:, :Q_HEADS].unflatten(0, (size, -1, 1))
        key, value = heads[:, Q_HEADS:].chunk(2, dim=1)
        new = New.of(key, value, written, starts.flatten(), angles, arrivals)
        sizes: dict[str, Any] = {"max_prefix": PROMPT, "scaling": DIM**-0.5, "new": new}
        return particle_attention(query, *cache, context, **sizes).view(num_rows, -1)

    return attend


def stock(layers: list[Layer], attend: Attend, x: torch.Tensor) -> torch.Tensor:
    """Run layers as SGLang does."""
    hidden, residual = x, torch.zeros_like(x)
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
    skinny: Callable[..., torch.Tensor], layers: list[Layer], attend: Attend, x: torch.Tensor
) -> torch.Tensor:
    """Run layers in four products each, and attention."""
    for (first, second), (qkv, o, gate_up, down), scales in layers:
        rows = attend(skinny(x, qkv, Fused(norm=first, eps=EPS, scale=scales[0])))
        x = skinny(rows, o, Fused(residual=x, scale=scales[1]))
        rows = skinny(x, gate_up, Fused(norm=second, eps=EPS, gated=True, scale=scales[2]))
        x = skinny(rows, down, Fused(residual=x, scale=scales[3]))
    return x


def captured(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[Any, Any]:
    """Return what replays a pass over ``x``, and its result; on a CPU what runs it."""
    result = run(x.clone())  # compiles
    if DEVICE == "cpu":
        return lambda: run(x.clone()), result
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x.clone())
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, result


def milliseconds(replay: Callable[[], Any]) -> float:
    """Return the time of a replay, the mean of `REPLAYS`."""
    began = time.perf_counter()
    for _ in range(REPLAYS if DEVICE == "cuda" else 1):
        replay()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / (REPLAYS if DEVICE == "cuda" else 1)


def measure(num_rows: int) -> dict[str, Any]:
    """Return the milliseconds of each kind, its medians of `TURNS` in turns, and what is wrong."""
    torch.manual_seed(0)
    layers = [make_layer() for _ in range(LAYERS)]
    small, attend = list(map(in_8_bits, layers)), attention_over(num_rows)
    x = torch.randn(num_rows, HIDDEN, device=DEVICE, dtype=DTYPE)
    skinny, kinds = TORCH.skinny, {"stock": captured(partial(stock, layers, attend), x)}
    if DEVICE == "cuda":
        from sglang_smc.kernels.attention import work
        from sglang_smc.ops.triton_ops import TRITON

        skinny = TRITON.skinny
        in_order = work.chip_of(x.device)._replace(overlaps=False)
        with mock.patch.object(work, "chip_of", lambda _: in_order):
            kinds["fused"] = captured(partial(fused, skinny, layers, attend), x)
    kinds["overlapped"] = captured(partial(fused, skinny, layers, attend), x)
    kinds["int8"] = captured(partial(fused, skinny, small, attend), x)
    turns = [
        {name: milliseconds(replay) for name, (replay, _) in kinds.items()} for _ in range(TURNS)
    ]
    found = {f"{name}_ms": statistics.median(turn[name] for turn in turns) for name in kinds}
    expected = kinds["stock"][1].float()
    apart = {
        name: float((result.float() - expected).abs().max() / expected.abs().max())
        for name, (_, result) in kinds.items()
    }
    wrong = [f"{name} differs by {gap:.2g}" for name, gap in apart.items() if gap > TOLERANCE]
    return {"rows": num_rows, "layers": LAYERS, **found, "apart": apart, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
