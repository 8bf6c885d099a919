"""Write tables, a CSV and plots from the results of all calls, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import results
from charts import legend_below, picture, shade
from gpu import goals, rounds
from gpu.cases import (
    AR_DRAFT,
    EAGLE,
    EXACT_HEAD,
    LARGE,
    MORE,
    PROFILE,
    SPEED,
    SPEED_8B,
    SPEED_70B,
    EngineCase,
)
from gpu.default_server import DEFAULT
from gpu.records import RESULTS, read_results
from results import markdown_table, number_cell, short
from speed.bound import least_round, shapes
from speed.grid import AR, Cell
from speed.presets import Preset
from study import BenchError

from sglang_smc.tools.plan.devices import Device, named
from sglang_smc.tools.plan.roofline import ar_step

Results = Mapping[str, Mapping[str, Any]]
DEVICE = "h200"
GIB = 1 << 30
HEADERS = (
    "",
    "batch",
    "prompt",
    "tokens / s",
    "times AR",
    "ms / round",
    "tokens / round",
    "at least, ms",
    "of the bound",
    "replayed",
)


def write_report(raw: Path, folder: Path) -> str:
    """Write all files of the report; return the text of the page."""
    stages, calls = read_results(raw)
    if not stages:
        raise BenchError(f"{raw / RESULTS} holds no results.")
    folder.mkdir(parents=True, exist_ok=True)
    large = stages.get("70b", {})
    both = {**stages.get("speed", {}), **stages.get("more", {})}
    sections = [
        heading(calls),
        expected({"speed": both, "70b": large}),
        kernels(stages.get("kernels", {})),
        default_server(stages.get("smoke", {}).get(DEFAULT, {})),
        smoke(stages.get("smoke", {})),
        speed("8B + 1B", both, (*SPEED, *MORE), SPEED_8B),
        speed("70B in FP8 + 1B", large, LARGE, SPEED_70B),
        profiled(stages.get("profile", {}), folder, calls),
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    (folder / "gpu.md").write_text(text)
    write_csv(both, large, folder / "speed.csv", calls)
    plot_speed(both, folder / "speed.png", title=f"8B + 1B on {machine(calls)}")
    return text


GOAL_HEADERS = ("", "expected", "measured", "")


def expected(results: Mapping[str, Results]) -> str:
    """Return the table of estimated and measured numbers."""
    table = markdown_table(GOAL_HEADERS, goals.lines(results))
    return f"## Expected\n\nEstimated for an H200 before the first run, to about 25 %.\n\n{table}"


def default_server(one: Mapping[str, Any]) -> str:
    """Return the start time, memory and speed of a server with default settings."""
    memory = one.get("memory")
    if not memory:
        return ""
    beside = [f"{name} {size / GIB:.1f}" for name, size in memory["beside"].items()]
    free = "" if one["free_mib"] is None else f", {one['free_mib'] / 1024:.1f} GiB free then"
    return (
        f"## A server with default settings\n\nReady after {one['start_seconds']:.0f} s; KV pool "
        f"{memory['pool_bytes'] / GIB:.1f} GiB ({memory['pool_slots']:,} tokens), and in GiB "
        f"{', '.join(beside)}{free}. One request of a chat: {one['first_ms']:.0f} ms to the first "
        f"token, {one['round_ms']:.1f} ms a round."
    )


def heading(calls: Results) -> str:
    """Return the heading: date, commit, machine and versions of each call."""
    lines = []
    for one in calls.values():
        gpu, versions = one.get("gpu") or {}, one["versions"]
        where = f"{one['hardware']}, driver {gpu.get('driver_version', 'none')}"
        what = ", ".join(f"{k} {versions.get(k)}" for k in ("torch", "triton", "sglang"))
        lines.append(f"- {one['date'][:16]}, commit {one['git_sha']}: {where}; {what}")
    return "# What bench/gpu measured\n\n" + "\n".join(lines)


def machine(calls: Results) -> str:
    """Return the last call's device."""
    return str(list(calls.values())[-1]["hardware"]) if calls else "an unknown machine"


def kernels(parts: Results) -> str:
    """Return the numbers of passed and broken tests by file, and the messages."""
    if not parts:
        return ""
    lines = [
        [part, number_cell(one.get("passed"), "d"), number_cell(one.get("broken"), "d")]
        for part, one in parts.items()
    ]
    table = markdown_table(("tests of", "passed", "broken"), lines)
    broken = [
        f"- {part}: {_line(said)}" for part, one in parts.items() for said in one.get("wrong", ())
    ]
    return "\n\n".join(["## Kernels", table, "\n".join(broken + failures(parts))]).rstrip()


def smoke(parts: Results) -> str:
    """Return the outcome of each smoke test, and its faults."""
    if not parts:
        return ""
    lines = [[part, "failed" if "failed" in one else verdict(one)] for part, one in parts.items()]
    table = markdown_table(("", "wrong"), lines)
    wrong = [f"- {part}: {w}" for part, one in parts.items() for w in one.get("wrong", ())]
    return "\n\n".join(["## Engines", table, "\n".join(wrong + failures(parts))]).rstrip()


def verdict(one: Mapping[str, Any]) -> str:
    """Return the number of faults, or the numbers of a benchmark without faults."""
    if "wrong" in one:
        return str(len(one["wrong"]))
    shown = {k: v for k, v in one.items() if isinstance(v, float)}
    return ", ".join(f"{name} {value:g}" for name, value in shown.items())


def failures(parts: Results) -> list[str]:
    return [f"- {part}: {_line(one['failed'])}" for part, one in parts.items() if "failed" in one]


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def speed(title: str, parts: Results, cases: Sequence[EngineCase], preset: Preset) -> str:
    """Return a row for each cell, with its ratio to plain decoding and its roofline."""
    rows = [row for case in cases for cell in case.cells if (row := _row(cell, parts, preset))]
    if not rows and not failures(parts):
        return ""
    note = (
        f"Dummy weights, {preset.new_tokens} new tokens a request, medians of {preset.repeats}; "
        "tokens / s are decoded ones of all requests together. What STANDALONE accepts is "
        "simulated as published for Llama 8B + 1B; SMC keeps whole blocks (evidence threshold 0); "
        "exact, auto and EAGLE-3 accept what such weights make them accept: compare ms / round. "
        "The bound is of an H200 by its data sheet (sglang_smc.tools.plan)."
    )
    if preset.pair.quantization:
        note += " In eight bits nearly all of these weights are zeros, which compute faster."
    return "\n\n".join(
        [f"## Speed: {title}", note, markdown_table(HEADERS, rows), "\n".join(failures(parts))]
    ).rstrip()


def _row(cell: Cell, parts: Results, preset: Preset) -> list[str] | None:
    one = parts.get(cell.slug, {})
    if "round_ms" not in one:
        return None
    ours = one["decode_tokens_per_second"]
    plain = parts.get(cell.reference.slug, {}).get("decode_tokens_per_second")
    least = least_ms(cell, preset)
    told = "" if one["simulated"] is None else " (simulated)"
    return [
        cell.system.name,
        str(cell.batch),
        str(cell.prompt),
        f"{ours:.0f}",
        "" if plain is None else f"{ours / plain:.2f}",
        f"{one['round_ms']:.2f}",
        f"{one['tokens_per_round']:.2f}{told}",
        number_cell(least, ".2f"),
        number_cell(least and least / one["round_ms"], ".0%"),
        number_cell(one.get("replayed_share"), ".0%"),
    ]


def least_ms(cell: Cell, preset: Preset) -> float | None:
    """Return the roofline of a round in ms; None for unknown shapes."""
    target, draft = shapes(preset)
    device: Device = named(DEVICE, target.weight_bytes)
    family = cell.system.family
    if family in (EAGLE, EXACT_HEAD):
        return None
    if family == AR_DRAFT:
        found = ar_step(draft, cell.batch, cell.prompt + preset.new_tokens / 2)
        return 1000 * found.seconds(named(DEVICE))
    return 1000 * least_round(cell, preset).seconds(device)


def profiled(parts: Results, folder: Path, calls: Results) -> str:
    """Return the parts of a round, and its largest kernels."""
    rows = [
        rounds.make_row(cell, parts[cell.slug]["entries"])
        for case in PROFILE
        for cell in case.cells
        if "entries" in parts.get(cell.slug, {})
    ]
    if not rows:
        return "\n".join(failures(parts))
    rounds.plot_rows(rows, folder / "rounds.png", title=f"A round of SMC on {machine(calls)}")
    rounds.write_csv(rows, folder / "rounds.csv", list(calls.values())[-1])
    tables = [rounds.markdown(rows).rstrip()]
    for part, one in parts.items():
        lines = largest(one.get("entries", []))
        if lines:
            headers = ("kernel", "of", "does", "launches a round", "ms a round")
            tables.append(f"**{part}**\n\n{markdown_table(headers, lines)}")
    return "\n\n".join(["## Where a round goes", *tables, *failures(parts)])


def largest(entries: Sequence[Mapping[str, Any]], most: int = 25) -> list[list[str]]:
    """Return the longest kernels of the first profiled burst."""
    found = [b["replays"] for e in entries for b in e["bursts"] if b.get("replays")]
    if not found:
        return []
    return [
        [f"`{name[:70].replace('|', '/')}`", phase, kind, f"{launches:g}", f"{1000 * seconds:.3f}"]
        for phase, kind, name, launches, seconds in found[0]["sums"][:most]
    ]


def write_csv(small: Results, large: Results, path: Path, calls: Results) -> None:
    """Write one line for each cell, without its samples."""
    keys = ("decode_tokens_per_second", "tokens_per_second", "round_ms", "first_ms")
    keys += ("tokens_per_round", "simulated", "replayed_share", "failed")
    lines = [
        {
            "pair": pair,
            "cell": part,
            **{key: short(one.get(key)) for key in keys},
            "times_ar": short(times_ar(part, one, parts)),
            "call": one["call"],
        }
        for pair, parts in (("8B+1B", small), ("70B+1B", large))
        for part, one in parts.items()
        if "round_ms" in one or "failed" in one
    ]
    if lines:
        results.write_csv(lines, path, list(calls.values())[-1])


def times_ar(part: str, one: Mapping[str, Any], parts: Results) -> float | None:
    """Return the ratio to AR at the same batch and prompt."""
    plain = parts.get(f"ar-{'-'.join(part.split('-')[-2:])}", {}).get("decode_tokens_per_second")
    ours = one.get("decode_tokens_per_second")
    return goals.ratio(ours, plain)


def plot_speed(parts: Results, path: Path, *, title: str) -> None:
    """Plot each system's speed as a multiple of plain decoding's, by batch and prompt."""
    found = {part: one for part, one in parts.items() if "round_ms" in one}
    sizes = sorted({(one["prompt"], one["batch"]) for one in found.values()})
    names = list(dict.fromkeys(one["system"] for one in found.values() if one["system"] != AR))
    if not sizes or not names:
        return
    with picture(path, (11, 5)) as (figure, ((axes,),)):
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            heights = {
                (one["prompt"], one["batch"]): times_ar(part, one, parts)
                for part, one in found.items()
                if one["system"] == name
            }
            at = [spot + place * width for spot, size in enumerate(sizes) if heights.get(size)]
            tall = [height for size in sizes if (height := heights.get(size))]
            axes.bar(at, tall, width, label=name, **shade(place))
        axes.axhline(1.0, color="black", lw=1)
        labels = [f"batch {batch},\nprompt {prompt}" for prompt, batch in sizes]
        axes.set_xticks([spot + 0.4 - width / 2 for spot in range(len(sizes))], labels)
        axes.set(ylabel="decoding speed, as a multiple of AR's", title=title)
        legend_below(figure, axes, ncols=4)
