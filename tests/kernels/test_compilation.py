"""What the interpreter runs must compile, too; its Python knows no types and no barriers.

And it must fit: no register may spill, and where a launch counts on two programs at a time on each
multiprocessor, two must find room.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compile_sizes import CHIPS

ROOT = Path(__file__).parents[2]


class Multiprocessor(NamedTuple):
    """What programs share, from the table of compute capabilities in the CUDA guide."""

    shared: int  # bytes
    registers: int = 65_536
    tensor_columns: int = 0
    reserved: int = 1024  # bytes of shared memory that each program takes besides its own

    def programs(self, kernel: dict[str, Any]) -> int:
        """How many programs of a kernel run at a time; registers are handed out by 256 a warp."""
        registers = -(-kernel["registers"] * 32 // 256) * 256 * kernel["warps"]
        rooms = [self.registers // registers, self.shared // (kernel["shared"] + self.reserved)]
        if kernel["tensor_columns"]:
            rooms.append(self.tensor_columns // kernel["tensor_columns"])
        return min(rooms)


GPUS = {
    80: Multiprocessor(164 << 10),
    86: Multiprocessor(100 << 10),
    89: Multiprocessor(100 << 10),
    90: Multiprocessor(228 << 10),
    100: Multiprocessor(228 << 10, tensor_columns=512),
    120: Multiprocessor(100 << 10),
}
# The most common, and of attention the newest, whose programs have the least shared memory.
BY_DEFAULT = {90: "90", 120: "-120"}


@pytest.fixture(
    scope="module",
    params=["at default sizes", pytest.param("at all sizes", marks=pytest.mark.nightly)],
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels as compiled for each GPU, and what each takes."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "TRITON_CACHE_DIR": cache}
    environment.pop("TRITON_INTERPRET", None)
    everything = request.param == "at all sizes"
    what = ["--all", *map(str, GPUS)] if everything else BY_DEFAULT.values()
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, script, *what],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels_of(compiled: Any) -> Any:
    def found(capability: int) -> list[dict[str, Any]]:
        kernels = [kernel for kernel in compiled if kernel["capability"] == capability]
        if not kernels:
            assert capability not in BY_DEFAULT
            pytest.skip("compiled with all sizes")
        return kernels

    return found


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, kernels_of: Any) -> None:
    files = {kernel["kernel"].partition(".")[0] for kernel in kernels_of(capability)}
    sources = (ROOT / "kernels").rglob("*.py")
    assert files == {path.stem for path in sources if "@triton.jit" in path.read_text()}


# Programs of attention that run at a time, as `Chip.resident_programs` counts on.
PROGRAMS = {80: 1, 86: 1, 89: 1, 90: 2, 100: 2, 120: 1}


@pytest.mark.parametrize("capability", GPUS)
def test_no_register_spills_shared_memory_fits_and_programs_run_side_by_side(
    capability: int, kernels_of: Any
) -> None:
    found, most = kernels_of(capability), CHIPS[capability].shared
    assert [kernel for kernel in found if kernel["stack"] or kernel["shared"] > most] == []
    attention = [one for one in found if one["kernel"].endswith("._attend_spans")]
    in_half = [one for one in attention if one["dtype"] != "float32"]
    assert in_half
    room, programs = GPUS[capability].programs, PROGRAMS[capability]
    assert [kernel for kernel in in_half if room(kernel) < programs] == []
