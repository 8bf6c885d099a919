"""Compiles kernels for GPUs that need not be there: ``compile_kernels.py [--all] 80 90 -100 -120``.

With a minus for a GPU, those of models alone, which are most of what differs between GPUs.

A script of its own: in a process that interprets Triton, nothing compiles. It prints one line of
JSON for each compiled kernel, with what it takes of a multiprocessor by the word of NVIDIA's own
tools, which Triton brings; and it fails like the first kernel that does not compile.

Rounds, played on tensors without values (`fake_cuda.py`), launch all kernels but those of models,
which are launched here.
"""

import json
import math
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import fake_cuda
import pytest
import torch
from compile_sizes import CHIPS, LLAMA, OTHERS, Layer, Sizes
from machine_code import DEAREST, instructions_of_unit, resources
from torch.utils._pytree import tree_map_only
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.gated_delta import gated_delta
from sglang_smc.kernels.attention.latent import latent_attention
from sglang_smc.kernels.attention.particle_attention import New, new_arrivals, particle_attention
from sglang_smc.kernels.skinny import skinny
from sglang_smc.models.gated_delta import RecurrenceInputs
from sglang_smc.ops.compiling import Address, set_target
from sglang_smc.ops.triton_ops import TRITON
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import shape_of_any, shape_of_server
from sglang_smc.smc.ledger import AttentionContext, KVLocations
from sglang_smc.smc.ops import MOST_SKINNY_ROWS, Fused
from sglang_smc.smc.settings import Need
from sglang_smc.state.logprobs import recorded_logprobs


def _rounds(sizes: Sizes, run: Callable[..., Any], *, is_all: bool) -> None:
    """Play what a server captures for plain requests and for any, which run every line of kernels.

    Of all sizes also what is between: requests with fewer kinds of filters.
    """
    n_and_k = {"num_particles": sizes.particles, "num_steps": sizes.steps}
    config = SMCConfig(**n_and_k, max_lag=sizes.max_lag)
    logprobs = recorded_logprobs(sizes.vocab)
    plain = shape_of_server(config)
    every = shape_of_any(config, None, logprobs)
    beside = every.needs - {Need.FILTERS, Need.GREEDY}
    between = (set(), {Need.FILTERS}) if is_all else ()
    kinds = (*between, {Need.FILTERS, Need.GREEDY})
    of_kinds = (every.needing(beside | needs) for needs in kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_cuda, "VOCAB_SIZE", sizes.vocab)
        for shape in (plain, *of_kinds):
            fake_cuda.trace_round(patch, config, shape, sizes.groups, TRITON, run)


def _long_round(run: Callable[..., Any]) -> None:
    """Play a round of `exact` with more columns than the others have."""
    config = SMCConfig(mode="exact", num_particles=4, num_steps=17)
    with pytest.MonkeyPatch.context() as patch:
        fake_cuda.trace_round(patch, config, shape_of_server(config), 1, TRITON, run)


def _texts(sizes: Sizes, **layer: Any) -> dict[str, Any]:
    """What every attention reads beside keys."""
    cells = torch.zeros(sizes.groups, sizes.particles, dtype=torch.int64)
    longest = sizes.max_lag + sizes.steps + 1
    context = AttentionContext(
        req_to_token=torch.zeros(100, 4096, dtype=torch.int32),
        tails=torch.zeros(100, 512, dtype=torch.int32),
        locations=KVLocations(cells[:, 0], cells[:, 0], cells, longest),
        starts=cells,
        **layer,
    )
    return {"context": context, "max_prefix": sizes.context, "scaling": 0.1}


def _attention(sizes: Sizes, *, is_all: bool) -> None:
    """As drafts of one and two tokens ask for it, and verification, which has most registers.

    Of all sizes also drafts of what is rare.
    """
    layers = [(Layer(sizes.draft), 1), (Layer(sizes.draft), 2)]
    layers += [(Layer(sizes.target), sizes.steps + 1)]
    of_rare = [1, sizes.steps + 1] if is_all else [sizes.steps + 1]
    for layer, num_columns in (*layers, *product(sizes.layers, of_rare)):
        if driver.active.get_current_target().arch >= layer.least_capability:
            attend(sizes, layer, num_columns)
    many = sizes._replace(groups=8)  # whose programs walk tails, too
    attend(many, Layer(sizes.target), sizes.steps + 1)
    if sizes.dtype.itemsize == 2:
        for num_columns in (1, 2):
            attend(sizes, Layer(sizes.draft), num_columns, is_late=True)
        for of in (sizes, many):
            attend(of, Layer(sizes.target), sizes.steps + 1, is_late=True)
    draft = sizes.latent_draft
    target = sizes.latent_target
    if sizes.dtype != torch.float32:  # which is refused
        of_draft = [(draft, 1), (draft, 2)] if is_all else [(draft, 2)]
        for latents, num_columns in (*of_draft, (target, sizes.steps + 1)):
            shape = sizes.groups, sizes.particles, num_columns, latents.q
            width = latents.rank + latents.rope
            query, cache = (torch.zeros(*s, width, dtype=sizes.dtype) for s in (shape, (64, 1)))
            latent_attention(query, cache, rank=latents.rank, **_texts(sizes))


def attend(sizes: Sizes, layer: Layer, num_columns: int, is_late: bool = False) -> None:
    """With queries as a GPU has them: a slice of what one projection made; and late: new keys."""
    heads = layer.heads
    cache = torch.zeros(64, heads.kv, heads.dim, dtype=layer.cache or sizes.dtype)
    shape = sizes.groups, sizes.particles, num_columns, heads.q, heads.dim
    width = heads.q * heads.dim
    rows = torch.zeros(math.prod(shape[:3]), width + 2 * heads.kv * heads.dim, dtype=sizes.dtype)
    late: dict[str, Any] = {"arrivals": new_arrivals(sizes.groups, heads.kv, cache.device)}
    if is_late:
        new = rows[:, width:].view(len(rows), 2 * heads.kv, heads.dim).chunk(2, dim=1)
        index = torch.zeros(len(rows), dtype=torch.int64)
        late["new"] = New.of(*new, index, index, torch.zeros(64, heads.dim))
    particle_attention(
        rows[:, :width].view(shape),
        cache,
        cache,
        **_texts(sizes, window=layer.window, sees_block=layer.sees_block),
        cap=layer.cap,
        sinks=torch.zeros(heads.q) if layer.sinks else None,
        **late,
    )


def _products(sizes: Sizes) -> None:
    """Of a layer of the draft, and of an EAGLE-3 head's."""
    rows = sizes.groups * sizes.particles
    q, kv, dim = sizes.draft
    if rows > MOST_SKINNY_ROWS or sizes.dtype.itemsize > 2:
        return
    hidden = q * dim
    wide = 4 * q * dim

    def product(
        outputs: int,
        inputs: int,
        columns: int | None = None,
        kind: torch.dtype = sizes.dtype,
        **around: Any,
    ) -> None:
        x = torch.empty(rows, inputs, dtype=sizes.dtype)
        weight = torch.empty(outputs, columns or inputs, dtype=kind)
        skinny(x, weight, Fused(eps=1e-5, **around))

    x, norm = (torch.empty(*shape, dtype=sizes.dtype) for shape in ((rows, hidden), (hidden,)))
    qkv = (q + 2 * kv) * dim
    product(qkv, hidden, norm=norm)
    product(qkv, hidden, norm=norm, bias=torch.empty(qkv, dtype=sizes.dtype))
    product(qkv, hidden, 2 * hidden, norm=norm, beside=x, beside_norm=norm)
    product(hidden, hidden, residual=x, fetches_more=True)
    product(2 * wide, hidden, norm=norm, gated=True)
    product(hidden, wide, residual=x)
    small = {"scale": torch.empty(4 * wide), "kind": torch.int8}
    product(qkv, hidden, norm=norm, **small)
    product(hidden, hidden, residual=x, fetches_more=True, **small)
    product(2 * wide, hidden, norm=norm, gated=True, **small)
    product(hidden, wide, residual=x, **small)
    product(128_256, hidden, dtype=torch.float32, **small)


def _linear_attention(sizes: Sizes) -> None:
    """Of Qwen3.5-27B, with its states as SGLang has them."""
    size = sizes.groups * sizes.particles
    k_heads = 16
    v_heads = 48
    dim = 128
    gates = torch.zeros(size, sizes.steps + 1, v_heads)
    wide = torch.zeros(*gates.shape[:2], (2 * k_heads + v_heads) * dim, dtype=sizes.dtype)
    states = torch.zeros(1, v_heads, dim, dim)
    rows = gates[:, 0, 0].long()
    columns = RecurrenceInputs(wide, gates, gates)
    for dtype in (torch.float32, torch.bfloat16):
        gated_delta(states.to(dtype), rows, columns, rows, columns)


class Compiler:
    """Takes the place of `JITFunction.run`: compiles, launches nothing, tells what came out."""

    def __init__(self) -> None:
        self._run = JITFunction.run
        self.seen: set[str] = set()
        self.sizes = LLAMA

    def compile_for(self, capability: int) -> None:
        """From now on compile for CUDA devices of some capability."""
        set_target(capability)
        work.chip_of = lambda _: CHIPS[capability]  # type: ignore[assignment]

    def run(
        self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> Any:
        args = tree_map_only(torch.Tensor, Address, args)
        kernel: Any = self._run(function, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in self.seen:
            self.seen.add(kernel.hash)
            self.tell(function, kernel)
        return kernel

    def name_of(self, function: JITFunction) -> str:
        return f"{function.module.rpartition('.')[2]}.{function.__name__}"

    def tell(self, function: JITFunction, kernel: Any) -> None:
        """Print what one kernel takes."""
        print(json.dumps(self._facts(function, kernel)), flush=True)

    def _facts(self, function: JITFunction, kernel: Any) -> dict[str, Any]:
        name = self.name_of(function)
        cubin = kernel.asm["cubin"]
        is_counted = name in DEAREST and self.sizes == LLAMA
        warps = kernel.metadata.num_warps
        return {
            "kernel": name,
            "sizes": f"{self.sizes.models}, G = {self.sizes.groups}, N = {self.sizes.particles}",
            "dtype": str(self.sizes.dtype).removeprefix("torch."),
            "capability": kernel.metadata.target.arch,
            "warps": warps,
            "shared": kernel.metadata.shared,
            "bytes": len(cubin),
            "instructions": instructions_of_unit(name, cubin, warps) if is_counted else None,
            "tensor_columns": kernel.metadata.tmem_size,
            # What begins before the launch ahead of it ends has to wait for that.
            "waits": kernel.metadata.launch_pdl == ("griddepcontrol.wait" in kernel.asm["ptx"]),
            **resources(cubin),
        }


def main(arguments: list[str]) -> None:
    capabilities = [int(word) for word in arguments if word != "--all"]
    is_all = "--all" in arguments
    compiler = Compiler()
    JITFunction.run = lambda *args, **options: compiler.run(*args, **options)
    for capability in capabilities:
        compiler.compile_for(abs(capability))
        for compiler.sizes in [LLAMA, *OTHERS] if is_all else [LLAMA]:
            _attention(compiler.sizes, is_all=is_all)
            _products(compiler.sizes)
            _linear_attention(compiler.sizes)
            if capability > 0:
                _rounds(compiler.sizes, compiler.run, is_all=is_all)
        if capability > 0:
            _long_round(compiler.run)


if __name__ == "__main__":
    main(sys.argv[1:])
