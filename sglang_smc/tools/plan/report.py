"""Format a plan: the models, a table, the best setting, and omissions of the bound."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from sglang_smc.kv.report import Table
from sglang_smc.options.server import SMCConfig
from sglang_smc.tools.plan.heads import DFlash, Head
from sglang_smc.tools.plan.memory import STATIC_FRACTION, hidden_bytes, memory_table
from sglang_smc.tools.plan.proposals import Ngram, Proposal
from sglang_smc.tools.plan.roofline import LARGEST_BATCH, Estimate, Plan, RoundCost, Scenario
from sglang_smc.tools.plan.shapes import ModelShape

LEFT_OUT = (
    "These are upper bounds. Left out: launch gaps and waits between kernels, sampling, "
    "resampling, activations, communication between devices. Published engines reach 50 to 70 % "
    "of the bound with AR and about 35 % with SMC, whose passes are shorter, at batch 1: expect "
    "AR to win earlier than said here."
)
QUALITY = (
    "N and K change the quality of the output, which no roofline sees: with all drafts kept, "
    "fewer particles and longer blocks are the faster ones. Choose for the quality first "
    "(--min-particles, --steps, --kept)."
)
COLUMNS = (
    "setting",
    "tokens a round",
    "ms a round",
    "moved",
    "computed",
    "bound by",
    "tokens/s",
    "x AR",
    "AR wins from batch",
)


TEXTS = frozenset(("setting", "bound by"))


class Report(NamedTuple):
    """All that the table, the JSON and the plot show."""

    target: str
    draft: str
    scenario: Scenario
    batch: int
    acceptance: float
    kept: dict[int, float]
    ar: Estimate
    sd: list[Estimate]
    plan: Plan

    def at(self, estimate: Estimate, batch: int) -> Estimate:
        """Return the estimate at another batch, all else equal."""
        if estimate.method == "AR":
            return self.scenario.ar(batch)
        k = estimate.num_steps
        if estimate.method == "SD":
            return self.scenario.sd(batch, k, self.acceptance)
        return self.scenario.smc(batch, estimate.num_particles, k, self.kept.get(k))

    def plain_wins_from(self, estimate: Estimate) -> int | None:
        return self.scenario.plain_wins_from(lambda batch: self.at(estimate, batch))

    @property
    def best_sd(self) -> Estimate:
        return max(self.sd, key=lambda estimate: estimate.tokens_per_second)

    @property
    def memory(self) -> float:
        """Return the bytes of weights, KV and hidden states with the most particles in the grid."""
        models = (self.scenario.target, self.scenario.draft)
        particles = max(estimate.num_particles for estimate in self.plan.grid)
        steps = max(estimate.num_steps for estimate in self.plan.grid)
        tokens = self.batch * (self.scenario.context + particles * self.scenario.tail)
        states = self.batch * hidden_bytes(self.scenario.draft, particles, steps)
        kept = [model.resident_bytes + tokens * model.kv_bytes_per_token for model in models]
        return sum(kept) + states

    @property
    def table(self) -> Table | None:
        """Return the device's memory for requests with the best N and K, other settings default.

        None if the device's capacity is unknown, or no memory is left.
        """
        best, scenario = self.plan.best, self.scenario
        if scenario.device.capacity is None:
            return None
        config = SMCConfig(num_particles=best.num_particles, num_steps=best.num_steps)
        return memory_table(scenario.target, scenario.draft, scenario.device.capacity, config)

    @property
    def fits(self) -> bool:
        capacity = self.scenario.device.capacity
        return capacity is None or self.memory <= capacity


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report for ``--json``, in bytes, operations and seconds."""
    scenario, best = report.scenario, report.plan.best
    return {
        "target": {"name": report.target, **sizes(scenario.target)},
        "draft": {"name": report.draft, "proposal": scenario.draft.kind, **sizes(scenario.draft)},
        "device": scenario.device._asdict(),
        "batch": report.batch,
        "context": scenario.context,
        "tail": scenario.tail,
        "shared_prefix": scenario.shared_prefix,
        "acceptance": report.acceptance,
        "memory_bytes": report.memory,
        "fits": report.fits,
        "memory": None if report.table is None else report.table.as_dict(),
        "largest_batch": LARGEST_BATCH,
        "settings": [_setting(report, one) for one in (report.ar, *report.sd, *report.plan.grid)],
        "best": {"num_particles": best.num_particles, "num_steps": best.num_steps},
        "notes": [LEFT_OUT, QUALITY],
    }


def sizes(shape: Proposal) -> dict[str, Any]:
    """Return the sizes of a target or a draft, in bytes."""
    return {
        "num_parameters": shape.num_parameters,
        "weight_bytes": shape.weight_bytes,
        "streamed_bytes": shape.streamed_bytes,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
    }


def _setting(report: Report, estimate: Estimate) -> dict[str, Any]:
    plain = estimate.method == "AR"
    return {
        "method": estimate.method,
        "num_particles": estimate.num_particles,
        "num_steps": estimate.num_steps,
        "tokens_per_round": estimate.tokens,
        "seconds": estimate.seconds,
        "seconds_by_pass": {
            name: part.seconds(estimate.device) for name, part in estimate.round.parts.items()
        },
        "layers": estimate.round.layers,
        "bytes": estimate.round.bytes,
        "traffic": estimate.round.traffic,
        "flops": estimate.round.flops,
        "bound": estimate.bound,
        "tokens_per_second": estimate.tokens_per_second,
        "speedup": estimate.tokens_per_second / report.ar.tokens_per_second,
        "plain_wins_from": None if plain else report.plain_wins_from(estimate),
    }


def as_text(report: Report) -> str:
    scenario, best = report.scenario, report.plan.best
    shared = "read once a request" if scenario.shared_prefix else "read by each particle"
    lines = [
        f"target  {report.target}: {model_line(scenario.target)}",
        f"draft   {draft_line(report.draft, scenario.draft, best.num_particles, best.num_steps)}",
        f"device  {_device_line(report)}",
        f"load    batch {report.batch}, {scenario.context:g} tokens of context ({shared}) and "
        f"{scenario.tail:g} of each particle's own; SD accepts a draft at {report.acceptance:g}",
        "",
        *table([COLUMNS, *_cells(report)], TEXTS),
        "",
        f"Best: {best.label}, at most {best.tokens_per_second:,.0f} tokens/s, "
        f"{best.tokens_per_second / report.ar.tokens_per_second:.2f} times AR. {_crossing(report)}",
        _of_round(best),
        f"A pass of the target is bound by memory up to about {_ridge_rows(scenario):.0f} token "
        "rows: requests x N x (K + 1).",
        QUALITY,
        LEFT_OUT,
    ]
    lines += _memory_lines(report.table, best)
    if not report.fits:
        lines.append(_too_large(report))
    return "\n".join(lines)


def _memory_lines(table: Table | None, best: Estimate) -> list[str]:
    if table is None:
        return []
    advice = [table.advice] if table.advice else []
    heading = (
        f"Memory for requests with {best.label}, if weights and KV get "
        f"{STATIC_FRACTION:.0%} of all (--mem-fraction-static), less 1.5 GB:"
    )
    return ["", heading, *(f"  {line}" for line in table.lines()), *advice]


def _of_round(best: Estimate) -> str:
    cost = RoundCost.of(best.round, best.device, best.batch, best.num_steps)
    draft, target, rest = (seconds * 1e3 for seconds in (cost.draft, cost.target, cost.rest))
    return (
        f"Of its round the draft takes {draft:.3g} ms, the target {target:.3g} ms, and the rest, "
        f"what a head does with the target's columns, {rest:.3g} ms; {cost.layers} layers run one "
        "after another."
    )


def model_line(shape: ModelShape | Head) -> str:
    return (
        f"{si(shape.num_parameters)} parameters, {si(shape.streamed_bytes)}B read a pass, "
        f"{si(shape.kv_bytes_per_token)}B of KV a token"
    )


def draft_line(name: str, draft: Proposal, num_particles: int, num_steps: int) -> str:
    """Return the draft's kind, ``name`` and sizes, and its hidden states in a round of N and K."""
    heading = f"{name} ({draft.kind})"
    if isinstance(draft, Ngram):
        found = "matches, found on the host in microseconds, which are left out; "
        alone = "in modes that verify: exact, mixed and auto"
        return f"{heading}: {found}" + (model_line(draft.model) if draft.model else alone)
    line = f"{heading}: {model_line(draft)}"
    if isinstance(draft, DFlash):
        line += "; a pass reads the target's LM head, too"
    if isinstance(draft, Head):
        kept = si(hidden_bytes(draft, num_particles, num_steps))
        line += f"; of the target's states {kept}B a request at N={num_particles} K={num_steps}"
    return line


def si(value: float) -> str:
    """Return the value with three digits and a decimal prefix, without its unit: ``15 G``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:  # values that round up to the factor
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def _device_line(report: Report) -> str:
    device = report.scenario.device
    return f"{device.name}: {si(device.bandwidth)}B/s, {si(device.flops)}FLOP/s"


def _ridge_rows(scenario: Scenario) -> float:
    """Return the rows above which a pass is compute-bound, at two operations per weight."""
    device, target = scenario.device, scenario.target
    rows = device.ridge * target.streamed_bytes
    return rows / target.flops_per_token(0)


def _crossing(report: Report) -> str:
    batch = report.plan.plain_wins_from
    if batch is None:
        return f"AR never catches up, up to batch {LARGEST_BATCH}."
    return f"From batch {batch} on AR is as fast."


def _too_large(report: Report) -> str:
    capacity = report.scenario.device.capacity or 0.0
    return (
        f"It does not fit: weights and KV take {si(report.memory)}B, "
        f"{report.scenario.device.name} has {si(capacity)}B. See --tp, --dtype, --batch."
    )


def _cells(report: Report) -> Iterator[tuple[str, ...]]:
    for estimate in (report.ar, *report.sd, *report.plan.grid):
        wins = None if estimate.method == "AR" else report.plain_wins_from(estimate)
        never = "" if estimate.method == "AR" else "never"
        yield (
            estimate.label + (" *" if estimate is report.plan.best else ""),
            f"{estimate.tokens:.2f}",
            f"{estimate.seconds * 1e3:.3g}",
            si(estimate.round.bytes) + "B",
            si(estimate.round.flops) + "FLOP",
            estimate.bound,
            f"{estimate.tokens_per_second:,.0f}",
            f"{estimate.tokens_per_second / report.ar.tokens_per_second:.2f}",
            never if wins is None else str(wins),
        )


def table(rows: list[tuple[str, ...]], texts: Collection[str]) -> list[str]:
    """Return lines: headings, a rule, and the rows. Columns in ``texts`` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {place for place, heading in enumerate(rows[0]) if heading in texts}
    lines = []
    for row in [rows[0], tuple("-" * width for width in widths), *rows[1:]]:
        cells = (
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines
