"""Plot a plan: tokens per second against the batch, and the speedup over AR."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from sglang_smc.tools.plan.report import Report
from sglang_smc.tools.plan.roofline import LARGEST_BATCH, Estimate

BLACK, BLUE = "#000000", "#0072B2"
# Okabe and Ito's colours, distinct to colour-blind readers; the dashes are distinct in grey.
SMC_STYLES = (("#D55E00", "-"), ("#009E73", "--"), ("#CC79A7", "-."), ("#E69F00", ":"))
SMALLEST_SPAN = 64


def plot_report(report: Report, path: Path) -> None:
    """Write the plot as a PNG to ``path``: AR, and the fastest K of SD and of each N."""
    lines = _lines(report)
    batches = _batches(report, [estimate for estimate, _, _ in lines])
    plain = [report.scenario.ar(batch).tokens_per_second for batch in batches]
    figure, (speed, gain) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", dpi=150)
    for estimate, colour, dashes in lines:
        rates = [report.at(estimate, batch).tokens_per_second for batch in batches]
        gains = [rate / base for rate, base in zip(rates, plain, strict=True)]
        for axes, values in ((speed, rates), (gain, gains)):
            axes.plot(batches, values, color=colour, ls=dashes, lw=2, label=estimate.label)
        crossing = report.plain_wins_from(estimate)
        if crossing is not None:
            rate = report.at(estimate, crossing).tokens_per_second
            for axes, height in ((speed, rate), (gain, 1.0)):
                axes.plot(crossing, height, "o", color=colour, ms=6, mec="white")
    _dress(speed, report, "tokens/s at most, all requests")
    _dress(gain, report, "times AR")
    speed.set_yscale("log")
    speed.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    speed.yaxis.set_minor_formatter(NullFormatter())
    gain.set_ylim(bottom=0)
    scenario = report.scenario
    figure.suptitle(
        f"Roofline of {report.target} + {report.draft} on {scenario.device.name}, "
        f"{scenario.context:g} tokens of context, SD at acceptance {report.acceptance:g}"
    )
    figure.legend(*speed.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _lines(report: Report) -> list[tuple[Estimate, str, str]]:
    """Return the shown settings with colour and dashes."""
    found = [(report.ar, BLACK, "-"), (_fastest(report.sd), BLUE, "--")]
    counts = dict.fromkeys(estimate.num_particles for estimate in report.smc)
    for count, style in zip(counts, cycle(SMC_STYLES), strict=False):
        of_count = [one for one in report.smc if one.num_particles == count]
        found.append((_fastest(of_count), *style))
    return found


def _fastest(estimates: list[Estimate]) -> Estimate:
    return max(estimates, key=lambda one: one.tokens_per_second)


def _batches(report: Report, estimates: list[Estimate]) -> list[int]:
    """Return batches, log-spaced, to beyond the size at which AR is as fast as all others."""
    crossings = [report.plain_wins_from(one) or 0 for one in estimates]
    top = min(LARGEST_BATCH, max(SMALLEST_SPAN, 2 * report.batch, *(2 * c for c in crossings)))
    return sorted({round(top ** (place / 120)) for place in range(121)})


def _dress(axes: Axes, report: Report, ylabel: str) -> None:
    axes.axvline(report.batch, color="#6E6E6E", lw=1, ls=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(xlabel="batch (requests); dots: where AR is as fast", ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
