"""Counts instructions of kernels: ``count_instructions.py [--filtered] [--dearest] [80 90 100]``.

Of a round of `exact` with N = K = 8 for one request (`--filtered`: with top-k and top-p), and a
vocabulary of 128,256; no GPU need be there. It prints a table of Markdown: the instructions of a
program in compiled code; of the dearest kernels (`--dearest`: of those alone) how many a warp of
each GPU issues for a unit of their work; registers of a thread, and shared memory of a program.
"""

import sys
from collections.abc import Callable
from typing import Any

import fake_cuda
import pytest
import triton
from compile_kernels import Compiler
from machine_code import DEAREST, instructions, instructions_of_unit, resources
from triton.runtime.jit import JITFunction

from sglang_smc.ops.triton_ops import TRITON
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import shape_of_server
from sglang_smc.smc.settings import Need

HEAD = """| kernel | instructions | a unit | registers | shared, bytes |
| --- | ---: | --- | ---: | ---: |"""


class Counter(Compiler):
    """Compiles, and prints a row for each kernel."""

    def __init__(self, wants: Callable[[str], bool]) -> None:
        super().__init__()
        self._wants = wants

    def run(self, function: JITFunction, *args: Any, **options: Any) -> Any:
        wanted = self._wants(self.name_of(function))
        return super().run(function, *args, **options) if wanted else None

    def tell(self, function: JITFunction, kernel: Any) -> None:
        name = self.name_of(function)
        cubin = kernel.asm["cubin"]
        each = ""
        if name in DEAREST:
            found = instructions_of_unit(name, cubin, kernel.metadata.num_warps)
            each = f"{found:,.4g} a {DEAREST[name].unit}"
        length = len(instructions(cubin))
        takes = f"{resources(cubin)['registers']} | {kernel.metadata.shared:,}"
        print(f"| `{name}` | {length:,} | {each} | {takes} |", flush=True)


def main(arguments: list[str]) -> None:
    is_wanted = DEAREST.__contains__ if "--dearest" in arguments else lambda name: True
    counter = Counter(is_wanted)
    JITFunction.run = lambda *args, **options: counter.run(*args, **options)
    config = SMCConfig(mode="exact", num_particles=8, num_steps=8)
    needs = {Need.FILTERS} if "--filtered" in arguments else set()
    for capability in [int(word) for word in arguments if word.isdigit()] or (80, 90, 100):
        counter.compile_for(capability)
        print(f"\nsm_{capability}, Triton {triton.__version__}:\n\n{HEAD}", flush=True)
        with pytest.MonkeyPatch.context() as patch:
            shape = shape_of_server(config)
            shape = shape.needing(shape.needs | needs)
            fake_cuda.trace_round(patch, config, shape, 1, TRITON, counter.run)


if __name__ == "__main__":
    main(sys.argv[1:])
