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

ROOT = Path(__file__).parents[2]


class Multiprocessor(NamedTuple):
    """What programs share, from the table of compute capabilities in the CUDA guide."""

    shared: int  # bytes
    shared_of_program: int  # bytes, at the most
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
    80: Multiprocessor(164 << 10, 163 << 10),
    90: Multiprocessor(228 << 10, 227 << 10),
    100: Multiprocessor(228 << 10, 227 << 10, tensor_columns=512),
}


@pytest.fixture(
    scope="module",
    params=["at default sizes", pytest.param("at all sizes", marks=pytest.mark.thorough)],
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All kernels as compiled for A100, H100 and B200, and what each takes."""
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": cache}
    environment.pop("TRITON_INTERPRET", None)
    everything = ["--all"] if request.param == "at all sizes" else []
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, script, *everything, *map(str, GPUS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels_of(compiled: Any) -> Any:
    return lambda capability: [
        kernel
        for kernel in compiled
        if kernel["capability"] == capability and not kernel["starved"]
    ]


@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_compiles(capability: int, kernels_of: Any) -> None:
    files = {kernel["kernel"].partition(".")[0] for kernel in kernels_of(capability)}
    sources = (ROOT / "kernels").rglob("*.py")
    assert files == {path.stem for path in sources if "@triton.jit" in path.read_text()}


@pytest.mark.parametrize("capability", GPUS)
def test_no_register_spills(capability: int, kernels_of: Any) -> None:
    assert [kernel for kernel in kernels_of(capability) if kernel["stack"]] == []


@pytest.mark.parametrize("capability", GPUS)
def test_shared_memory_fits(capability: int, kernels_of: Any) -> None:
    most = GPUS[capability].shared_of_program
    assert [kernel for kernel in kernels_of(capability) if kernel["shared"] > most] == []


@pytest.mark.parametrize(("capability", "programs"), [(80, 1), (90, 2), (100, 2)])
def test_programs_of_attention_run_side_by_side(
    capability: int, programs: int, kernels_of: Any
) -> None:
    """As many as `RESIDENT_PROGRAMS` counts on, but for float32 and for the A100's 164 KB."""
    attention = [
        kernel
        for kernel in kernels_of(capability)
        if kernel["kernel"].endswith("._attend_spans") and kernel["dtype"] != "float32"
    ]
    assert attention
    room = GPUS[capability].programs
    assert [kernel for kernel in attention if room(kernel) < programs] == []


def test_a_spilled_register_shows(compiled: Any) -> None:
    """In a kernel that was left too few."""
    assert any(kernel["stack"] > 0 for kernel in compiled if kernel["starved"])
