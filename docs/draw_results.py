"""Draw the pictures of results on pages, from bench/results; run it after a change of these."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "bench" / "results"
WIDTH = 7.0
COLORS = {"plain": "0.45", "sglang": "tab:orange", "fixed": "tab:blue", "main": "tab:green"}
KINDS = ("code", "maths", "summaries", "questions", "retrieval", "chat", "translation")
Row = Mapping[str, str]


def rows_of(name: str, **wanted: str) -> Iterator[Row]:
    """Yield the rows of a file of results in which columns have these values."""
    with (RESULTS / name).open() as file:
        for row in csv.DictReader(file):
            if all(row[key] == value for key, value in wanted.items()):
                yield row


def users(axes: Axes) -> None:
    """Draw simulated tokens a second over users, of four servers."""
    shown = {
        "AR": ("plain decoding", "plain"),
        "SGLang, EAGLE-3 head, tree 4 / 5 / 8": ("SGLang's EAGLE-3, tree 4 / 5 / 8", "sglang"),
        "`exact`, N = 8, K = 8": ("SMC, always N = 8, K = 8", "fixed"),
        "`exact`, adaptive from (8, 16)": ("SMC, the plain command", "main"),
    }
    for system, (label, color) in shown.items():
        found = list(rows_of("load/load.csv", texts="head", trace="steady", system=system))
        counts = [int(row["users"]) for row in found]
        speeds = [float(row["simulated_tokens_per_second"]) for row in found]
        axes.plot(counts, speeds, marker="o", label=label, color=COLORS[color])
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yscale("log", base=2)
    ticks = (200, 400, 800, 1600, 3200, 6400, 12800)
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("users at a time")
    axes.set_ylabel("simulated tokens a second, all users")
    axes.legend()


def kinds(axes: Axes) -> None:
    """Draw measured tokens per pass by kind of text, of three ways to decode."""
    shown = {
        "SGLang tree 4 / 17 / 72": ("SGLang, tree 4 / 17 / 72", "sglang"),
        "exact N=4 K=17": ("exact, N = 4, K = 17", "main"),
        "exact N=8 K=8": ("exact, N = 8, K = 8", "fixed"),
    }
    for place, (system, (label, color)) in enumerate(shown.items()):
        (row,) = rows_of("real/real.csv", pair="coder", temperature="0.7", label=system)
        heights = [float(row[kind]) for kind in KINDS]
        lefts = [at + 0.27 * (place - 1) for at in range(len(KINDS))]
        axes.bar(lefts, heights, 0.25, label=label, color=COLORS[color])
    axes.axhline(1, color=COLORS["plain"], linewidth=1)
    axes.set_xticks(range(len(KINDS)), KINDS)
    axes.set_ylabel("tokens per pass, T = 0.7")
    axes.legend()


def dial(axes: Axes) -> None:
    """Draw the tilt over tokens per pass, of two pairs."""
    modes = {"exact": "exact", "auto": "auto", "smc default": "smc", "smc c=0": "smc, c = 0"}
    of_real = {"exact": "exact", "auto": "auto", "default": "smc default", "paper": "smc c=0"}
    tiny = {
        row["label"]: (float(row["tokens_per_pass"]), float(row["tilt_mean"]))
        for row in rows_of("fidelity/fidelity.csv", temperature="0.7")
        if row["label"] in modes
    }
    real = {
        of_real[row["label"].split()[0]]: (
            float(row["tokens_per_pass_mean"]),
            float(row["tilt_mean"]),
        )
        for row in rows_of("real/real.csv", pair="coder", temperature="0.7")
        if row["label"].endswith("N=8 K=8") and row["tilt_mean"]
    }
    named = (("the shipped pair", tiny, "fixed"), ("Qwen2.5-Coder 1.5B, 0.5B", real, "main"))
    for label, points, color in named:
        ordered = [points[mode] for mode in modes]
        axes.plot(*zip(*ordered, strict=True), marker="o", label=label, color=COLORS[color])
        for mode, at in zip(modes.values(), ordered, strict=True):
            axes.annotate(mode, at, xytext=(6, -4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color=COLORS["plain"], linewidth=1)
    axes.margins(x=0.12)
    axes.set_xlabel("tokens per pass, T = 0.7, N = K = 8")
    axes.set_ylabel("tilt: 0 the target, 1 the draft")
    axes.legend(loc="upper left")


def variance(axes: Axes) -> None:
    """Draw the variance of log Z-hat over N, by the way to resample."""
    for scheme, color in (("systematic", "fixed"), ("chopthin", "main")):
        points = []
        for count in (4, 8, 16, 32):
            cell = f"letters-a2-near-n{count}-verified-{scheme}-0.5"
            (row,) = rows_of("power/toy.csv", cell=cell)
            points.append((count, float(row["variance"]), float(row["variance_half"])))
        counts, means, halves = zip(*points, strict=True)
        axes.errorbar(
            counts, means, halves, marker="o", capsize=3, label=scheme, color=COLORS[color]
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("particles, N")
    axes.set_ylabel("variance of log Z-hat, power 2")
    axes.legend()


def passes(axes: Axes) -> None:
    """Draw accuracy over passes of the target, of choices among eight texts."""
    shown = {
        "target: one sample, N=1": ("one sample", "plain"),
        "target: majority, N=8": ("8 samples, majority", "plain"),
        "target: weighted vote by steps, N=8": ("8 samples, weighted vote", "plain"),
        "target verified: SMC, sample by steps, N=8": ("SMC, one particle", "main"),
        "target verified: SMC, vote by steps, N=8": ("SMC, vote", "main"),
        "target: SMC, vote by steps, N=8": ("SMC of weighed drafts, vote", "fixed"),
    }
    for name, (label, color) in shown.items():
        (row,) = rows_of("steering/steering.csv", label=name)
        low, mean, high = (100 * float(row[f"accuracy_{end}"]) for end in ("low", "mean", "high"))
        at = float(row["passes"])
        axes.plot([at, at], [low, high], color=COLORS[color])
        axes.plot(at, mean, "o", color=COLORS[color])
        is_right = at > 40
        axes.annotate(
            label,
            (at, mean),
            xytext=(-7 if is_right else 7, -3),
            textcoords="offset points",
            fontsize=8,
            ha="right" if is_right else "left",
        )
    axes.set_xlim(0, 75)
    axes.set_ylim(75, 100)
    axes.set_xlabel("passes of the target for an answer")
    axes.set_ylabel("% right, of 400 problems")


PICTURES = {
    "users.png": users,
    "kinds.png": kinds,
    "dial.png": dial,
    "variance.png": variance,
    "passes.png": passes,
}


def main() -> None:
    for name, draw in PICTURES.items():
        figure, axes = plt.subplots(figsize=(WIDTH, 3.6), layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        figure.savefig(DOCS / name, dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
