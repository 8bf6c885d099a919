"""Format a plan: the models, a table, the best setting, and omissions of the bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_smc.kv.report import Table
from sglang_smc.options.server import SMCConfig
from sglang_smc.tools.commands import table
from sglang_smc.tools.plan.memory import STATIC_FRACTION, memory_table
from sglang_smc.tools.plan.proposals import DFLASH, NGRAM, Draft
from sglang_smc.tools.plan.roofline import LARGEST_BATCH, Estimate, Scenario
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
TEXTS = frozenset(("setting", "bound by"))


class Report(NamedTuple):
    """All that the table, the JSON and the plot show."""

    target: str
    draft: str
    scenario: Scenario
    batch: int
    acceptance: float
    kept: Mapping[int, float]
    sd: list[Estimate]
    smc: list[Estimate]
    best: Estimate  # of ``smc``

    @property
    def drafted(self) -> Draft:
        return Draft.of(self.scenario.draft)

    @property
    def ar(self) -> Estimate:
        return self.scenario.ar(self.batch)

    @property
    def estimates(self) -> list[Estimate]:
        return [self.ar, *self.sd, *self.smc]

    def at(self, estimate: Estimate, batch: int) -> Estimate:
        """Return the estimate at another batch, all else equal."""
        n, k = estimate.num_particles, estimate.num_steps
        if estimate.method == "AR":
            return self.scenario.ar(batch)
        if estimate.method == "SD":
            return self.scenario.sd(batch, k, self.acceptance)
        return self.scenario.smc(batch, n, k, self.kept.get(k))

    def plain_wins_from(self, estimate: Estimate) -> int | None:
        """Return the smallest batch at which AR is as fast; None for AR itself."""
        if estimate.method == "AR":
            return None
        return self.scenario.plain_wins_from(lambda batch: self.at(estimate, batch))

    def times_ar(self, estimate: Estimate) -> float:
        return estimate.tokens_per_second / self.ar.tokens_per_second

    @property
    def memory(self) -> float:
        """Return the bytes of weights, KV and hidden states with the most particles in the grid."""
        particles = max(estimate.num_particles for estimate in self.smc)
        steps = max(estimate.num_steps for estimate in self.smc)
        tokens = self.batch * (self.scenario.context + particles * self.scenario.tail)
        models = (self.scenario.target, self.drafted)
        kept = [model.resident_bytes + tokens * model.kv_bytes_per_token for model in models]
        return sum(kept) + self.batch * self.drafted.state_bytes(particles, steps)

    @property
    def table(self) -> Table | None:
        """Return the device's memory for requests with the best N and K, other settings default.

        None if the device's capacity is unknown, or no memory is left.
        """
        capacity = self.scenario.device.capacity
        if capacity is None:
            return None
        config = SMCConfig(num_particles=self.best.num_particles, num_steps=self.best.num_steps)
        return memory_table(self.scenario.target, self.drafted, capacity, config)

    @property
    def fits(self) -> bool:
        capacity = self.scenario.device.capacity
        return capacity is None or self.memory <= capacity


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report for ``--json``, in bytes, operations and seconds."""
    scenario, best, found = report.scenario, report.best, report.table
    proposal = {"proposal": report.drafted.kind, **sizes(report.drafted)}
    return {
        "target": {"name": report.target, **sizes(scenario.target)},
        "draft": {"name": report.draft, **proposal},
        "device": scenario.device._asdict(),
        "batch": report.batch,
        **lengths(scenario),
        "acceptance": report.acceptance,
        "memory_bytes": report.memory,
        "fits": report.fits,
        "memory": None if found is None else found.as_dict(),
        "largest_batch": LARGEST_BATCH,
        "settings": [_setting(report, one) for one in report.estimates],
        "best": {"num_particles": best.num_particles, "num_steps": best.num_steps},
        "notes": [LEFT_OUT, QUALITY],
    }


def sizes(shape: ModelShape | Draft) -> dict[str, Any]:
    """Return the sizes of a target or a draft, in bytes."""
    names = ("num_parameters", "weight_bytes", "streamed_bytes", "kv_bytes_per_token")
    return {name: getattr(shape, name) for name in names}


def lengths(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in ("context", "tail", "shared_prefix")}


def _setting(report: Report, one: Estimate) -> dict[str, Any]:
    return {
        "method": one.method,
        "num_particles": one.num_particles,
        "num_steps": one.num_steps,
        "tokens_per_round": one.tokens,
        "seconds": one.seconds,
        "seconds_by_pass": one.round.seconds_by_pass(one.device),
        "layers": one.round.layers,
        "bytes": one.round.bytes,
        "traffic": one.round.traffic,
        "flops": one.round.flops,
        "bound": one.bound,
        "tokens_per_second": one.tokens_per_second,
        "speedup": report.times_ar(one),
        "plain_wins_from": report.plain_wins_from(one),
    }


def as_text(report: Report) -> str:
    scenario, best = report.scenario, report.best
    device, target = scenario.device, scenario.target
    # At two operations per weight.
    rows = device.ridge * target.streamed_bytes / target.flops_per_token(0)
    cells = [_cells(report, estimate) for estimate in report.estimates]
    lines = [
        f"target  {report.target}: {model_line(target)}",
        f"draft   {draft_line(report.draft, report.drafted, best.num_particles, best.num_steps)}",
        f"device  {device.name}: {si(device.bandwidth)}B/s, {si(device.flops)}FLOP/s",
        f"load    batch {report.batch}, {length_line(scenario)}; SD accepts a draft at "
        f"{report.acceptance:g}",
        "",
        *table(cells, TEXTS),
        "",
        f"Best: {best.label}, at most {best.tokens_per_second:,.0f} tokens/s, "
        f"{report.times_ar(best):.2f} times AR. {_crossing(report)}",
        _of_round(best),
        f"A pass of the target is bound by memory up to about {rows:.0f} token rows: requests x N "
        "x (K + 1).",
        QUALITY,
        LEFT_OUT,
        *_memory_lines(report),
    ]
    return "\n".join(lines)


def _cells(report: Report, one: Estimate) -> dict[str, str]:
    wins = report.plain_wins_from(one)
    never = "" if one.method == "AR" else "never"
    return {
        "setting": one.label + (" *" if one is report.best else ""),
        "tokens a round": f"{one.tokens:.2f}",
        "ms a round": f"{one.seconds * 1e3:.3g}",
        "moved": si(one.round.bytes) + "B",
        "computed": si(one.round.flops) + "FLOP",
        "bound by": one.bound,
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "x AR": f"{report.times_ar(one):.2f}",
        "AR wins from batch": never if wins is None else str(wins),
    }


def _crossing(report: Report) -> str:
    batch = report.plain_wins_from(report.best)
    if batch is None:
        return f"AR never catches up, up to batch {LARGEST_BATCH}."
    return f"From batch {batch} on AR is as fast."


def _of_round(best: Estimate) -> str:
    draft, target, rest = (f"{seconds * 1e3:.3g} ms" for seconds in best.parts)
    return (
        f"Of its round the draft takes {draft}, the target {target}, and the rest, what a head "
        f"does with the target's columns, {rest}; {best.round.layers} layers run one after another."
    )


def _memory_lines(report: Report) -> list[str]:
    found, device, lines = report.table, report.scenario.device, []
    if found is not None:
        lines = [
            "",
            f"Memory for requests with {report.best.label}, if weights and KV get "
            f"{STATIC_FRACTION:.0%} of all (--mem-fraction-static), less 1.5 GB:",
            *(f"  {line}" for line in found.lines()),
            *([found.advice] if found.advice else []),
        ]
    if not report.fits:
        lines.append(
            f"It does not fit: weights and KV take {si(report.memory)}B, {device.name} has "
            f"{si(device.capacity or 0.0)}B. See --tp, --dtype, --batch."
        )
    return lines


def length_line(scenario: Scenario) -> str:
    shared = "read once a request" if scenario.shared_prefix else "read by each particle"
    return (
        f"{scenario.context:g} tokens of context ({shared}) and {scenario.tail:g} of each "
        "particle's own"
    )


def model_line(shape: ModelShape | Draft) -> str:
    return (
        f"{si(shape.num_parameters)} parameters, {si(shape.streamed_bytes)}B read a pass, "
        f"{si(shape.kv_bytes_per_token)}B of KV a token"
    )


def draft_line(name: str, draft: Draft, num_particles: int, num_steps: int) -> str:
    """Return the draft's kind, ``name`` and sizes, and its hidden states in a round of N and K."""
    line = f"{name} ({draft.kind}): "
    if draft.kind == NGRAM:
        line += "matches, found on the host in microseconds, which are left out; "
    if draft.weight_bytes is None:
        return line + "in modes that verify: exact, mixed and auto"
    line += model_line(draft)
    if draft.kind == DFLASH:
        line += "; a pass reads the target's LM head, too"
    if draft.is_head:
        kept = si(draft.state_bytes(num_particles, num_steps))
        line += f"; of the target's states {kept}B a request at N={num_particles} K={num_steps}"
    return line


def si(value: float) -> str:
    """Return the value with three digits and a decimal prefix, without its unit: ``15 G``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:  # values that round up to the factor
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
