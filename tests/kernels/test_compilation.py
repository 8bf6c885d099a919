"""What the interpreter runs must compile, too; its Python knows no types and no barriers.

And it must fit: no register of attention may spill at default sizes, and where a launch counts on
two programs at a time on each multiprocessor, two must find room.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compile_sizes import CHIPS
from contract.upstream import release
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
#: Bytes of machine code of a kernel of verification, for any number of columns.
MOST_OF_VERIFICATION = 150_000
#: The kernels of verification, by file.
VERIFICATION = ("tree.", "shares.", "verify.")
#: Warp instructions of the dearest kernels for a unit of their work (`machine_code.DEAREST`):
#: of the cheapest variant, and of the one with all filters.
MOST_INSTRUCTIONS = {
    "shares._read_nodes": (8.0, 9.5),
    "shares._add_up_residual": (3.6, 5.0),
    "sample._sum_tile": (1.1, 1.8),
    "filters._count_buckets": (7.2, 7.2),
    "shares._share_out": (5_600.0, 5_600.0),
}
BY_DEFAULT = "90"
AT_ALL_SIZES = ("--all", "80", "-86", "-89", "90", "-100", "-120")


class Compiled(NamedTuple):
    """Kernels as compiled for some GPUs, and what each takes."""

    of: str
    asked: tuple[str, ...]  # of `compile_kernels.py`
    kernels: list[dict[str, Any]]


HERE = "this Triton"
ELSEWHERE = "those of other supported releases"
#: Bytes of stack a thread at all sizes, attention's too, by chip.
SPILLED = {HERE: {86: 8, 89: 8, 100: 16, 120: 16}, ELSEWHERE: {80: 40, 90: 16, 100: 8, 120: 8}}
ALL = pytest.mark.nightly


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((HERE, (BY_DEFAULT,)), id=f"{HERE}, default sizes"),
        pytest.param((ELSEWHERE, (BY_DEFAULT,)), id=f"{ELSEWHERE}, default sizes"),
        *(pytest.param((of, AT_ALL_SIZES), id=f"{of}, all", marks=ALL) for of in (HERE, ELSEWHERE)),
    ],
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A release's Triton stands first on the path, with this interpreter's torch and SGLang."""
    of, asked = request.param
    folders = {None} if of == HERE else set(map(release.triton_of, release.supported())) - {None}
    if not folders:
        pytest.skip("all supported releases bring this Triton")
    kernels = []
    for folder in folders:
        environment = os.environ | {
            "PYTHONPATH": ":".join(
                map(str, filter(None, (folder, ROOT, ROOT / "tests" / "support")))
            ),
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        }
        environment.pop("TRITON_INTERPRET", None)
        script = Path(__file__).with_name("compile_kernels.py")
        told = printed(sys.executable, script, *asked, env=environment, timeout=None)
        kernels += map(json.loads, told.splitlines())
    return Compiled(of, asked, kernels)


@pytest.mark.parametrize("capability", GPUS)
def test_kernels_compile_fit_and_run_side_by_side(capability: int, compiled: Compiled) -> None:
    found = [kernel for kernel in compiled.kernels if kernel["capability"] == capability]
    if not found:
        assert not {str(capability), f"-{capability}"} & set(compiled.asked)
        pytest.skip("compiled with all sizes")
    if str(capability) in compiled.asked:
        files = {kernel["kernel"].partition(".")[0] for kernel in found}
        sources = (ROOT / "kernels").rglob("*.py")
        assert files == {path.stem for path in sources if "@triton.jit" in path.read_text()}
    on = GPUS[capability]
    most = CHIPS[capability].shared
    spilled = SPILLED[compiled.of].get(capability, 0) * (compiled.asked == AT_ALL_SIZES)
    stack = max(MOST_STACK, spilled)
    assert [one for one in found if one["stack"] > stack or one["shared"] > most] == []
    verification = [one for one in found if one["kernel"].startswith(VERIFICATION)]
    assert [one for one in verification if one["bytes"] > MOST_OF_VERIFICATION] == []
    attention = [one for one in found if one["kernel"].endswith("._attend_spans")]
    products = [one for one in found if one["kernel"] == "skinny._skinny"]
    assert products and [one for one in products if one["stack"] > 0] == []
    assert [one for one in found if not one["waits"]] == []
    if str(capability) in compiled.asked:
        for name, (of_cheapest, of_dearest) in MOST_INSTRUCTIONS.items():
            of_name = [one for one in found if one["kernel"] == name]
            counts = [one["instructions"] for one in of_name if one["instructions"]]
            assert min(counts) <= of_cheapest and max(counts) <= of_dearest, (name, counts)
    in_half = [one for one in attention if one["dtype"] != "float32"]
    assert in_half
    assert [kernel for kernel in attention if kernel["stack"] > spilled] == []
    if compiled.of == HERE:  # Triton 3.6 takes 139 registers for heads of 256 with a cap
        assert [kernel for kernel in in_half if on.programs(kernel) < on.attends] == []
