"""Write tables from the results of all calls, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.engines import LARGE, MORE, SPEED, SPEED_8B, SPEED_70B, system_of
from gpu.smoke import DEFAULT
from intervals import Interval
from results import markdown_table, number_cell
from speed.grid import ADAPTIVE, AR, AR_DRAFT, BLOCK, EAGLE, EXACT, EXACT_HEAD, Cell, Preset
from speed.measure import EngineCase
from speed.report import CellRow, Results, make_rows, markdown, shapes, short
from speed.runner import RESULTS, read_results
from study import BenchError

from sglang_smc.tools.plan.devices import named

DEVICE = "h200"
GIB = 1 << 30
LARGEST = 25  # kernels of a table


def write_report(raw: Path, folder: Path) -> str:
    """Write the report as ``gpu.md``, and return its text."""
    stages, calls = read_results(raw)
    if not stages:
        raise BenchError(f"{raw / RESULTS} holds no results.")
    tests, smoke = (stages.get(name, {}) for name in ("kernels", "smoke"))
    small = rows_of({**stages.get("speed", {}), **stages.get("more", {})}, SPEED + MORE, SPEED_8B)
    large = rows_of(stages.get("70b", {}), LARGE, SPEED_70B)
    numbers = ("passed", "broken")
    sections = [
        heading(calls),
        expected([*small, *large]),
        faults("Kernels", ("tests of", *numbers), tests, lambda one: [one.get(n) for n in numbers]),
        default_server(smoke.get(DEFAULT, {})),
        faults("Engines", ("", "wrong"), smoke, lambda one: [len(one.get("wrong", ()))]),
        speed("8B + 1B", small, SPEED_8B),
        speed("70B in FP8 + 1B", large, SPEED_70B),
        profiled(stages.get("profile", {})),
    ]
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


def faults(
    title: str,
    headers: Sequence[str],
    parts: Results,
    numbers: Callable[[Mapping[str, Any]], Sequence[int | None]],
) -> str:
    """Return a line of numbers for each part, and all faults and failures."""
    if not parts:
        return ""
    lines = [
        [part, *("failed" if "failed" in one else number_cell(n, "d") for n in numbers(one))]
        for part, one in parts.items()
    ]
    wrong = [f"- {part}: {short(w)}" for part, one in parts.items() for w in one.get("wrong", ())]
    counts = markdown_table(headers, lines)
    return "\n\n".join([f"## {title}", counts, "\n".join(wrong + failures(parts))]).rstrip()


def failures(parts: Results) -> list[str]:
    return [f"- {part}: {short(one['failed'])}" for part, one in parts.items() if "failed" in one]


# --- Speed, beside estimates for an H200, to about 25 %, made before the first run
# (docs/performance.md)

TOKENS, ROUND, TIMES_AR = "decode_tokens_per_second", "round_seconds", "ratio_to_ar"
#: The estimated field of a row: of a system, a batch and a prompt, in milliseconds if in seconds.
GOALS: tuple[tuple[Preset, str, float, str, str, int, int], ...] = (
    (SPEED_8B, "8B alone: tokens/s", 215, AR, TOKENS, 1, 256),
    (SPEED_8B, "a pass of the 1B alone, ms", 1.1, AR_DRAFT, ROUND, 1, 256),
    (SPEED_8B, "smc, whole blocks: tokens/s", 617, BLOCK, TOKENS, 1, 256),
    (SPEED_8B, "smc with the 1B: ms a round", 14.6, BLOCK, ROUND, 1, 256),
    (SPEED_8B, "smc with the 1B: ms a round", 15.1, BLOCK, ROUND, 1, 4096),
    (SPEED_8B, "exact with the 1B: ms a round", 15.3, EXACT, ROUND, 1, 256),
    (SPEED_8B, "exact with an EAGLE-3 head: ms a round", 8.9, EXACT_HEAD, ROUND, 1, 256),
    (SPEED_8B, "SGLang's EAGLE-3 with the same head: ms a round", 7.4, EAGLE, ROUND, 1, 256),
    (SPEED_8B, "adaptive, times AR", 1.0, ADAPTIVE, TIMES_AR, 32, 256),
    (SPEED_8B, "adaptive, times AR", 1.0, ADAPTIVE, TIMES_AR, 64, 256),
    (SPEED_70B, "70B FP8 + 1B, smc, times AR", 5.2, BLOCK, TIMES_AR, 1, 256),
)


def rows_of(parts: Results, cases: Sequence[EngineCase], preset: Preset) -> list[CellRow]:
    """Return a row for each cell, with its ratio to plain decoding and its roofline."""
    device = named(DEVICE, shapes(preset)[0].weight_bytes)
    return make_rows([cell for case in cases for cell in case.cells], parts, preset, device)


def expected(rows: Sequence[CellRow]) -> str:
    """Return the table of estimated and measured numbers."""
    measured = {(row.pair, row.slug): row for row in rows}
    lines = []
    for preset, what, estimate, family, key, batch, prompt in GOALS:
        row = measured.get((preset.pair.name, Cell(system_of(family), batch, prompt).slug))
        found: Interval | None = getattr(row, key) if row else None
        name = f"{what}, batch {batch}, prompt {prompt}"
        told = number_cell(found and found.mean * (1000 if key == ROUND else 1), ".4g")
        lines.append([name, f"{estimate:g}", told])
    return f"## Expected\n\n{markdown_table(('', 'expected', 'measured'), lines)}"


def speed(title: str, rows: Sequence[CellRow], preset: Preset) -> str:
    """Return a table of the cells, below a note."""
    if not rows:
        return ""
    note = (
        f"Dummy weights, {preset.new_tokens} new tokens a request, means of {preset.repeats}. What "
        "STANDALONE accepts is simulated as published for Llama 8B + 1B; SMC keeps whole blocks "
        "(evidence threshold 0); exact, auto and EAGLE-3 accept what such weights make them "
        "accept: compare ms / round. "
        "The bound is of an H200 by its data sheet (sglang_smc.tools.plan)."
    )
    if preset.pair.quantization:
        note += " In eight bits nearly all of these weights are zeros, which compute faster."
    return f"## Speed: {title}\n\n{markdown(rows, note)}".rstrip()


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
