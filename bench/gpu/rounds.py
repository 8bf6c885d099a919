"""Split the time of an SMC round into the kernels of its models, its own, and gaps.

A round that is replayed from a CUDA graph is one launch, so timers cannot split it; torch's
profiler still reports its kernels, in order. Drafts come first, one token after another, with our
own kernels between them, and the target's pass is the last one with attention.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, groupby, pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from intervals import Interval, log_ratio
from results import interval_cell, markdown_table, number_cell
from speed.grid import Cell
from study import REPOSITORY, BenchError

DRAFT, TARGET, ROUND = "draft", "target", "round"
GEMM, LAYERS, ATTENTION, JOIN = "GEMMs", "norm, rope, KV, activation", "attention", "join"
OURS, OTHER = "sampler kernels", "other kernels"
BETWEEN = "between rounds"  # the scheduler
GAPS = "gaps"  # time of a round during which no kernel runs
#: Kinds of kernels in a model's forward, as opposed to the round around it.
FORWARD = (GEMM, LAYERS, ATTENTION, JOIN)
#: By name, the first match; FlashAttention is built with CUTLASS, too.
PATTERNS = (
    (ATTENTION, re.compile(r"flash|attention|fmha", re.I)),
    (LAYERS, re.compile(r"norm|rope|rotary|kv_?cache|store_|set_kv|silu|act_and_mul|quant", re.I)),
    (GEMM, re.compile(r"nvjet|gemm|gemv|cutlass|cublas|xmma|splitk", re.I)),
)


class Kernel(NamedTuple):
    """One executed kernel; times in nanoseconds."""

    name: str
    start: int
    duration: int
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
    """Return the launches that contain our kernels and attention: rounds, in order."""
    ordered = sorted(kernels, key=lambda kernel: (kernel.launch, kernel.start))
    launches = [list(found) for _, found in groupby(ordered, key=lambda kernel: kernel.launch)]
    rounds = [found for found in launches if {OURS, ATTENTION} <= {kind_of(k.name) for k in found}]
    return sorted(rounds, key=lambda found: found[0].start)


def phases(replay: Sequence[Kernel]) -> Iterator[tuple[str, Kernel]]:
    """Yield each kernel of a round with its phase: the draft's, the target's or the round's own."""
    stretches = [list(found) for _, found in groupby(replay, lambda k: kind_of(k.name) == OURS)]
    attends = [any(kind_of(k.name) == ATTENTION for k in found) for found in stretches]
    last = max(place for place, does in enumerate(attends) if does)
    for place, found in enumerate(stretches):
        model = ROUND if not attends[place] else TARGET if place == last else DRAFT
        for kernel in found:
            yield (model if kind_of(kernel.name) in FORWARD else ROUND), kernel


def part_of(phase: str, kind: str) -> str:
    """Return the table's name of a part: ``draft GEMMs``, ``sampler kernels``."""
    if phase == ROUND:
        return OURS if kind == OURS else OTHER
    return f"{phase} {kind}".strip()


def summed(recorded: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the sums over the recorded rounds, in seconds.

    ``sums`` are lines of phase, kind, name, launches and seconds, both per round; ``forwards`` and
    ``busy`` are each round's kernels of the models, and all of its kernels. Rounds that are no
    replays are not told apart: they have their mean, and their kernels no phase.
    """
    kernels = [Kernel(recorded["names"][name], *rest) for name, *rest in recorded["events"]]
    replays = replays_of(kernels)
    labelled = [list(phases(replay)) for replay in replays] or [[("", one) for one in kernels]]
    rounds = len(replays) or rounds
    sums: dict[tuple[str, str, str], list[int]] = {}
    forwards, busy = [], []
    for found in labelled:
        share = 1e9 * (1 if replays else rounds)
        in_models = (phase != ROUND and kind_of(k.name) in FORWARD for phase, k in found)
        durations = [kernel.duration for _, kernel in found]
        forwards.append(sum(d for d, own in zip(durations, in_models, strict=True) if own) / share)
        busy.append(sum(durations) / share)
        for phase, kernel in found:
            line = sums.setdefault((phase, kind_of(kernel.name), kernel.name), [0, 0])
            line[0] += 1
            line[1] += kernel.duration
    lines = [[*key, count / rounds, total / 1e9 / rounds] for key, (count, total) in sums.items()]
    return {
        "rounds": rounds,
        "replayed": bool(replays),
        "sums": sorted(lines, key=lambda line: -line[-1]),
        "forwards": forwards,
        "busy": busy,
    }


# --- Rounds of a cell

NOTE = (
    "In ms. Rounds are timed by CUDA events; parts are sums of their kernels by name, in other "
    "rounds that torch's profiler saw. Forwards are the kernels of both models; the ratio is of a "
    "whole round over these, with a 95 % interval. Gaps are what no kernel fills."
)


class RoundRow(NamedTuple):
    """A round of one cell, in seconds; medians over rounds, except the ratio and the parts."""

    cell: Cell
    rounds: int
    seconds: float
    forwards: float | None  # None without kernels, as on a CPU
    ratio_to_forwards: Interval | None
    parts: dict[str, float]


def make_row(cell: Cell, bursts: Sequence[Mapping[str, Any]]) -> RoundRow:
    """Return the row of a cell from the timers' output, without rounds of fewer requests."""
    whole, between = [], []
    for burst in bursts:
        # A step begins just before its round, so the difference of their lengths is the
        # scheduler's time from a round's end to the next one's start.
        steps = [later - earlier for (earlier, _), (later, _) in pairwise(burst["steps"])]
        for place, one in enumerate(burst["rounds"]):
            if one["batch"] == cell.batch and not one["recorded"]:  # the profiler costs time
                whole.append(one["round"])
                between += [step - one["round"] for step in steps[place : place + 1]]
    if not whole:
        raise BenchError(f"All rounds of {cell.name} were profiled: its answers are too short.")
    kernels = [burst["kernels"] for burst in bursts if burst["kernels"]]
    forwards = list(chain.from_iterable(one["forwards"] for one in kernels))
    parts: dict[str, float] = {}
    total = sum(one["rounds"] for one in kernels)
    for one in kernels:
        for phase, kind, *_, seconds in one["sums"]:
            part = part_of(phase, kind)
            parts[part] = parts.get(part, 0.0) + seconds * one["rounds"] / total
    if kernels:
        busy = fmean(chain.from_iterable(one["busy"] for one in kernels))
        parts[GAPS] = max(0.0, median(whole) - busy)
    parts[BETWEEN] = median(between) if between else 0.0
    ratio = log_ratio(whole, forwards, paired=False).ratio() if forwards else None
    return RoundRow(
        cell, len(whole), median(whole), median(forwards) if forwards else None, ratio, parts
    )


def markdown(rows: Sequence[RoundRow]) -> str:
    """Return a table with the milliseconds of each round and its parts, the largest first."""
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    names.sort(key=lambda name: -fmean(row.parts.get(name, 0.0) for row in rows))
    headers = ["", "batch", "prompt", "ms / round", "forwards", "ratio", *names]
    lines = []
    for row in rows:
        cell = row.cell
        line = [cell.system.name, str(cell.batch), str(cell.prompt), _ms(row.seconds)]
        line += [_ms(row.forwards), interval_cell(row.ratio_to_forwards, ".2f")]
        lines.append([*line, *(_ms(row.parts.get(name, 0.0)) for name in names)])
    return f"{NOTE}\n\n{markdown_table(headers, lines)}\n"


def _ms(seconds: float | None) -> str:
    return number_cell(seconds and 1000 * seconds, ".2f")
