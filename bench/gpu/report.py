"""Write tables from the results of all calls, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.engines import LARGE, MORE, SPEED, SPEED_8B, SPEED_70B
from gpu.expected import for_one, table
from gpu.smoke import DEFAULT
from results import markdown_table
from speed.grid import Preset
from speed.measure import EngineCase
from speed.report import CellRow, Results, make_rows, markdown, short
from speed.runner import RESULTS, read_results
from study import PUBLISHED, REPOSITORY, BenchError, write_between

PAGE, MARKS = REPOSITORY / "docs" / "performance.md", ("<!-- expected -->", "<!-- end -->")
GIB = 1 << 30
LARGEST = 25  # kernels of a table


def write_report(raw: Path, folder: Path) -> str:
    """Write the report as ``gpu.md``, and return its text."""
    machines, calls = read_results(raw)
    if not machines:
        raise BenchError(f"{raw / RESULTS} holds no results.")
    sections = [heading(calls)]
    for name, stages in machines.items():
        smoke = stages.get("smoke", {})
        small = {**stages.get("speed", {}), **stages.get("more", {})}
        large = rows_of(stages.get("70b", {}), LARGE, SPEED_70B)
        sections += [
            f"# {name}",
            default_server(smoke.get(DEFAULT, {})),
            faults({**stages.get("kernels", {}), **stages.get("layers", {}), **smoke}),
            layers(stages.get("layers", {})),
            speed("8B + 1B", rows_of(small, SPEED + MORE, SPEED_8B), SPEED_8B),
            costs(small),
            speed("70B in FP8 + 1B", large, SPEED_70B),
            profiled(stages.get("profile", {})),
        ]
        if raw == PUBLISHED / "gpu" / "raw" and "H200" in name:
            write_between(PAGE, MARKS, table(small))
            sections.append(for_one(small))
    text = "\n\n".join(section for section in sections if section) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text(text)
    return text


def heading(calls: Results) -> str:
    """Return the heading: date, commit, machine and versions of each call."""
    lines = []
    for one in calls.values():
        gpu, versions = one.get("gpu") or {}, one["versions"]
        where = f"{one['hardware']}, driver {gpu.get('driver_version', 'none')}"
        what = ", ".join(f"{k} {versions.get(k)}" for k in ("torch", "triton", "sglang"))
        lines.append(f"- {one['date'][:16]}, commit {one['git_sha']}: {where}; {what}")
    return "# What bench/gpu measured\n\n" + "\n".join(lines)


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


def faults(parts: Results) -> str:
    """Return the number of faults of each part of the smoke tests, and all faults and failures."""
    if not parts:
        return ""
    lines = [
        [part, "failed" if "failed" in one else str(len(one.get("wrong", ())))]
        for part, one in parts.items()
    ]
    wrong = [f"- {part}: {short(w)}" for part, one in parts.items() for w in one.get("wrong", ())]
    counts = markdown_table(("", "wrong"), lines)
    return "\n\n".join(["## Engines", counts, "\n".join(wrong + failures(parts))]).rstrip()


def failures(parts: Results) -> list[str]:
    return [f"- {part}: {short(one['failed'])}" for part, one in parts.items() if "failed" in one]


def layers(parts: Results) -> str:
    """Return the milliseconds of a draft's layers, by rows and kind."""
    kinds = "stock", "fused", "overlapped", "int8"
    lines = [
        [str(one["rows"]), *(f"{one[f'{kind}_ms']:.3f}" for kind in kinds)]
        for one in parts.values()
        if "fused_ms" in one
    ]
    table = markdown_table(("rows", *kinds), lines)
    return f"## A draft's 16 layers (1B), ms\n\n{table}" if lines else ""


# --- Speed


def rows_of(parts: Results, cases: Sequence[EngineCase], preset: Preset) -> list[CellRow]:
    """Return a row for each cell, with its ratio to plain decoding."""
    return make_rows([cell for case in cases for cell in case.cells], parts, preset)


def speed(title: str, rows: Sequence[CellRow], preset: Preset) -> str:
    """Return a table of the cells, below a note."""
    if not rows:
        return ""
    note = (
        f"Dummy weights, {preset.new_tokens} new tokens a request, means of {preset.repeats}. What "
        "STANDALONE accepts is simulated as published for Llama 8B + 1B; SMC keeps whole blocks "
        "(evidence threshold 0); exact, auto and EAGLE-3 accept what such weights make them "
        "accept: compare ms / round."
    )
    if preset.pair.quantization:
        note += " In eight bits nearly all of these weights are zeros, which compute faster."
    return f"## Speed: {title}\n\n{markdown(rows, note)}".rstrip()


def costs(parts: Results) -> str:
    """Return the rounds that adaptive servers measured at start, in ms by N, K and requests."""
    lines = [
        [part, sizes, ", ".join(f"{size}: {1000 * seconds:.3g}" for size, seconds in points), more]
        for part, one in parts.items()
        for sizes, points, more in _rounds_of(one.get("costs", {}))
    ]
    headers = ("", "N and K", "requests: ms a round", "more for 1,000 tokens of text")
    return f"## Costs of adaptive servers\n\n{markdown_table(headers, lines)}" if lines else ""


def _rounds_of(
    measured: Mapping[str, Any],
) -> Iterator[tuple[str, Sequence[tuple[int, float]], str]]:
    """Yield N and K, (requests, seconds), and ms for 1,000 tokens, of `RoundCosts.as_dict`."""
    reading = measured.get("reading", {})
    for sizes in (one for one in measured if one != "reading"):
        more = f"{1e6 * reading[sizes]:.3g}" if sizes in reading else ""
        yield sizes, measured[sizes], more


# --- Where a round goes


def profiled(parts: Results) -> str:
    """Return the largest kernels of each profiled round, and the time without any."""
    tables = []
    for name, one in parts.items():
        kernels = [(kernel, count, ms) for kernel, count, ms in one.get("kernels", ())]
        if kernels:
            gaps = one["round_ms"] - sum(ms for *_, ms in kernels)
            lines = [
                [f"`{kernel[:70].replace('|', '/')}`", f"{count:g}", f"{ms:.3f}"]
                for kernel, count, ms in kernels[:LARGEST]
            ]
            told = f"**{name}**: {one['round_ms']:.2f} ms a round, {gaps:.2f} of it no kernel's"
            headers = ("kernel", "launches a round", "ms a round")
            tables.append(f"{told}\n\n{markdown_table(headers, lines)}")
    tables += failures(parts)
    return "\n\n".join(["## Where a round goes", *tables]) if tables else ""
