"""Compare drafts: the cost of a round of each, and its speed at measured tokens per pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from sglang_smc.tools.commands import table
from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.proposals import Draft
from sglang_smc.tools.plan.report import (
    LEFT_OUT,
    draft_line,
    length_line,
    lengths,
    model_line,
    sizes,
)
from sglang_smc.tools.plan.roofline import Estimate, Scenario

TEXTS = frozenset(("device", "setting", "draft"))
EXPLAINED = (
    "A round's time is the draft's, the target's, and the rest: what a head does with the target's "
    "columns. Layers run one after another, each with launches that no bound counts: the more of "
    "them, the farther a round is from its bound. AR is plain decoding of the same batch."
)


class Row(NamedTuple):
    draft: str
    cost: Estimate
    ar: float  # tokens a second of plain decoding
    speeds: dict[str, float]  # tokens a second, by tokens per pass


class Comparison(NamedTuple):
    """All that the table and the JSON show."""

    target: str
    drafts: Mapping[str, Draft]
    load: Scenario  # on any of the devices
    rows: list[Row]


def compare(
    target: str,
    drafts: Mapping[str, Draft],
    load: Scenario,
    tokens: Iterable[float],
    devices: Iterable[Device],
    batches: Iterable[int],
    particles: Iterable[int],
    steps: Iterable[int] | None,
) -> Comparison:
    """Return a row for each device, batch, N, K and draft.

    ``steps`` defaults to each draft's own candidates. Raises ValueError for a draft that does not
    fit, and for ``tokens`` per pass that K steps cannot yield.
    """
    rows = []
    for device, batch, n in product(devices, batches, particles):
        tried = ((k, name) for name in drafts for k in steps or drafts[name].default_steps)
        for k, name in sorted(tried, key=lambda one: one[0]):
            scenario = load._replace(draft=drafts[name], device=device)
            cost = scenario.smc(batch, n, k)
            speeds = {f"{each:g}": cost.measured(each).tokens_per_second for each in tokens}
            rows.append(Row(name, cost, scenario.ar(batch).tokens_per_second, speeds))
    return Comparison(target, drafts, load, rows)


def as_dict(found: Comparison) -> dict[str, Any]:
    """Return the comparison for ``--json``, in bytes and seconds."""
    return {
        "target": {"name": found.target, **sizes(found.load.target)},
        "drafts": [{"name": name, **sizes(draft)} for name, draft in found.drafts.items()],
        **lengths(found.load),
        "rows": [_row_dict(one) for one in found.rows],
        "notes": [EXPLAINED, LEFT_OUT],
    }


def _row_dict(row: Row) -> dict[str, Any]:
    names = ("draft_seconds", "target_seconds", "rest_seconds")
    return {
        "device": row.cost.device.name,
        "num_particles": row.cost.num_particles,
        "draft": row.draft,
        **dict(zip(names, row.cost.parts, strict=True)),
        "seconds": row.cost.seconds,
        "layers": row.cost.round.layers,
        "batch": row.cost.batch,
        "num_steps": row.cost.num_steps,
        "tokens_per_second": row.speeds,
        "ar_tokens_per_second": row.ar,
    }


def as_text(found: Comparison) -> str:
    sized = [(one.cost.num_particles, one.cost.num_steps) for one in found.rows]
    largest = max(sized, key=lambda one: one[0] * (one[1] + 1))
    cells = list(_cells(found.rows))
    return "\n".join(
        [
            f"target  {found.target}: {model_line(found.load.target)}",
            *(f"draft   {draft_line(name, one, *largest)}" for name, one in found.drafts.items()),
            f"load    {length_line(found.load)}",
            "",
            *table(cells, TEXTS),
            "",
            EXPLAINED,
            LEFT_OUT,
        ]
    )


def _cells(rows: Iterable[Row]) -> Iterator[dict[str, str]]:
    for row in rows:
        cost = row.cost
        times = (*cost.parts, cost.seconds)
        names = ("draft ms", "target ms", "rest ms", "ms a round")
        yield {
            "device": cost.device.name,
            "batch": str(cost.batch),
            "setting": f"N={cost.num_particles} K={cost.num_steps}",
            "draft": row.draft,
            **{name: f"{1e3 * time:.3g}" for name, time in zip(names, times, strict=True)},
            "layers": str(cost.round.layers),
            "AR tokens/s": f"{row.ar:,.0f}",
            **{f"tokens/s at {tokens}": f"{speed:,.0f}" for tokens, speed in row.speeds.items()},
        }
