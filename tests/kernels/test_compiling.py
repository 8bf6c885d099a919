"""Compiling for a GPU that is not there: a server there looks the same keys up."""

import os
import sys
from pathlib import Path

from programs import printed

# In a process of its own: this one may interpret kernels.
PROGRAM = """
from triton.runtime.cache import _base32
from triton.runtime.jit import JITFunction
from sglang_smc.ops import compiling
from sglang_smc.ops.check_cases import CHECKS, CheckSizes, Inputs
from sglang_smc.ops.triton_ops import TRITON

few = {name: CHECKS[name] for name in ("round_seeds", "uniforms", "same_text", "tally")}
compiling.CHECKS = few
device, jobs = compiling.DEVICES["h200"], compiling.jobs_of([CheckSizes()])
made = {of.hash for of in compiling.compile_checks(device, jobs, int, processes=2)}

# As on the GPU: tensors have values and addresses.
compiling.set_target(90)
launch, asked = JITFunction.run, set()
def run(function, *args, warmup, **options):
    asked.add(launch(function, *args, warmup=True, **options).hash)
JITFunction.run = run
for check in few.values():
    check.play(TRITON, Inputs("cpu", CheckSizes()))
print(len(made), made == asked, *map(_base32, made))
"""


def test_a_server_finds_what_was_compiled(tmp_path: Path) -> None:
    """Red where what stands in for a tensor has another type or alignment than a tensor."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    told = printed(sys.executable, "-c", PROGRAM, env=environment).splitlines()[-1]
    count, is_same, *folders = told.split()
    assert int(count) >= 4 and is_same == "True"
    assert all(list((tmp_path / folder).glob("*.cubin")) for folder in folders)
