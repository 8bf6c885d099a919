"""Format a plan for one draft, or a comparison of several, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_smc.kv.report import Table
from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.commands import table
from sglang_smc_tools.plan.memory import STATIC_FRACTION, memory_table
from sglang_smc_tools.plan.roofline import LARGEST_BATCH, Scenario
from sglang_smc_tools.plan.shapes import DFLASH, NGRAM, ModelShape

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
PARTS = (
    "A round's time is the draft's, the target's, and the rest: what a head does with the target's "
    "columns. Layers run one after another, each with launches that no bound counts: the more of "
    "them, the farther a round is from its bound. AR is plain decoding of the same batch."
)
TEXTS = frozenset(("setting", "bound by", "device", "draft"))


class Plan(NamedTuple):
    """Plain decoding, speculative decoding and SMC with one draft, at one batch."""

    target: str
    draft: str
    acceptance: float
    settings: list[Scenario]
    best: Scenario  # of SMC

    @property
    def memory(self) -> float:
        """Return the bytes of weights, KV and hidden states with the most particles in the grid."""
        best = self.best
        particles = max(each.num_particles for each in self.settings)
        steps = max(each.num_steps for each in self.settings if each.method == "SMC")
        tokens = best.batch * (best.context + particles * best.tail)
        models = (best.target, best.draft)
        kept = [model.resident_bytes + tokens * model.kv_bytes_per_token for model in models]
        return sum(kept) + best.batch * best.draft.hidden_state_bytes(particles, steps)

    @property
    def fits(self) -> bool:
        capacity = self.best.device.capacity
        return capacity is None or self.memory <= capacity

    @property
    def table(self) -> Table | None:
        """Return the device's memory for requests with the best N and K, other settings default.

        None if the device's capacity is unknown, or no memory is left.
        """
        best = self.best
        if best.device.capacity is None:
            return None
        config = SMCConfig(num_particles=best.num_particles, num_steps=best.num_steps)
        return memory_table(best.target, best.draft, best.device.capacity, config)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for ``--json``, in bytes, operations and seconds."""
        best = self.best
        found = self.table
        draft = {"proposal": best.draft.kind, **_sizes(best.draft)}
        return {
            "target": {"name": self.target, **_sizes(best.target)},
            "draft": {"name": self.draft, **draft},
            "device": best.device._asdict(),
            "batch": best.batch,
            **_lengths(best),
            "acceptance": self.acceptance,
            "memory_bytes": self.memory,
            "fits": self.fits,
            "memory": None if found is None else found.as_dict(),
            "largest_batch": LARGEST_BATCH,
            "settings": [_setting(one) for one in self.settings],
            "best": {"num_particles": best.num_particles, "num_steps": best.num_steps},
            "notes": [LEFT_OUT, QUALITY],
        }

    def as_text(self) -> str:
        best = self.best
        device = self.best.device
        target = self.best.target
        # At two operations per weight.
        flops = 2 * (target.active_parameters + target.head_parameters)
        rows = device.ridge * target.streamed_bytes / flops
        wins = best.plain_wins_from
        crossing = f"From batch {wins} on AR is as fast."
        if wins is None:
            crossing = f"AR never catches up, up to batch {LARGEST_BATCH}."
        draft, verify, rest = (f"{seconds * 1e3:.3g} ms" for seconds in best.parts)
        lines = [
            *_models(self.target, {self.draft: best.draft}, best),
            f"device  {device.name}: {si(device.bandwidth)}B/s, {si(device.flops)}FLOP/s",
            f"load    batch {best.batch}, {_length_line(best)}; SD accepts a draft at "
            f"{self.acceptance:g}",
            "",
            *table([self._cells(one) for one in self.settings], TEXTS),
            "",
            f"Best: {best.label}, at most {best.tokens_per_second:,.0f} tokens/s, "
            f"{best.times_ar:.2f} times AR. {crossing}",
            f"Of its round the draft takes {draft}, the target {verify}, and the rest, what a head "
            f"does with the target's columns, {rest}; {best.round.layers} layers run one after "
            "another.",
            f"A pass of the target is bound by memory up to about {rows:.0f} token rows: requests "
            "x N x (K + 1).",
            QUALITY,
            LEFT_OUT,
        ]
        if (found := self.table) is not None:
            lines += [
                "",
                f"Memory for requests with {best.label}, if weights and KV get "
                f"{STATIC_FRACTION:.0%} of all (--mem-fraction-static), less 1.5 GB:",
                *(f"  {line}" for line in found.lines()),
                *([found.advice] if found.advice else []),
            ]
        if not self.fits:
            lines.append(
                f"It does not fit: weights and KV take {si(self.memory)}B, {device.name} has "
                f"{si(device.capacity or 0.0)}B. See --tp, --dtype, --batch."
            )
        return "\n".join(lines)

    def _cells(self, one: Scenario) -> dict[str, str]:
        never = "" if one.method == "AR" else "never"
        return {
            "setting": one.label + (" *" if one is self.best else ""),
            "tokens a round": f"{one.tokens:.2f}",
            "ms a round": f"{one.seconds * 1e3:.3g}",
            "moved": si(one.round.bytes) + "B",
            "computed": si(one.round.flops) + "FLOP",
            "bound by": one.round.bound(one.device),
            **({} if one.experts is None else {"experts a layer": f"{one.experts:.0f}"}),
            "tokens/s": f"{one.tokens_per_second:,.0f}",
            "x AR": f"{one.times_ar:.2f}",
            "AR wins from batch": str(one.plain_wins_from or never),
        }


def _setting(one: Scenario) -> dict[str, Any]:
    same = ("method", "num_particles", "num_steps", "seconds", "tokens_per_second")
    of_round = ("layers", "bytes", "traffic", "flops")
    return {
        **{name: getattr(one, name) for name in (*same, "plain_wins_from")},
        **{name: getattr(one.round, name) for name in of_round},
        "tokens_per_round": one.tokens,
        "seconds_by_pass": one.round.seconds_by_pass(one.device),
        "bound": one.round.bound(one.device),
        "experts_visited": one.experts,
        "speedup": one.times_ar,
    }


class Comparison(NamedTuple):
    """Rounds of several drafts, and their speed at measured tokens per pass."""

    target: str
    drafts: Mapping[str, ModelShape]
    tokens: tuple[float, ...]  # per pass of the target
    rows: list[tuple[str, Scenario]]  # a draft's name, and a round of it

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for ``--json``, in bytes and seconds."""
        load = self.rows[0][1]
        return {
            "target": {"name": self.target, **_sizes(load.target)},
            "drafts": [{"name": name, **_sizes(draft)} for name, draft in self.drafts.items()],
            **_lengths(load),
            "rows": [self._row(*row) for row in self.rows],
            "notes": [PARTS, LEFT_OUT],
        }

    def _row(self, draft: str, one: Scenario) -> dict[str, Any]:
        same = ("batch", "num_particles", "num_steps", "seconds")
        parts = ("draft_seconds", "target_seconds", "rest_seconds")
        speeds = {f"{each:g}": one.measured(each).tokens_per_second for each in self.tokens}
        return {
            "device": one.device.name,
            "draft": draft,
            **{name: getattr(one, name) for name in same},
            **dict(zip(parts, one.parts, strict=True)),
            "layers": one.round.layers,
            "experts_visited": one.experts,
            "tokens_per_second": speeds,
            "ar_tokens_per_second": one.ar(one.batch).tokens_per_second,
        }

    def as_text(self) -> str:
        scenarios = [one for _, one in self.rows]
        largest = max(scenarios, key=lambda one: one.num_particles * (one.num_steps + 1))
        lines = [
            *_models(self.target, self.drafts, largest),
            f"load    {_length_line(largest)}",
            "",
            *table([self._cells(self._row(*row)) for row in self.rows], TEXTS),
            "",
        ]
        return "\n".join([*lines, PARTS, LEFT_OUT])

    def _cells(self, row: Mapping[str, Any]) -> dict[str, str]:
        times = {"draft ms": "draft_seconds", "target ms": "target_seconds"}
        times |= {"rest ms": "rest_seconds", "ms a round": "seconds"}
        speeds = row["tokens_per_second"].items()
        visited = row["experts_visited"]
        return {
            "device": row["device"],
            "batch": str(row["batch"]),
            "setting": f"N={row['num_particles']} K={row['num_steps']}",
            "draft": row["draft"],
            **{name: f"{1e3 * row[key]:.3g}" for name, key in times.items()},
            "layers": str(row["layers"]),
            **({} if visited is None else {"experts a layer": f"{visited:.0f}"}),
            "AR tokens/s": f"{row['ar_tokens_per_second']:,.0f}",
            **{f"tokens/s at {tokens}": f"{speed:,.0f}" for tokens, speed in speeds},
        }


# --- Sizes


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """Return the sizes of a target or a draft, in bytes; without layers a weight has none."""
    return {
        "num_parameters": shape.num_parameters,
        "weight_bytes": shape.weight_bytes if shape.num_layers else None,
        "streamed_bytes": shape.streamed_bytes,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
    }


def _lengths(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in ("context", "tail", "shared_prefix")}


def _length_line(scenario: Scenario) -> str:
    shared = "read once a request" if scenario.shared_prefix else "read by each particle"
    return (
        f"{scenario.context:g} tokens of context ({shared}) and {scenario.tail:g} of each "
        "particle's own"
    )


def _models(target: str, drafts: Mapping[str, ModelShape], largest: Scenario) -> list[str]:
    """Return the sizes of target and drafts, and their hidden states in the ``largest`` round."""
    lines = [f"target  {target}: {_model_line(largest.target)}"]
    for name, draft in drafts.items():
        line = f"draft   {name} ({draft.kind}): "
        if draft.kind == NGRAM:
            line += (
                "matches, found on the host in microseconds, which are left out; where drafts are "
                "verified: exact, auto, or proposal 'verified'"
            )
        else:
            line += _model_line(draft)
        if draft.kind == DFLASH:
            line += "; a pass reads the target's LM head, too"
        if draft.is_head:
            n = largest.num_particles
            k = largest.num_steps
            kept = si(draft.hidden_state_bytes(n, k))
            line += f"; of the target's states {kept}B a request at N={n} K={k}"
        lines.append(line)
    return lines


def _model_line(shape: ModelShape) -> str:
    return (
        f"{si(shape.num_parameters)} parameters, {si(shape.streamed_bytes)}B read a pass, "
        f"{si(shape.kv_bytes_per_token)}B of KV a token"
    )


def si(value: float) -> str:
    """Return the value with three digits and a decimal prefix, without its unit: ``15 G``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:  # values that round up to the factor
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
