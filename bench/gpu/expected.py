"""Compute the tokens a second to expect on an H200: tokens a round over milliseconds a round.

Tokens are those of `bench/results/trees` at temperature 0.7. Milliseconds are measured, or else
modelled: SMC's measured rounds of N = K = 8 take so many times the planner's bound, by rows of the
target's pass. Other N and K take as many times their own; SGLang's other trees as many times what
their bound is above that of the tree that was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from gpu.engines import SHORT, SPEED_8B, K, N
from results import markdown_table
from speed import grid
from speed.report import Results
from study import PUBLISHED

from sglang_smc.options.request import Budget, budgets
from sglang_smc.tools.plan.devices import named
from sglang_smc.tools.plan.roofline import Round, Rows, ar_step, forward, smc_round
from sglang_smc.tools.plan.shapes import DRAFTS

TEMPERATURE = "0.7"
TARGET, MODEL, HEAD = SPEED_8B.pair.target, SPEED_8B.pair.draft, DRAFTS["eagle3-8b"]
CONTEXT = SHORT[0][1] + SPEED_8B.new_tokens / 2
BATCHES = [batch for batch, _ in SHORT]
H200 = named("h200")


class Shape(NamedTuple):
    """A way to decode, the rows of its target pass for a request, and the bound of its round."""

    system: grid.System | None  # as `bench/gpu` measures it
    rows: int
    bound: Callable[[int], float]  # ms, of a batch
    is_tree_of: str = ""  # the family of SGLang's that was measured


def ours(family: str, n: int, k: int) -> Shape:
    draft = HEAD if family == grid.EXACT_HEAD else MODEL

    def bound(batch: int) -> float:
        return 1000 * smc_round(TARGET, draft, batch, n, k, CONTEXT).seconds(H200)

    return Shape(grid.System(family, n, k), n * (k + 1), bound)


def tree(family: str, passes: int, width: int, rows: int, system: bool = False) -> Shape:
    """Return SGLang's tree: passes of the draft over ``width`` rows, and ``rows`` to verify."""
    draft = HEAD if family == grid.EAGLE else MODEL

    def bound(batch: int) -> float:
        one, wide = (Rows(batch, n, CONTEXT, 0.0, shared_prefix=True) for n in (1, width))
        drafts = [forward("draft", draft, wide, 1, 1)] * passes
        found = Round((*drafts, forward("verify", TARGET, one, rows, rows)))
        return 1000 * found.seconds(H200)

    return Shape(grid.System(family) if system else None, rows, bound, family)


#: By the names in `bench/results/trees`; SGLang's trees are steps / top-k / rows.
SHAPES = {
    "AR": Shape(grid.PLAIN, 1, lambda batch: 1000 * ar_step(TARGET, batch, CONTEXT).seconds(H200)),
    "SGLang, EAGLE-3 head, tree 4 / 5 / 8": tree(grid.EAGLE, 5, 4, 8, system=True),
    "SGLang, EAGLE-3 head, tree 10 / 8 / 72": tree(grid.EAGLE, 8, 10, 72),
    "SGLang, draft model, tree 8 / 8 / 72": tree(grid.CHAIN, 8, 8, 72),
    "`exact`, draft model, N = 8, K = 8": ours(grid.EXACT, N, K),
    "`exact`, EAGLE-3 head, N = 8, K = 8": ours(grid.EXACT_HEAD, N, K),
    "`exact`, EAGLE-3 head, N = 4, K = 17": ours(grid.EXACT_HEAD, 4, 17),
}
#: The tree of SGLang's that was measured, and SMC with the same draft.
LIKE = {
    grid.EAGLE: (tree(grid.EAGLE, 5, 4, 8, system=True), grid.EXACT_HEAD),
    grid.CHAIN: (tree(grid.CHAIN, 5, 1, 5, system=True), grid.EXACT),
}


def measured(results: Results, shape: Shape, batch: int) -> float | None:
    """Return the ms of a round, None where it was not measured."""
    cell = shape.system and grid.Cell(shape.system, batch, SHORT[0][1])
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


def tokens_by_name() -> dict[str, float]:
    rows = json.loads((PUBLISHED / "trees" / "trees.json").read_text())["rows"]
    return {row["name"]: row["tokens"][TEMPERATURE]["mean"] for row in rows}


def chances(tokens: Mapping[str, float]) -> dict[int, float]:
    """Return by N the chance that a head's token is kept, of tokens 1 + sum of its powers."""
    some, found = np.linspace(0.0, 0.999, 10_000), {}
    for n, k in ((1, 8), (4, 17)):
        curve = (1 - some ** (k + 1)) / (1 - some)
        found[n] = np.interp(tokens[f"`exact`, EAGLE-3 head, N = {n}, K = {k}"], curve, some)
    return found | {2: 1 - math.sqrt((1 - found[1]) * (1 - found[4]))}


def best(results: Results, tokens: Mapping[str, float], batch: int) -> tuple[float, float, Budget]:
    """Return tokens a second and ms of the best N and K that a server of (4, 16) may adapt to."""
    kept, found = chances(tokens), []
    for budget in (one for one in budgets(Budget(4, 16)) if one.num_steps):
        ms, _ = milliseconds(results, ours(grid.EXACT_HEAD, *budget), batch)
        chance = kept[budget.num_particles]
        each = (1 - chance ** (budget.num_steps + 1)) / (1 - chance)
        found.append((1000 * batch * each / ms, ms, budget))
    return max(found)


def lines(results: Results) -> Iterator[list[str]]:
    """Yield the cells of each row."""
    tokens = tokens_by_name()
    for name, shape in SHAPES.items():
        each, cells = tokens.get(name, 1.0), []
        for batch in BATCHES:
            ms, is_measured = milliseconds(results, shape, batch)
            text = f"{1000 * batch * each / ms:,.0f} ({ms:.1f})"
            cells.append(text if is_measured else f"*{text}*")
        yield [name, f"{each:.2f}", *cells]
    adapted = [best(results, tokens, batch) for batch in BATCHES]
    shown = [f"*{speed:,.0f} ({ms:.1f}; {n}, {k})*" for speed, ms, (n, k) in adapted]
    yield ["`exact`, EAGLE-3 head, adaptive from (4, 16)", "", *shown]


def table(results: Results) -> str:
    """Return the table: tokens a second, in parentheses ms a round; modelled ones in italics."""
    return markdown_table(("", "tokens a round", *map(str, BATCHES)), list(lines(results)))
