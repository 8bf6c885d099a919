"""Compare drafts: the cost of a round of each, and its speed at measured tokens per pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.proposals import Proposal, default_steps
from sglang_smc.tools.plan.report import LEFT_OUT, draft_line, model_line, sizes, table
from sglang_smc.tools.plan.roofline import RoundCost, ar_step, round_cost
from sglang_smc.tools.plan.shapes import ModelShape

COLUMNS = (
    *("device", "batch", "setting", "draft"),
    *("draft ms", "target ms", "rest ms", "ms a round", "layers", "AR tokens/s"),
)
TEXTS = frozenset(("device", "setting", "draft"))
EXPLAINED = (
    "A round's time is the draft's, the target's, and the rest: what a head does with the target's "
    "columns. Layers run one after another, each with launches that no bound counts: the more of "
    "them, the farther a round is from its bound. AR is plain decoding of the same batch."
)


class Load(NamedTuple):
    """Length of requests: shared context and each particle's own tail, in tokens."""

    context: float
    tail: float
    shared_prefix: bool


class Row(NamedTuple):
    device: Device
    num_particles: int
    draft: str
    cost: RoundCost
    ar: float  # tokens a second of plain decoding


class Comparison(NamedTuple):
    """All that the table and the JSON show."""

    target: tuple[str, ModelShape]
    drafts: Mapping[str, Proposal]
    load: Load
    tokens: tuple[float, ...]  # per pass of the target, as measured
    rows: list[Row]


def compare(
    target: tuple[str, ModelShape],
    drafts: Mapping[str, Proposal],
    load: Load,
    tokens: tuple[float, ...],
    devices: Iterable[Device],
    batches: Iterable[int],
    particles: Iterable[int],
    steps: Iterable[int] | None,
) -> Comparison:
    """Return a row for each device, batch, N, K and draft.

    ``steps`` defaults to each draft's own candidates. Raises ValueError for a draft that does not
    fit, and for tokens that K steps cannot yield.
    """
    rows = []
    for device, batch, n in product(devices, batches, particles):
        ar = batch / ar_step(target[1], batch, load.context + load.tail).seconds(device)
        tried = ((k, name) for name in drafts for k in steps or default_steps(drafts[name]))
        for k, name in sorted(tried, key=lambda one: one[0]):
            cost = round_cost(target[1], drafts[name], device, n, k, batch=batch, **load._asdict())
            rows.append(Row(device, n, name, cost, ar))
    return Comparison(target, drafts, load, tokens, rows)


def as_dict(found: Comparison) -> dict[str, Any]:
    """Return the comparison for ``--json``, in bytes and seconds."""
    name, target = found.target
    return {
        "target": {"name": name, **sizes(target)},
        "drafts": [{"name": name, **sizes(draft)} for name, draft in found.drafts.items()],
        **found.load._asdict(),
        "rows": [_row_dict(one, found.tokens) for one in found.rows],
        "notes": [EXPLAINED, LEFT_OUT],
    }


def _row_dict(one: Row, tokens: tuple[float, ...]) -> dict[str, Any]:
    return {
        "device": one.device.name,
        "num_particles": one.num_particles,
        "draft": one.draft,
        **{f"{name}_seconds": getattr(one.cost, name) for name in ("draft", "target", "rest")},
        "seconds": one.cost.seconds,
        "layers": one.cost.layers,
        "batch": one.cost.batch,
        "num_steps": one.cost.num_steps,
        "tokens_per_second": {f"{t:g}": one.cost.tokens_per_second(t) for t in tokens},
        "ar_tokens_per_second": one.ar,
    }


def as_text(found: Comparison) -> str:
    name, target = found.target
    load = found.load
    shared = "read once a request" if load.shared_prefix else "read by each particle"
    speeds = tuple(f"tokens/s at {tokens:g}" for tokens in found.tokens)
    largest = max(found.rows, key=lambda one: one.num_particles * (one.cost.num_steps + 1))
    asked = largest.num_particles, largest.cost.num_steps
    return "\n".join(
        [
            f"target  {name}: {model_line(target)}",
            *(f"draft   {draft_line(name, one, *asked)}" for name, one in found.drafts.items()),
            f"load    {load.context:g} tokens of context ({shared}) and {load.tail:g} of each "
            "particle's own",
            "",
            *table([(*COLUMNS, *speeds), *_cells(found)], TEXTS),
            "",
            EXPLAINED,
            LEFT_OUT,
        ]
    )


def _cells(found: Comparison) -> Iterator[tuple[str, ...]]:
    for one in found.rows:
        cost = one.cost
        times = (cost.draft, cost.target, cost.rest, cost.seconds)
        yield (
            one.device.name,
            str(cost.batch),
            f"N={one.num_particles} K={cost.num_steps}",
            one.draft,
            *(f"{seconds * 1e3:.3g}" for seconds in times),
            str(cost.layers),
            f"{one.ar:,.0f}",
            *(f"{cost.tokens_per_second(tokens):,.0f}" for tokens in found.tokens),
        )
