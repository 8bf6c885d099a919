"""Compute the tokens a second to expect on an H200: tokens a round over milliseconds a round.

Tokens are those of `bench/results/trees` and, on real text, of `bench/results/real`. Milliseconds
are measured, or else modelled: SMC's measured rounds of N = K = 8 take so many times the planner's
bound, by rows of the target's pass. Other N and K take as many times their own; SGLang's other
trees as many times what their bound is above that of the tree that was measured.

What was built since is in `bench/results/gpu/changes.csv`, by estimates from machine code and
bytes. A target in FP8 saves `PRODUCTS` times what its pass's bound does. One of 70B on two GPUs
takes as many times its bound as one of 8B, and `SUM` for each sum over the ranks.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gpu.engines import SHORT, SPEED_8B, K, N
from results import markdown_table
from speed import grid
from speed.report import Results
from speed.runner import read_results
from study import PUBLISHED

from sglang_smc_tools.plan.devices import Device, named
from sglang_smc_tools.plan.roofline import PassRows, RoundCost, ar_step, forward, smc_round
from sglang_smc_tools.plan.shapes import DRAFTS, ModelShape

TEMPERATURE = "0.7"
TEMPERATURES = ("0", "0.7", "1")
TARGET = SPEED_8B.pair.target
MODEL = SPEED_8B.pair.draft
HEAD = DRAFTS["eagle3-8b"]
CONTEXT = SHORT[0][1] + SPEED_8B.new_tokens / 2
BATCHES = [batch for batch, _ in SHORT]
H200 = named("h200")
IN_FP8 = named("h200", 1.0)
#: Times their bound that the target's products take in the profiles of `bench/results/gpu`.
PRODUCTS = 1.3
#: Milliseconds of a sum over two ranks, two of them a layer: an estimate.
SUM = 0.012
NOTE = """Milliseconds of Llama 3.1 8B with a 1B draft or a head, modelled where tokens / s are in
italics; tokens a round of the shipped pair, and of the coder pair (default: timed at c = 0)."""

PAGE = """# What to expect of an H200

Tokens a second of all users together, and in parentheses the milliseconds of a round: Llama 3.1
8B in bf16 with random weights and 256 tokens of context, SGLang 0.5.17. Tokens a round are those of
the shipped pair of tiny models at temperature 0.7 ([trees](../trees/trees.md)), so the speeds of
another pair differ as its tokens do. A tree of SGLang's is top-k / depth / nodes.

## Measured milliseconds

{measured}

## Modelled milliseconds

Each is the planner's bound, times what the measured rounds took of theirs. *As it is now* adds
[what was built since](changes.csv). *In FP8* a target saves 1.3 times what its bound does, beside a
draft in bf16. 70B takes as many times its bound as 8B. These are good to a quarter.

{modelled}
"""


class Shape(NamedTuple):
    """A way to decode, the rows of its target pass for a request, and the bound of its round."""

    system: grid.System | None  # as `bench/gpu` measures it
    rows: int
    bound: Callable[[int], float]  # ms, of a batch
    is_tree_of: str = ""  # the family of SGLang's that was measured


class PlannedPair(NamedTuple):
    """A target, its drafts and what they run on."""

    target: ModelShape = TARGET
    model: ModelShape = MODEL
    head: ModelShape = HEAD
    device: Device = H200


SMALL = PlannedPair()
LARGE = PlannedPair(
    grid.PAIR_70B.target,
    grid.PAIR_70B.draft,
    replace(HEAD, hidden_size=8192, intermediate_size=28672, num_heads=64),
    IN_FP8.times(2),
)


def plain(models: PlannedPair = SMALL) -> Shape:
    def bound(batch: int) -> float:
        return 1000 * ar_step(models.target, batch, CONTEXT).seconds(models.device)

    return Shape(grid.PLAIN, 1, bound)


def ours(family: str, n: int, k: int, models: PlannedPair = SMALL) -> Shape:
    draft = models.head if family == grid.EXACT_HEAD else models.model

    def bound(batch: int) -> float:
        rows = PassRows(batch, n, CONTEXT)
        return 1000 * smc_round(models.target, draft, rows, k).seconds(models.device)

    return Shape(grid.System(family, n, k), n * (k + 1), bound)


def tree(family: str, passes: int, width: int, rows: int, system: bool = False) -> Shape:
    """Return SGLang's tree: passes of the draft over ``width`` rows, and ``rows`` to verify."""
    draft = HEAD if family == grid.EAGLE else MODEL

    def bound(batch: int) -> float:
        one, wide = (PassRows(batch, n, CONTEXT) for n in (1, width))
        drafts = [forward("draft", draft, wide, 1, 1)] * passes
        found = RoundCost((*drafts, forward("verify", TARGET, one, rows, rows)))
        return 1000 * found.seconds(H200)

    return Shape(grid.System(family) if system else None, rows, bound, family)


ON_MODEL = "`exact`, draft model, N = 8, K = 8"
ON_HEAD = "`exact`, EAGLE-3 head, N = 8, K = 8"
ON_DEEP_HEAD = "`exact`, EAGLE-3 head, N = 4, K = 17"
#: By the names in `bench/results/trees`; SGLang's trees are top-k / depth / nodes.
SHAPES = {
    "AR": plain(),
    "SGLang, EAGLE-3 head, tree 4 / 5 / 8": tree(grid.EAGLE, 5, 4, 8, system=True),
    "SGLang, EAGLE-3 head, tree 10 / 8 / 72": tree(grid.EAGLE, 8, 10, 72),
    "SGLang, draft model, tree 8 / 8 / 72": tree(grid.CHAIN, 8, 8, 72),
    ON_MODEL: ours(grid.EXACT, N, K),
    ON_HEAD: ours(grid.EXACT_HEAD, N, K),
    ON_DEEP_HEAD: ours(grid.EXACT_HEAD, 4, 17),
}
LARGE_SHAPES = {
    "AR": plain(LARGE),
    ON_HEAD: ours(grid.EXACT_HEAD, N, K, LARGE),
    ON_DEEP_HEAD: ours(grid.EXACT_HEAD, 4, 17, LARGE),
}
#: The drafts of `changes.csv`.
CHANGED = {grid.EXACT: "model", grid.EXACT_HEAD: "head"}
#: By the labels in `bench/results/real`; mode `auto` was not timed.
ON_REAL_TEXT = {
    "SGLang tree 4 / 17 / 72": tree(grid.CHAIN, 17, 4, 72),
    "SGLang tree 8 / 8 / 72": tree(grid.CHAIN, 8, 8, 72),
    "exact N=4 K=17": ours(grid.EXACT, 4, 17),
    "exact N=8 K=8": ours(grid.EXACT, N, K),
    "default N=8 K=8": ours(grid.BLOCK, N, K),
}
#: The tree of SGLang's that was measured, and SMC with the same draft.
LIKE = {
    grid.EAGLE: (tree(grid.EAGLE, 5, 4, 8, system=True), grid.EXACT_HEAD),
    grid.CHAIN: (tree(grid.CHAIN, 5, 1, 5, system=True), grid.EXACT),
}


def measured(results: Results, shape: Shape, batch: int) -> float | None:
    """Return the ms of a round, None where it was not measured."""
    cell = shape.system and grid.SpeedCell(shape.system, batch, SHORT[0][1])
    return results.get(cell.slug, {}).get("round_ms") if cell else None


def milliseconds(results: Results, shape: Shape, batch: int) -> tuple[float, bool]:
    """Return the ms of a round, and whether it is measured."""
    known = measured(results, shape, batch)
    if known is not None:
        return known, True
    like, family = LIKE.get(shape.is_tree_of, (None, shape.system and shape.system.family))
    assert family is not None
    smc = ours(family, N, K)
    shares = [(measured(results, smc, b) or math.nan) / smc.bound(b) for b in BATCHES]
    logs = [math.log(smc.rows * b) for b in BATCHES]
    share = float(np.interp(math.log(shape.rows * batch), logs, shares))
    if like is None:
        return share * shape.bound(batch), False
    beside = measured(results, like, batch) or math.nan
    return beside + share * (shape.bound(batch) - like.bound(batch)), False


@cache
def changes() -> dict[str, float]:
    """Return the ms that default servers gained or lost since, by ``draft batch``."""
    found: dict[str, float] = {}
    for row in csv.DictReader((PUBLISHED / "gpu" / "changes.csv").read_text().splitlines()):
        if row["state"] == "default":
            for key in list(row)[2:]:
                found[key] = found.get(key, 0.0) + float(row[key])
    return found


def now(results: Results, name: str, batch: int) -> float:
    """Return the ms of a round by the code as it is."""
    shape = SHAPES[name]
    draft = shape.system and CHANGED.get(shape.system.family)
    return milliseconds(results, shape, batch)[0] + changes().get(f"{draft} {batch}", 0.0)


def in_fp8(results: Results, name: str, batch: int) -> float:
    """Return that of a target in FP8, whose draft is as it was."""
    count = SHAPES[name].rows
    rows = PassRows(batch, 1, CONTEXT)
    wide, narrow = (
        forward("verify", target, rows, count, count).seconds(device)
        for target, device in ((TARGET, H200), (replace(TARGET, weight_bytes=1.0), IN_FP8))
    )
    return now(results, name, batch) - 1000 * PRODUCTS * (wide - narrow)


def of_70b(results: Results, name: str, batch: int) -> float:
    """Return that of 70B in FP8 on two GPUs."""
    times = now(results, name, batch) / SHAPES[name].bound(batch)
    return times * LARGE_SHAPES[name].bound(batch) + 2 * LARGE.target.num_layers * SUM


#: By a label, what is estimated of some rows.
ESTIMATES = {
    "As it is now": (now, ON_MODEL, ON_HEAD, ON_DEEP_HEAD),
    "8B in FP8": (in_fp8, "AR", ON_HEAD, ON_DEEP_HEAD),
    "70B in FP8, two GPUs": (of_70b, "AR", ON_HEAD, ON_DEEP_HEAD),
}


def published(folder: Path = PUBLISHED) -> Results:
    """Return what `bench/gpu` measured of an H200, by a folder of results."""
    machines, _ = read_results(folder / "gpu" / "raw")
    stages = next(of for name, of in machines.items() if "H200" in name)
    return {**stages["speed"], **stages["more"]}


def is_complete(results: Results) -> bool:
    """Return whether all of the tables is measured or can be modelled."""
    shapes = (SHAPES | ON_REAL_TEXT).values()
    found = (milliseconds(results, shape, batch)[0] for shape in shapes for batch in BATCHES)
    return not any(map(math.isnan, found))


def tokens_by_name() -> dict[str, dict[str, float]]:
    """Return tokens a round by temperature, of the shipped pair and of the one on real text."""
    found = {"AR": dict.fromkeys(TEMPERATURES, 1.0)}
    for row in json.loads((PUBLISHED / "trees" / "trees.json").read_text())["rows"]:
        found[row["name"]] = {t: one["mean"] for t, one in row["tokens"].items()}
    for row in csv.DictReader((PUBLISHED / "real" / "real.csv").read_text().splitlines()):
        temperature = float(row["temperature"])
        tokens = float(row["tokens_per_pass_mean"])
        found.setdefault(row["label"], {})[f"{temperature:g}"] = tokens
    return found


def table(results: Results) -> str:
    """Return the tokens a second to expect, in parentheses the ms of a round, all measured."""
    return _rows(
        (name, name, shape, lambda shape, batch: milliseconds(results, shape, batch)[0])
        for name, shape in SHAPES.items()
        if _is_measured(results, shape)
    )


def modelled(results: Results) -> str:
    """Return the same of other ways to decode, whose ms are modelled."""
    rows = [
        (name, name, shape, lambda shape, batch: milliseconds(results, shape, batch)[0])
        for name, shape in SHAPES.items()
        if not _is_measured(results, shape)
    ]
    for label, (estimate, *names) in ESTIMATES.items():
        for name in names:
            by = partial(_estimated, results, estimate, name)
            rows.append((f"{label}: {name}", name, SHAPES[name], by))
    return _rows(rows)


def page(results: Results) -> str:
    """Return the page of both tables."""
    return PAGE.format(measured=table(results), modelled=modelled(results))


Milliseconds = Callable[[Shape, int], float]


def _estimated(
    results: Results,
    estimate: Callable[[Results, str, int], float],
    name: str,
    shape: Shape,
    batch: int,
) -> float:
    return estimate(results, name, batch)


def _is_measured(results: Results, shape: Shape) -> bool:
    return all(milliseconds(results, shape, batch)[1] for batch in BATCHES)


def _rows(rows: Iterable[tuple[str, str, Shape, Milliseconds]]) -> str:
    """Return a table of labels, ways to decode and the milliseconds of their rounds."""
    tokens = tokens_by_name()
    lines = []
    for label, name, shape, ms_of in rows:
        each = tokens[name][TEMPERATURE]
        cells = [cell(ms_of(shape, batch), each * batch) for batch in BATCHES]
        lines.append([label, f"{each:.2f}", *cells])
    users = (f"{batch} user{'s' * (batch > 1)}" for batch in BATCHES)
    return markdown_table(("", "tokens a round", *users), lines)


def cell(ms: float, tokens: float) -> str:
    """Return tokens a second and the milliseconds in which there are so many tokens."""
    return f"{1000 * tokens / ms:,.0f} ({ms:.1f})"


def for_one(results: Results) -> str:
    """Return the table for one request: tokens a round by temperature, ms, tokens a second."""
    tokens = tokens_by_name()
    rows = []
    for name, shape in (SHAPES | ON_REAL_TEXT).items():
        ms, is_measured = milliseconds(results, shape, 1)
        found = [f"{tokens[name][t]:.2f}" if t in tokens[name] else "" for t in TEMPERATURES]
        speed = f"{1000 * tokens[name][TEMPERATURE] / ms:.0f}"
        rows.append([name, *found, f"{ms:.2f}", speed if is_measured else f"*{speed}*"])
    headers = ("", *(f"T = {t}" for t in TEMPERATURES), "ms", f"tokens / s at {TEMPERATURE}")
    return f"## To expect of one request\n\n{NOTE}\n\n{markdown_table(headers, rows)}"
