"""What compiled kernels ask of a multiprocessor, by the word of NVIDIA's own tools."""

import math
import re
import tempfile
from typing import NamedTuple

from programs import printed
from triton import knobs


class Instruction(NamedTuple):
    """One instruction, with the place to which it may jump."""

    place: int
    text: str
    target: int | None


class Program(NamedTuple):
    """The work of one program of a kernel: it is what its instructions are counted by."""

    unit: str
    units: int | None  # of all its warps together; None: each warp does all of one
    turns: tuple[int, ...]  # of each loop, in the order in which they begin


#: The dearest kernels of a round for N = K = 8, of 128,256 tokens in 32 tiles.
DEAREST = {
    "shares._read_nodes": Program("token and node", 4096, (16,)),
    "shares._add_up_residual": Program("token and node", 4096, ()),
    "sample._sum_tile": Program("token and row", 4096, ()),
    "filters._count_buckets": Program("token and row", 4096, (16,)),
    "shares._share_out": Program("column, by each warp", None, (1, 8, 16, 16, 16)),
}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of each thread; registers that spill stand on the stack."""
    told = _dumped(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told)
    assert found, told
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "stack": stack + local}


def instructions(cubin: bytes) -> list[Instruction]:
    """The instructions up to the end of the program.

    Behind it stand the slow ways of divisions and shuffles, which hardly a number takes.
    """
    found: list[Instruction] = []
    for place, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?) *;", _dumped(cubin, "-sass")):
        jump = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        one = Instruction(int(place, 16), text, int(jump[1], 16) if jump else None)
        if one.target == one.place:  # stands where no program comes
            break
        found += [one] if text != "NOP" else []
        if text == "EXIT":
            break
    return found


def executed(code: list[Instruction], turns: tuple[int, ...]) -> int:
    """How many instructions a warp runs that takes every branch, and each loop so many times."""
    loops = [(one.target, one.place) for one in code if one.target and one.target < one.place]
    assert len(loops) == len(turns), f"{len(loops)} loops, and {turns} turns"
    counts = list(zip(sorted(loops), turns, strict=True))

    def times(place: int) -> int:
        return math.prod(count for (first, last), count in counts if first <= place <= last)

    return sum(times(one.place) for one in code)


def instructions_of_unit(name: str, cubin: bytes, warps: int) -> float:
    """Warp instructions of a kernel of `DEAREST` for one unit of its work."""
    program = DEAREST[name]
    found = executed(instructions(cubin), program.turns)
    return found if program.units is None else found * warps / program.units


def _dumped(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return printed(knobs.nvidia.cuobjdump.path, option, file.name)
