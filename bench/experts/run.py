"""Measure how many experts of a mixture the nodes of drafted trees visit, beside uniform routing.

    .venv/bin/python bench/experts               # minutes: both models are trained first

No package ships a mixture of experts, so a tiny one of Qwen3-MoE's class is trained here, with the
usual load-balancing loss, on Python's standard library, and a dense draft beside it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import study
from intervals import Interval, ratio
from results import Report, interval_cell, table

from sglang_smc.options.request import Budget
from sglang_smc_tools.plan.experts import Experts

BUDGETS = Budget(1, 4), Budget(2, 8), Budget(4, 8), Budget(8, 8)
USERS = (1, 4)
TEMPERATURE = 0.7
NUM_TREES = 160
CONTEXT = 128
SEED = 0


@dataclass(frozen=True, kw_only=True)
class ExpertsRow:
    """Means over rounds and layers."""

    target: str
    users: int
    num_particles: int
    num_steps: int
    nodes: float  # distinct ones of a round
    experts: float  # of a layer, visited by them
    to_uniform: Interval  # over those that as many nodes visit with uniform routing
    unrelated_to_uniform: Interval  # likewise, of as many tokens from anywhere in the texts
    overlap: float  # for `sglang-smc plan --expert-overlap`


class VisitedTree(NamedTuple):
    """Experts that the distinct nodes of a drafted tree visit, and as many unrelated tokens."""

    of_nodes: np.ndarray  # [nodes, layers, experts] bool
    of_unrelated: np.ndarray  # the same shape


class Routing(NamedTuple):
    """What a target does on text that it has not seen."""

    found: Mapping[Budget, Sequence[VisitedTree]]
    nats: float  # loss a token
    busiest: float  # share of visits that the busiest quarter of a layer's experts has


# --- Trees


def trees(target: Any, draft: Any, tokens: Any, budget: Budget) -> list[VisitedTree]:
    """Return trees of N chains of K tokens, each after a piece of a text ``[T]``."""
    import torch
    from experts.models import chains, some_pieces, visits

    torch.manual_seed(SEED)
    pieces = some_pieces(tokens, NUM_TREES, CONTEXT, torch.Generator().manual_seed(SEED))
    anywhere = visits(target, pieces)[:, -1]  # [trees, layers, experts]
    draw = np.random.default_rng(SEED)
    num_chains, num_steps = budget
    found = []
    for piece in pieces:
        drafted = chains(draft, piece, num_chains, num_steps, TEMPERATURE)
        read = torch.cat([piece.expand(len(drafted), -1), drafted], 1)
        visited = visits(target, read)[:, CONTEXT - 1 :]  # [N, K + 1, layers, experts]
        rows, columns = zip(*distinct_nodes(drafted.tolist()), strict=True)
        others = draw.choice(anywhere, len(rows), replace=False)
        found.append(VisitedTree(visited[rows, columns], others))
    return found


def distinct_nodes(chains: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return a chain and a number of its tokens for each of their distinct prefixes."""
    first: dict[tuple[int, ...], tuple[int, int]] = {}
    for row, chain in enumerate(chains):
        for length in range(len(chain) + 1):
            first.setdefault(tuple(chain[:length]), (row, length))
    return list(first.values())


# --- Rows


def row_of(
    target: str, shape: Experts, budget: Budget, users: int, found: Sequence[VisitedTree]
) -> ExpertsRow:
    """Return the row of rounds of so many users: trees are joined in their order."""
    rounds = [found[start : start + users] for start in range(0, len(found), users)]
    nodes = np.array([sum(len(tree.of_nodes) for tree in one) for one in rounds])
    own = np.array([_distinct([tree.of_nodes for tree in one]) for one in rounds])
    others = np.array([_distinct([tree.of_unrelated for tree in one]) for one in rounds])
    uniform = np.array([shape.visited(count) for count in nodes])
    num_rows = users * budget.num_particles * (budget.num_steps + 1)
    return ExpertsRow(
        target=target,
        users=users,
        num_particles=budget.num_particles,
        num_steps=budget.num_steps,
        nodes=float(nodes.mean()),
        experts=float(own.mean()),
        to_uniform=ratio(own, uniform),
        unrelated_to_uniform=ratio(others, uniform),
        overlap=overlap_of(shape, num_rows, float(own.mean())),
    )


def _distinct(visits: Sequence[np.ndarray]) -> float:
    """Return the distinct experts that all tokens visit, in the mean of layers."""
    return float(np.concatenate(visits).any(0).sum(-1).mean())


def overlap_of(shape: Experts, num_rows: int, visited: float) -> float:
    """Return the overlap with which the planner's pass of so many rows visits these experts."""
    apart = math.log(1 - visited / shape.count) / math.log(1 - shape.per_token / shape.count)
    return 1 - (apart - 1) / (num_rows - 1)


def busiest(found: Sequence[VisitedTree]) -> float:
    """Return the share of visits that the busiest quarter of a layer's experts has."""
    loads = np.concatenate([tree.of_unrelated for tree in found]).sum(0)  # [layers, experts]
    most = np.sort(loads)[:, -loads.shape[1] // 4 :]
    return float((most.sum(1) / loads.sum(1)).mean())


# --- The report


def markdown(rows: Sequence[ExpertsRow], note: str) -> str:
    """Return a page with a table below a note."""
    columns = {
        "target, users": lambda row: f"{row.target}, {row.users}",
        "N x K": lambda row: f"{row.num_particles} x {row.num_steps}",
        "rows": lambda row: f"{row.users * row.num_particles * (row.num_steps + 1)}",
        "nodes": lambda row: f"{row.nodes:.1f}",
        "experts a layer": lambda row: f"{row.experts:.1f}",
        "over uniform": lambda row: interval_cell(row.to_uniform, ".3f"),
        "unrelated tokens": lambda row: interval_cell(row.unrelated_to_uniform, ".3f"),
        "--expert-overlap": lambda row: f"{row.overlap:.2f}",
    }
    return f"# Experts that drafted trees visit\n\n{note}\n\n{table(columns, rows)}\n"


def note(origin: Mapping[str, Any]) -> str:
    """Return what the table stands on."""
    told = origin["settings"]
    shape = told["mixture"]
    loss = ", ".join(f"{name} {nats:.2f}" for name, nats in told["nats_a_token"].items())
    busy = ", ".join(f"{name} {share:.0%}" for name, share in told["busiest_quarter"].items())
    return (
        f"The target is a Qwen3-MoE of {shape['num_hidden_layers']} layers, "
        f"{shape['num_experts']} experts, {shape['num_experts_per_tok']} a token, trained for "
        f"{told['steps']} steps on Python's standard library with the load-balancing loss of "
        f"weight {told['balance']:g}: **a tiny one, since no package ships a real "
        f"mixture**. The draft is dense. Loss a token on files held out, in nats: {loss}. The "
        f"busiest quarter of a layer's experts has so much of its visits: {busy}. After each of "
        f"{NUM_TREES} texts a tree is drafted at T = {TEMPERATURE}; *nodes* are the distinct ones "
        "of a round. *Over uniform* divides the experts that they visit by those of as many nodes "
        "with uniform routing, *unrelated tokens* does so for as many tokens of different texts. "
        "*--expert-overlap* makes `sglang-smc plan`, which counts rows, find the measured experts. "
        f"In brackets 95 % intervals, over rounds. `bench/experts`, {origin['date'][:10]}, commit "
        f"{origin['git_sha']}."
    )


REPORT = Report("experts", ExpertsRow, markdown)


def run(options: argparse.Namespace) -> None:
    """Train both models, measure, and write the report."""
    from experts import models

    study.prepare_folder(options.output_dir)
    texts = models.texts()
    draft = models.dense()
    models.train(draft, texts.train, options.steps, "the draft")
    target = models.mixture()
    measured = {"random weights": measure(target, draft, texts.held_out)}
    models.train(target, texts.train, options.steps, "the target")
    measured["trained"] = measure(target, draft, texts.held_out)
    shape = models.experts()
    rows = [row for name, one in measured.items() for row in rows_of(name, shape, one.found)]
    settings = {
        "steps": options.steps,
        "tokens": len(texts.train),
        "balance": models.BALANCE,
        "mixture": models.SHAPE | models.MIXTURE,
        "draft": models.DENSE,
        "nats_a_token": {"the draft": models.nats(draft, texts.held_out)}
        | {name: one.nats for name, one in measured.items()},
        "busiest_quarter": {name: one.busiest for name, one in measured.items()},
    }
    print(REPORT.write(options.output_dir, rows, settings, note))
    if options.publish:
        REPORT.publish(options.output_dir, study.PUBLISHED / "experts")


def measure(target: Any, draft: Any, tokens: Any) -> Routing:
    """Return what a target's experts do on a text ``[T]``."""
    from experts.models import nats

    found = {of: trees(target, draft, tokens, of) for of in BUDGETS}
    return Routing(found, nats(target, tokens), busiest(found[BUDGETS[-1]]))


def rows_of(
    target: str, shape: Experts, found: Mapping[Budget, Sequence[VisitedTree]]
) -> Iterator[ExpertsRow]:
    """Yield a row for each number of users, N and K."""
    for users, (budget, drafted) in product(USERS, found.items()):
        yield row_of(target, shape, budget, users, drafted)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return exit status 0 if it completes."""
    made = study.parser("experts", "Measure which experts the nodes of drafted trees visit.")
    add = made.add_argument
    add("--steps", type=study.positive, default=300, help="of training, of 2,048 tokens")
    add("--publish", action="store_true", help="also copy to bench/results")
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options), "")
