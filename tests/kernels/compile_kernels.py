"""Compiles kernels for GPUs that need not be there: ``compile_kernels.py [--all] 80 90 -100 -120``.

With a minus for a GPU, those of attention alone, which are most of what differs between GPUs.

A script of its own: in a process that interprets Triton, nothing compiles. It prints one line of
JSON for each compiled kernel, with what it takes of a multiprocessor by the word of NVIDIA's own
tools, which Triton brings; and it fails like the first kernel that does not compile.

To add kernels, write a function that launches them for some `Sizes`, and mark it `@launches`.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compile_sizes import CHIPS, LLAMA, OTHERS, Latents, Layer, Sizes
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.gated_delta import gated_delta
from sglang_smc.kernels.attention.latent import latent_attention
from sglang_smc.kernels.attention.particle_attention import particle_attention
from sglang_smc.models.gated_delta import Columns
from sglang_smc.ops.triton_ops import TRITON
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.edits import EditColumns, Edits
from sglang_smc.smc.fidelity import Path as Paths
from sglang_smc.smc.fidelity import Watchable
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.verification import Chains
from sglang_smc.smc.weighing import SCHEMES, WeightRules

LAUNCHES: list[Callable[[Sizes], None]] = []
OF_ATTENTION = ("_particle_attention", "_latent_attention", "_linear_attention")


def launches(launch: Callable[[Sizes], None]) -> Callable[[Sizes], None]:
    LAUNCHES.append(launch)
    return launch


@launches
def _sample(sizes: Sizes) -> None:
    of_draft = sizes.groups * sizes.particles
    of_target = of_draft * (sizes.steps + 1)
    ones = torch.ones(sizes.groups)
    noise = torch.zeros(of_draft, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.empty(of_target, sizes.vocab, dtype=dtype)
        scored, own = torch.arange(of_target), torch.arange(of_draft)
        TRITON.sample_and_score(logits[:of_draft], ones, noise)
        TRITON.sample_and_score(logits, ones, noise, own)
        TRITON.score_tokens(logits, ones, scored)
        kept = TRITON.keep_tokens(logits, ones, ones.long(), ones, ones)
        for greedy, left in ((ones.bool(), None), (None, kept), (ones.bool(), kept)):
            TRITON.sample_and_score(logits, ones, noise, own, greedy, left)
            TRITON.score_tokens(logits, ones, scored, scored, greedy, left)
            TRITON.log_probs(logits, ones, own, greedy, left)
            TRITON.log_sums(logits, ones, own, greedy, left)


@launches
def _same_text(sizes: Sizes) -> None:
    shape = sizes.groups, sizes.particles
    positions = torch.zeros(shape, dtype=torch.int64)
    noise = TRITON.uniforms(positions[:, 0], positions, Purpose.DRAFT)
    TRITON.uniforms(
        positions[:, 0], positions.unsqueeze(2).repeat(1, 1, sizes.steps), Purpose.DRAFT
    )
    TRITON.round_seeds(positions[:, 0], positions[:, 0])
    pairs = torch.zeros(*shape, sizes.particles, dtype=torch.bool)
    TRITON.stratify(noise, pairs)
    TRITON.stratify(noise, pairs, positions)
    texts = torch.zeros(*shape, 1 + sizes.max_lag + sizes.steps, dtype=torch.int64)
    TRITON.same_text(texts[:, :, 1:], positions, positions.bool())


@launches
def _edits(sizes: Sizes) -> None:
    shape, wide = (sizes.groups, sizes.particles), torch.zeros(10, sizes.vocab)
    flags, cells = torch.zeros(10).bool(), torch.zeros(shape, dtype=torch.int64)
    columns = EditColumns(flags, flags, torch.zeros(10, 3), wide.int(), wide)
    texts = torch.zeros(*shape, 2 + sizes.max_lag + sizes.steps, dtype=torch.int64)[:, :, 1:]
    rows, stops = cells[:, 0], torch.zeros(sizes.groups, sizes.vocab).bool()
    edits = Edits(columns, range(sizes.groups), rows, rows, stops, cells, texts, cells)
    drafts = torch.zeros(*shape, sizes.steps, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.empty(*shape, sizes.steps + 1, sizes.vocab, dtype=dtype)
        TRITON.edit_logits(logits, edits, drafts, 0)
        TRITON.edit_logits(logits[:, :, :1], edits, drafts[:, :, :0], 0)
    TRITON.count_tokens(columns, rows, texts[:, 0], rows)


@launches
def _reweight(sizes: Sizes) -> None:
    weights = torch.zeros(sizes.groups, sizes.particles, dtype=torch.float64)
    scores = torch.zeros(sizes.groups, sizes.particles, sizes.steps)
    of_groups = weights[:, 0]
    rules = WeightRules(of_groups.long(), of_groups, of_groups.bool(), of_groups)
    drafts = weights, scores, scores, scores.bool()
    ways = of_groups.long(), tuple(SCHEMES)
    TRITON.reweight_and_resample(
        *drafts, of_groups, rules, weights.bool(), of_groups, weights, *ways
    )


@launches
def _verify(sizes: Sizes) -> None:
    shape = sizes.groups, sizes.particles, sizes.steps + 1
    scores, of_groups = torch.zeros(shape), torch.zeros(sizes.groups, dtype=torch.float64)
    drafts, steps = scores[:, :, 1:], of_groups.long()
    chains = Chains(drafts.long(), drafts.bool(), drafts.double(), steps)
    walk = TRITON.begin_walk(chains, steps, sizes.vocab)
    rows = torch.zeros(sizes.groups, sizes.vocab)
    TRITON.walk_on(walk, chains, rows, rows, 1)
    flags = drafts.bool()
    TRITON.keep(
        *(walk.found, scores, drafts, flags, flags, flags[:, :, 0], steps),
        *(of_groups, of_groups, of_groups),
    )


@launches
def _watch(sizes: Sizes) -> None:
    cells = torch.zeros(sizes.groups, sizes.particles, dtype=torch.int64)
    texts = torch.zeros(*cells.shape, 3 + sizes.max_lag + sizes.steps, dtype=torch.int64)
    path, flags = Paths(cells, cells, cells, texts[:, :, 2:]), cells[:, 0].bool()
    of = Watchable(cells[:, 0].double(), cells[:, 0], flags, flags)
    sums, ones = torch.zeros(*cells.shape, 4, dtype=torch.float64), torch.ones(sizes.groups)
    of_draft = cells.numel()
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.empty(of_draft * (sizes.steps + 1), sizes.vocab, dtype=dtype)
        held = TRITON.keep_column(None, logits[:of_draft], of, 1)
        for filtered in (False, True):
            laws = [TokenDistribution(scores, ones) for scores in (logits, held)]
            if filtered:
                rules = ones, ones.long(), ones, ones
                laws = [law._replace(kept=TRITON.keep_tokens(law.scores, *rules)) for law in laws]
            TRITON.watch(sums, of, path, *laws)


@launches
def _agreement(sizes: Sizes) -> None:
    places = torch.zeros(sizes.groups, sizes.particles, dtype=torch.int64)
    texts = torch.zeros(*places.shape, 2 + sizes.max_lag + sizes.steps, dtype=torch.int64)
    TRITON.common_tail(texts, places, places.bool())
    TRITON.num_distinct(places, places.bool())
    one, flags = torch.zeros(sizes.groups, dtype=torch.float64), places[:, 0].bool()
    weights = one.unsqueeze(1).repeat(1, sizes.particles)
    TRITON.narrow(weights, texts, places, places[:, 0], places.bool(), one, flags)
    added, latest = (one[:1].expand(sizes.groups), flags, places[:, 0]), (places[:, 0], one)
    totals = torch.zeros(sizes.groups + 1, 6, dtype=torch.float64)
    TRITON.tally(totals, places[:, 0], added=added, lowest=one, latest=latest)


@launches
def _ledger(sizes: Sizes) -> None:
    cells = torch.zeros(sizes.groups, sizes.particles, dtype=torch.int64)
    rows = of_groups = cells[:, 0]
    max_tail = sizes.max_lag + sizes.steps
    table, particles = torch.zeros(2, 100, 4096, dtype=torch.int32)
    sized = {"num_particles": sizes.particles, "max_tail": max_tail, "num_slots": 300}
    ledger = TRITON.ledger(table, particles, **sized)
    ledger.reserve(
        rows,
        allocated=of_groups,
        starts=cells,
        idle=cells.bool(),
        unread=of_groups.bool(),
        num_particles=of_groups,
        num_columns=of_groups,
        width=sizes.steps + 1,
    )
    tails = {"committed": of_groups, "max_tail": max_tail}
    ledger.descend(rows, ancestors=cells, **tails)
    lengths = {"lengths": cells, "counts": of_groups}
    max_arena = sizes.particles * max_tail + sizes.steps + 1
    ledger.commit(rows, allocated=of_groups, max_arena=max_arena, **lengths, **tails)


def _texts(sizes: Sizes) -> dict[str, Any]:
    """What every attention reads beside keys."""
    cells = torch.zeros(sizes.groups, sizes.particles, dtype=torch.int64)
    return {
        "req_to_token": torch.zeros(100, 4096, dtype=torch.int32),
        "tails": torch.zeros(100, 512, dtype=torch.int32),
        "rows": cells[:, 0],
        "committed": cells[:, 0],
        "particle_rows": cells,
        "starts": cells,
        "max_prefix": sizes.context,
        "max_tail": sizes.max_lag + sizes.steps + 1,
        "scaling": 0.1,
    }


@launches
def _particle_attention(sizes: Sizes) -> None:
    _attend(sizes, Layer(sizes.draft), 1)
    _attend(sizes, Layer(sizes.draft), 2)
    _attend(sizes, Layer(sizes.target), sizes.steps + 1)
    for layer in sizes.layers:
        _attend(sizes, layer, 1)
        _attend(sizes, layer, sizes.steps + 1)


def _attend(sizes: Sizes, layer: Layer, num_columns: int) -> None:
    """With queries as a GPU has them: a slice of what one projection made."""
    if driver.active.get_current_target().arch < layer.least_capability:
        return
    heads = layer.heads
    cache = torch.zeros(64, heads.kv, heads.dim, dtype=layer.cache or sizes.dtype)
    tokens = sizes.groups * sizes.particles * num_columns
    qkv = torch.zeros(tokens, (heads.q + 2 * heads.kv) * heads.dim, dtype=sizes.dtype)
    query = qkv[:, : heads.q * heads.dim]
    particle_attention(
        query.view(sizes.groups, sizes.particles, num_columns, heads.q, heads.dim),
        cache,
        cache,
        **_texts(sizes),
        cap=layer.cap,
        sinks=torch.zeros(heads.q) if layer.sinks else None,
        window=layer.window,
        sees_block=layer.sees_block,
    )


@launches
def _latent_attention(sizes: Sizes) -> None:
    if sizes.dtype == torch.float32:
        return  # refused
    _attend_latents(sizes, sizes.latent_draft, 1)
    _attend_latents(sizes, sizes.latent_draft, 2)
    _attend_latents(sizes, sizes.latent_target, sizes.steps + 1)


def _attend_latents(sizes: Sizes, latents: Latents, num_columns: int) -> None:
    width = latents.rank + latents.rope
    latent_attention(
        torch.zeros(
            sizes.groups, sizes.particles, num_columns, latents.q, width, dtype=sizes.dtype
        ),
        torch.zeros(64, 1, width, dtype=sizes.dtype),
        rank=latents.rank,
        **_texts(sizes),
    )


@launches
def _linear_attention(sizes: Sizes) -> None:
    """Of Qwen3.5-27B, with its states as SGLang has them."""
    size, (k_heads, v_heads, dim) = sizes.groups * sizes.particles, (16, 48, 128)
    gates = torch.zeros(size, sizes.steps + 1, v_heads)
    wide = torch.zeros(*gates.shape[:2], (2 * k_heads + v_heads) * dim, dtype=sizes.dtype)
    states, rows = torch.zeros(1, v_heads, dim, dim), gates[:, 0, 0].long()
    columns = Columns(wide, gates, gates)
    for dtype in (torch.float32, torch.bfloat16):
        gated_delta(states.to(dtype), rows, columns, rows, columns)


class Compiler:
    """Takes the place of `JITFunction.run`: compiles, launches nothing, tells what came out."""

    def __init__(self) -> None:
        self._run = JITFunction.run
        self._seen: set[str] = set()
        self.sizes = LLAMA

    def compile_for(self, capability: int) -> None:
        """From now on compile for CUDA devices of some capability."""
        # Triton keeps what it has compiled by device: each capability is one of its own.
        device = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: capability,
            get_current_stream=lambda device: device,
        )
        driver.set_active(device)  # type: ignore[arg-type]
        work.chip_of = lambda _: CHIPS[capability]  # type: ignore[assignment]

    def run(
        self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> Any:
        kernel: Any = self._run(function, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in self._seen:
            self._seen.add(kernel.hash)
            print(json.dumps(self._facts(function, kernel)), flush=True)
        return kernel

    def _facts(self, function: JITFunction, kernel: Any) -> dict[str, Any]:
        return {
            "kernel": f"{function.module.rpartition('.')[2]}.{function.__name__}",
            "sizes": f"{self.sizes.models}, G = {self.sizes.groups}, N = {self.sizes.particles}",
            "dtype": str(self.sizes.dtype).removeprefix("torch."),
            "capability": kernel.metadata.target.arch,
            "warps": kernel.metadata.num_warps,
            "shared": kernel.metadata.shared,
            "tensor_columns": kernel.metadata.tmem_size,
            **resources(kernel.asm["cubin"]),
        }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of each thread; registers that spill stand on the stack."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        tool = knobs.nvidia.cuobjdump.path
        told = subprocess.run(
            [tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told)
    assert found, told
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "stack": stack + local}


def main(arguments: list[str]) -> None:
    capabilities = [int(word) for word in arguments if word != "--all"]
    compiler = Compiler()
    JITFunction.run = lambda *args, **options: compiler.run(*args, **options)
    for capability in capabilities:
        compiler.compile_for(abs(capability))
        launched = [
            launch for launch in LAUNCHES if capability > 0 or launch.__name__ in OF_ATTENTION
        ]
        for compiler.sizes in [LLAMA, *OTHERS] if "--all" in arguments else [LLAMA]:
            for launch in launched:
                launch(compiler.sizes)


if __name__ == "__main__":
    main(sys.argv[1:])
