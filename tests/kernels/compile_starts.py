"""Counts what servers compile at a cold start: ``compile_starts.py [NAME ...]``.

For an H100, which need not be there. It prints each server's kernels with their variants, CPU
seconds and bytes of machine code, the dearest first. Names are of `SERVERS`; several are counted
each in a process of its own, which has compiled nothing.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import fake_cuda
import pytest
from compile_kernels import Compiler, attend
from compile_sizes import LLAMA, Layer
from programs import printed
from triton.runtime.jit import JITFunction

from sglang_smc.models.softmax import Heads
from sglang_smc.ops.check_cases import CHECKS, CheckSizes, Inputs, Passes
from sglang_smc.ops.compiling import cpu_seconds
from sglang_smc.ops.triton_ops import TRITON
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import RoundShape
from sglang_smc.round.graph import Kinds, plan_sizes
from sglang_smc.state.logprobs import recorded_logprobs

SERVERS = {
    "default": SMCConfig(),
    "n4-k17": SMCConfig(mode="exact", num_particles=4, num_steps=17),
    "adaptive-n4-k16": SMCConfig(mode="exact", num_particles=4, num_steps=16, adaptive="on"),
}
#: Batches that SGLang captures by default for up to 48 requests.
WANTED = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)
CAPABILITY = 90


class Variant(NamedTuple):
    """A kernel as it is compiled once."""

    kernel: str
    seconds: float  # of CPU, ptxas included
    num_bytes: int  # of machine code


class Counter(Compiler):
    """Compiles, and notes what each variant takes."""

    def __init__(self) -> None:
        super().__init__()
        self.variants: list[Variant] = []

    def run(self, function: JITFunction, *args: Any, **options: Any) -> Any:
        start = cpu_seconds()
        known = len(self.seen)
        kernel = super().run(function, *args, **options)
        if len(self.seen) > known:
            seconds = cpu_seconds() - start
            name = self.name_of(function)
            self.variants.append(Variant(name, seconds, len(kernel.asm["cubin"])))
        return kernel

    def tell(self, function: JITFunction, kernel: Any) -> None:
        """Keep silent."""


def _check(config: SMCConfig) -> None:
    """Launch what the start check runs."""
    target, draft = (Heads(*of, LLAMA.dtype) for of in (LLAMA.target, LLAMA.draft))
    passes = Passes(target, (config.num_steps + 1,), True), Passes(draft, (1, 2), True)
    sizes = CheckSizes(
        config.num_particles,
        config.num_steps,
        passes,
        draft_layers=False,
        vocab_size=LLAMA.vocab,
    )
    for check in CHECKS.values():
        check.play(TRITON, Inputs("cuda", sizes))


def _jobs(config: SMCConfig) -> list[tuple[RoundShape, int]]:
    """Return all rounds that a server captures where memory does not bound them."""
    kinds = Kinds.of(config, recorded_logprobs(LLAMA.vocab))
    sizes = plan_sizes(WANTED, kinds.num_most_used, len(kinds.edited + kinds.off))
    of_kinds = (
        (kinds.edited + kinds.off, sizes.of_edited),
        ([kinds.powers, kinds.any], sizes.of_any),
        (kinds.most_used + kinds.greedy, sizes.of_rounds),
    )
    return [(shape, size) for shapes, of in of_kinds for shape in shapes for size in of]


def _attention(shape: RoundShape, size: int) -> None:
    """Launch that of a round's passes."""
    sizes = LLAMA._replace(groups=size, particles=shape.num_particles, steps=shape.num_steps)
    for num_columns in (1, 2) if shape.num_steps else ():
        attend(sizes, Layer(sizes.draft), num_columns, is_late=True)
    attend(sizes, Layer(sizes.target), sizes.steps + 1, is_late=True)


def count(config: SMCConfig) -> list[Variant]:
    """Compile all that a server of Llama 8B and 1B compiles before it takes requests."""
    counter = Counter()
    counter.compile_for(CAPABILITY)
    run: Callable[..., Any] = counter.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inputs, "multiprocessors", 132)
        with fake_cuda.fake_cuda(patch, run):
            _check(config)
        for shape, size in _jobs(config):
            fake_cuda.trace_round(patch, config, shape, size, TRITON, run)
        JITFunction.run = lambda *args, **options: run(*args, **options)
        for shape, size in _jobs(config):
            _attention(shape, size)
    return counter.variants


def table(variants: list[Variant]) -> str:
    """Return a line for each kernel and one for all, the dearest first."""
    kernels = {one.kernel for one in variants}
    found = [[one for one in variants if one.kernel == name] for name in kernels]
    found.sort(key=lambda of: -sum(one.seconds for one in of))
    lines = [f"{'kernel':40} {'variants':>8} {'CPU s':>7} {'KB':>7}"]
    for name, of in [*((of[0].kernel, of) for of in found), ("all", variants)]:
        seconds, size = (sum(column) for column in list(zip(*of, strict=True))[1:])
        lines.append(f"{name:40} {len(of):8} {seconds:7.2f} {size / 1e3:7.0f}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    names = arguments or list(SERVERS)
    if len(names) == 1:
        print(f"{names[0]}\n{table(count(SERVERS[names[0]]))}")
        return
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"TRITON_CACHE_DIR": cache}
            print(printed(sys.executable, __file__, name, env=environment, timeout=None))


if __name__ == "__main__":
    main(sys.argv[1:])
