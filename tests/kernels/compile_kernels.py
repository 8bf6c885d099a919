"""Compiles every kernel for a GPU that need not be there: ``python compile_kernels.py 90``.

A script of its own: in a process that interprets Triton, nothing compiles. It prints one line
``module.kernel`` for each compiled kernel, and fails like the first that does not compile.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sglang_smc.kernels.filters import keep_tokens
from sglang_smc.kernels.lineage import commit, descend
from sglang_smc.kernels.particle_attention import particle_attention
from sglang_smc.kernels.prepare import reserve
from sglang_smc.kernels.randomness import round_seeds, uniforms
from sglang_smc.kernels.reweight import SCHEMES, collapse, reweight_and_resample
from sglang_smc.kernels.sample import log_probs, log_sums, sample_and_score, score_tokens
from sglang_smc.kernels.stratify import same_text, stratify
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.rounds import WeightRules

G, N, K, V = 2, 5, 3, 151_936


def absent(capability: int) -> Any:
    """A CUDA device of some capability, as far as the compiler asks for it."""
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: device,
    )


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    kernel: Any = run(self, *args, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"]
    print(f"{self.module.rpartition('.')[2]}.{self.__name__}")
    return kernel


def launch_sample() -> None:
    rows = torch.arange(G * N)
    ones, noise = torch.ones(G), torch.zeros(G * N, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(G * N, V, dtype=dtype)
        sample_and_score(logits, ones, noise)
        sample_and_score(logits, ones, noise, rows)
        score_tokens(logits, ones, rows)
        kept = keep_tokens(logits, ones, rows[:G], ones, ones)
        for greedy, left in ((ones.bool(), None), (None, kept), (ones.bool(), kept)):
            sample_and_score(logits, ones, noise, rows, greedy, left)
            score_tokens(logits, ones, rows, rows, greedy, left)
            log_probs(logits, ones, rows, greedy, left)
            log_sums(logits, ones, rows, greedy, left)


def launch_same_text() -> None:
    positions = torch.zeros(G, N, dtype=torch.int64)
    noise = uniforms(positions[:, 0], positions, Purpose.DRAFT)
    round_seeds(positions[:, 0], positions[:, 0])
    pairs = torch.zeros(G, N, N, dtype=torch.bool)
    stratify(noise, pairs)
    stratify(noise, pairs, positions)
    same_text(torch.zeros(G, N, 266, dtype=torch.int64), positions, positions.bool())


def launch_reweight() -> None:
    weights, scores = torch.zeros(G, N, dtype=torch.float64), torch.zeros(G, N, K)
    of_groups = weights[:, 0]
    rules = WeightRules(of_groups.long(), of_groups, of_groups.bool(), of_groups)
    drafts = weights, scores, scores, scores.bool()
    for scheme in SCHEMES:
        reweight_and_resample(*drafts, of_groups, rules, weights.bool(), of_groups, weights, scheme)
    where = of_groups.bool()
    collapse(weights, where, weights.bool(), of_groups, where)


def launch_ledger() -> None:
    table, cells = torch.zeros(100, 500, dtype=torch.int32), torch.zeros(G, N, dtype=torch.int64)
    rows = of_groups = cells[:, 0]
    reserve(
        table,
        10,
        N,
        rows,
        allocated=of_groups,
        starts=cells,
        idle=cells.bool(),
        unread=of_groups.bool(),
        num_particles=of_groups,
        num_columns=of_groups,
        width=K + 1,
    )
    descend(table, 10, N, rows, committed=of_groups, ancestors=cells, max_tail=260)
    commit(
        table,
        table[0],
        300,
        10,
        N,
        rows,
        committed=of_groups,
        allocated=of_groups,
        lengths=cells,
        counts=of_groups,
        max_tail=260,
        max_arena=2100,
    )


def launch_particle_attention() -> None:
    cells = torch.zeros(G, N, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        cache = torch.zeros(64, 8, 128, dtype=dtype)
        for num_columns in (1, 2, K + 1):
            particle_attention(
                torch.zeros(G, N, num_columns, 32, 128, dtype=dtype),
                cache,
                cache,
                req_to_token=torch.zeros(100, 500, dtype=torch.int32),
                rows=cells[:, 0],
                committed=cells[:, 0],
                particle_rows=cells,
                starts=cells,
                max_prefix=8192,
                max_tail=264,
                scaling=0.1,
            )


if __name__ == "__main__":
    run, JITFunction.run = JITFunction.run, compile_only
    driver.set_active(absent(int(sys.argv[1])))
    launch_sample()
    launch_same_text()
    launch_reweight()
    launch_ledger()
    launch_particle_attention()
