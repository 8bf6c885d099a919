"""Attribute kernels of rounds to models, kinds and times.

A round that is replayed from a CUDA graph is one launch, so timers cannot split it; torch's
profiler still reports its kernels, in order. Drafts come first, one token after another, with our
own kernels between them, and the target's pass is the last one with attention.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from study import REPOSITORY

DRAFT, TARGET, ROUND = "draft", "target", "round"
GEMM, LAYERS, ATTENTION, JOIN = "GEMMs", "norm, rope, KV, activation", "attention", "join"
OURS, OTHER = "sampler kernels", "other kernels"
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


def replays_of(recorded: Mapping[str, Any]) -> list[list[Kernel]]:
    """Return the launches that contain our kernels and attention: rounds, in order."""
    kernels = [Kernel(recorded["names"][name], *rest) for name, *rest in recorded["events"]]
    kernels.sort(key=lambda kernel: (kernel.launch, kernel.start))
    launches = [list(found) for _, found in groupby(kernels, key=lambda kernel: kernel.launch)]
    rounds = [found for found in launches if {OURS, ATTENTION} <= {kind_of(k.name) for k in found}]
    return sorted(rounds, key=lambda found: found[0].start)


def phases(replay: Sequence[Kernel]) -> Iterator[tuple[str, Kernel]]:
    """Yield each kernel of a round with its phase: the draft's, the target's or the round's own."""
    between = (kind_of(kernel.name) == OURS for kernel in replay)
    pairs = zip(between, replay, strict=True)
    stretches = [
        (own, [kernel for _, kernel in found]) for own, found in groupby(pairs, key=lambda p: p[0])
    ]
    attends = [any(kind_of(k.name) == ATTENTION for k in found) for _, found in stretches]
    last = max(place for place, does in enumerate(attends) if does)
    for place, (_, found) in enumerate(stretches):
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
    replays = replays_of(recorded)
    if replays:
        labelled, rounds = [list(phases(replay)) for replay in replays], len(replays)
    else:
        kernels = (Kernel(recorded["names"][name], *rest) for name, *rest in recorded["events"])
        labelled = [[("", kernel) for kernel in kernels]]
    sums: dict[tuple[str, str, str], list[int]] = {}
    forwards, busy = [], []
    for found in labelled:
        share = 1e9 * (1 if replays else rounds)
        forward = [
            k.duration for phase, k in found if phase != ROUND and kind_of(k.name) in FORWARD
        ]
        forwards.append(sum(forward) / share)
        busy.append(sum(kernel.duration for _, kernel in found) / share)
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
