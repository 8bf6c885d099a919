"""Sum the kernels of an SMC round by kind: of its models, of the sampler, and others.

A round that is replayed from a CUDA graph is one launch, so timers cannot split it; torch's
profiler still reports its kernels.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from results import markdown_table, number_cell
from speed.grid import Cell
from study import REPOSITORY, BenchError

GEMM, LAYERS, ATTENTION, JOIN = "GEMMs", "norm, rope, KV, activation", "attention", "join"
OURS, OTHER = "sampler kernels", "other kernels"
GAPS = "gaps"  # time during which no kernel runs: launches, the scheduler
#: Kinds of kernels in a model's forward, as opposed to the round around it.
FORWARD = (GEMM, LAYERS, ATTENTION, JOIN)
#: By name, the first match; FlashAttention is built with CUTLASS, too.
PATTERNS = (
    (ATTENTION, re.compile(r"flash|attention|fmha", re.I)),
    (LAYERS, re.compile(r"norm|rope|rotary|kv_?cache|store_|set_kv|silu|act_and_mul|quant", re.I)),
    (GEMM, re.compile(r"nvjet|gemm|gemv|cutlass|cublas|xmma|splitk", re.I)),
)


class Kernel(NamedTuple):
    """One executed kernel; times in microseconds."""

    name: str
    start: float
    duration: float
    launch: int  # correlation id, shared by the kernels of a graph replay


@cache
def own_kernels() -> dict[str, str]:
    """Return the plugin's Triton kernels by name, with the file of each in `kernels/`."""
    folder = REPOSITORY / "kernels"
    return {
        node.name: path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
    }


@cache
def kind_of(name: str) -> str:
    """Return the kind of a kernel, by its name."""
    ours = [own for own in own_kernels() if name.startswith(own)]
    if ours:
        file = own_kernels()[max(ours, key=len)]
        if not file.startswith("attention/"):
            return OURS
        return JOIN if "join" in name else ATTENTION
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), OTHER)


def replays_of(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Return the launches that contain our kernels and attention: rounds."""
    ordered = sorted(kernels, key=lambda kernel: (kernel.launch, kernel.start))
    launches = [list(found) for _, found in groupby(ordered, key=lambda kernel: kernel.launch)]
    return [found for found in launches if {OURS, ATTENTION} <= {kind_of(k.name) for k in found}]


def kernels_in(folder: Path) -> list[Kernel]:
    """Return the kernels of decoding from the trace that SGLang's profiler wrote to a folder."""
    traces = list(folder.glob("*DECODE*.json.gz"))
    if len(traces) != 1:
        raise BenchError(f"SGLang's profiler wrote {len(traces)} traces of decoding, not one.")
    with gzip.open(traces[0]) as file:
        events = json.load(file)["traceEvents"]
    return [
        Kernel(one["name"], one["ts"], one["dur"], one["args"]["correlation"])
        for one in events
        if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def summed(kernels: Sequence[Kernel], rounds: int) -> dict[str, Any]:
    """Return the sums over the recorded rounds: lines of kind, name, launches and seconds a round.

    Where there are replays, kernels of other launches, such as a prefill's, are left out.
    """
    replays = replays_of(kernels)
    rounds = len(replays) or rounds
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for kernel in [one for replay in replays for one in replay] or kernels:
        line = sums[kind_of(kernel.name), kernel.name]
        line[0] += 1 / rounds
        line[1] += 1e-6 * kernel.duration / rounds
    lines = [[*key, round(count, 6), seconds] for key, (count, seconds) in sums.items()]
    lines.sort(key=lambda line: -line[-1])
    return {"rounds": rounds, "replayed": bool(replays), "sums": lines}


NOTE = (
    "In ms. Rounds are timed without a profiler; parts are sums of their kernels by name, in other "
    "rounds that torch's profiler saw. Forwards are the kernels of both models; the ratio is of a "
    "whole round over these. Gaps are what no kernel fills: launches, and the scheduler."
)


def parts_of(one: Mapping[str, Any]) -> Counter[str]:
    """Return the ms of each kind of kernel in a measured round; none without a GPU."""
    found: Counter[str] = Counter()
    for kind, *_, seconds in one.get("kernels", {}).get("sums", ()):
        found[kind] += 1000 * seconds
    if found:
        found[GAPS] = max(0.0, one["round_ms"] - found.total())
    return found


def markdown(rounds: Mapping[Cell, Mapping[str, Any]]) -> str:
    """Return a table with the ms of each cell's round and its parts, the largest first."""
    parts = {cell: parts_of(one) for cell, one in rounds.items()}
    names = [name for name, _ in sum(parts.values(), Counter()).most_common()]
    lines = []
    for cell, one in rounds.items():
        forwards = sum(parts[cell][kind] for kind in FORWARD)
        ratio = one["round_ms"] / forwards if forwards else None
        line = [cell.system.name, str(cell.batch), str(cell.prompt), f"{one['round_ms']:.2f}"]
        line += [number_cell(forwards or None, ".2f"), number_cell(ratio, ".2f")]
        lines.append([*line, *(f"{parts[cell][name]:.2f}" for name in names)])
    headers = ["", "batch", "prompt", "ms / round", "forwards", "ratio", *names]
    return f"{NOTE}\n\n{markdown_table(headers, lines)}\n"


def largest(one: Mapping[str, Any], most: int = 25) -> list[list[str]]:
    """Return lines of the longest kernels of a round."""
    return [
        [f"`{name[:70].replace('|', '/')}`", kind, f"{launches:g}", f"{1000 * seconds:.3f}"]
        for kind, name, launches, seconds in one.get("kernels", {}).get("sums", ())[:most]
    ]
