"""Plot a plan: tokens per second against the batch, and the speedup over AR."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from sglang_smc_tools.plan.report import Plan
from sglang_smc_tools.plan.roofline import LARGEST_BATCH, Scenario

BLACK = "#000000"
BLUE = "#0072B2"
# Okabe and Ito's colours, distinct to colour-blind readers; the dashes are distinct in grey.
SMC_STYLES = (("#D55E00", "-"), ("#009E73", "--"), ("#CC79A7", "-."), ("#E69F00", ":"))
SMALLEST_SPAN = 64


def plot_plan(plan: Plan, path: Path) -> None:
    """Write the plot as a PNG to ``path``: AR, and the fastest K of SD and of each N."""
    lines = _lines(plan.settings)
    batches = _batches([estimate for estimate, _, _ in lines])
    figure, (speed, gain) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", dpi=150)
    for estimate, colour, dashes in lines:
        shown = [replace(estimate, batch=batch) for batch in batches]
        rates = [one.tokens_per_second for one in shown]
        for axes, values in ((speed, rates), (gain, [one.times_ar for one in shown])):
            axes.plot(batches, values, color=colour, ls=dashes, lw=2, label=estimate.label)
        crossing = estimate.plain_wins_from
        if crossing is not None:
            rate = replace(estimate, batch=crossing).tokens_per_second
            for axes, height in ((speed, rate), (gain, 1.0)):
                axes.plot(crossing, height, "o", color=colour, ms=6, mec="white")
    _dress(speed, plan.best.batch, "tokens/s at most, all requests")
    _dress(gain, plan.best.batch, "times AR")
    speed.set_yscale("log")
    speed.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    speed.yaxis.set_minor_formatter(NullFormatter())
    gain.set_ylim(bottom=0)
    best = plan.best
    figure.suptitle(
        f"Roofline of {plan.target} + {plan.draft} on {best.device.name}, "
        f"{best.context:g} tokens of context, SD at acceptance {plan.acceptance:g}"
    )
    figure.legend(*speed.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _lines(settings: list[Scenario]) -> list[tuple[Scenario, str, str]]:
    """Return the fastest setting of each method and N, with its colour and dashes."""
    fastest: dict[tuple[str, int], Scenario] = {}
    for one in settings:
        kind = one.method, one.num_particles
        fastest[kind] = max(fastest.get(kind, one), one, key=lambda one: one.tokens_per_second)
    styles = chain([(BLACK, "-"), (BLUE, "--")], cycle(SMC_STYLES))
    return [(one, *style) for one, style in zip(fastest.values(), styles, strict=False)]


def _batches(estimates: list[Scenario]) -> list[int]:
    """Return batches, log-spaced, to beyond the size at which AR is as fast as all others."""
    crossings = [one.plain_wins_from or one.batch for one in estimates]
    top = min(LARGEST_BATCH, max(SMALLEST_SPAN, 2 * max(crossings)))
    return sorted({round(top ** (place / 120)) for place in range(121)})


def _dress(axes: Axes, batch: int, ylabel: str) -> None:
    axes.axvline(batch, color="#6E6E6E", lw=1, ls=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(xlabel="batch (requests); dots: where AR is as fast", ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
