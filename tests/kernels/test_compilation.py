"""What the interpreter runs must compile, too; its Python knows no types and no barriers.

And it must fit: no register of attention may spill, and where a launch counts on two programs at a
time on each multiprocessor, two must find room.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compile_sizes import CHIPS
from programs import printed

ROOT = Path(__file__).parents[2]


class Multiprocessor(NamedTuple):
    """What programs share, from the table of compute capabilities in the CUDA guide."""

    shared: int  # bytes
    attends: int  # programs of attention that run at a time, as `Chip.resident_programs` counts on
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
    80: Multiprocessor(164 << 10, 1),
    86: Multiprocessor(100 << 10, 1),
    89: Multiprocessor(100 << 10, 1),
    90: Multiprocessor(228 << 10, 2),
    100: Multiprocessor(228 << 10, 2, tensor_columns=512),
    120: Multiprocessor(100 << 10, 1),
}
#: Bytes of stack a thread, outside of attention: an address that ptxas stores to run more programs.
MOST_STACK = 8
BY_DEFAULT = 90
AT_ALL_SIZES = "80", "-86", "-89", "90", "-100", "-120"


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
    what = ["--all", *AT_ALL_SIZES] if everything else [BY_DEFAULT]
    script = Path(__file__).with_name("compile_kernels.py")
    told = printed(sys.executable, script, *what, env=environment, timeout=None)
    return [json.loads(line) for line in told.splitlines()]


@pytest.mark.parametrize("capability", GPUS)
def test_kernels_compile_fit_and_run_side_by_side(capability: int, compiled: list[dict]) -> None:
    found = [kernel for kernel in compiled if kernel["capability"] == capability]
    if not found:
        assert capability != BY_DEFAULT
        pytest.skip("compiled with all sizes")
    if capability in (80, 90):
        files = {kernel["kernel"].partition(".")[0] for kernel in found}
        sources = (ROOT / "kernels").rglob("*.py")
        assert files == {path.stem for path in sources if "@triton.jit" in path.read_text()}
    most = CHIPS[capability].shared
    assert [one for one in found if one["stack"] > MOST_STACK or one["shared"] > most] == []
    attention = [one for one in found if one["kernel"].endswith("._attend_spans")]
    in_half = [one for one in attention if one["dtype"] != "float32"]
    assert in_half
    assert [kernel for kernel in attention if kernel["stack"]] == []
    on = GPUS[capability]
    assert [kernel for kernel in in_half if on.programs(kernel) < on.attends] == []
