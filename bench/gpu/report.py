"""Write tables from the results of all calls, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu import rounds
from gpu.engines import LARGE, MORE, PROFILE, SPEED, SPEED_8B, SPEED_70B, system_of
from gpu.smoke import DEFAULT
from results import markdown_table, number_cell
from speed.bound import shapes
from speed.grid import ADAPTIVE, AR, AR_DRAFT, BLOCK, EAGLE, EXACT, EXACT_HEAD, Cell
from speed.measure import EngineCase
from speed.presets import Preset
from speed.report import Results, make_rows, markdown, short
from speed.runner import RESULTS, read_results
from study import BenchError

from sglang_smc.tools.plan.devices import named

DEVICE = "h200"
GIB = 1 << 30
SPEED_OF, ROUND_MS, TIMES_AR = "decode_tokens_per_second", "round_ms", "times AR"


def write_report(raw: Path, folder: Path) -> str:
    """Write the report as ``gpu.md``, and return its text."""
    stages, calls = read_results(raw)
    if not stages:
        raise BenchError(f"{raw / RESULTS} holds no results.")
    tests, smoke, large = (stages.get(name, {}) for name in ("kernels", "smoke", "70b"))
    both = {**stages.get("speed", {}), **stages.get("more", {})}
    numbers = ("passed", "broken")
    sections = [
        heading(calls),
        expected(both, large),
        faults("Kernels", ("tests of", *numbers), tests, lambda one: [one.get(n) for n in numbers]),
        default_server(smoke.get(DEFAULT, {})),
        faults("Engines", ("", "wrong"), smoke, lambda one: [len(one.get("wrong", ()))]),
        speed("8B + 1B", both, (*SPEED, *MORE), SPEED_8B),
        speed("70B in FP8 + 1B", large, LARGE, SPEED_70B),
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


# --- Estimates for an H200, to about 25 %, made before the first run (docs/performance.md)

GOALS: tuple[tuple[str, float, str, str, int, int], ...] = (
    ("8B alone: tokens/s", 215, AR, SPEED_OF, 1, 256),
    ("a pass of the 1B alone, ms", 1.1, AR_DRAFT, ROUND_MS, 1, 256),
    ("smc, whole blocks: tokens/s", 617, BLOCK, SPEED_OF, 1, 256),
    ("smc with the 1B: ms a round", 14.6, BLOCK, ROUND_MS, 1, 256),
    ("smc with the 1B: ms a round", 15.1, BLOCK, ROUND_MS, 1, 4096),
    ("exact with the 1B: ms a round", 15.3, EXACT, ROUND_MS, 1, 256),
    ("exact with an EAGLE-3 head: ms a round", 8.9, EXACT_HEAD, ROUND_MS, 1, 256),
    ("SGLang's EAGLE-3 with the same head: ms a round", 7.4, EAGLE, ROUND_MS, 1, 256),
    ("adaptive, times AR", 1.0, ADAPTIVE, TIMES_AR, 32, 256),
    ("adaptive, times AR", 1.0, ADAPTIVE, TIMES_AR, 64, 256),
)
LARGE_GOALS = (("70B FP8 + 1B, smc, times AR", 5.2, BLOCK, TIMES_AR, 1, 256),)


def expected(small: Results, large: Results) -> str:
    """Return the table of estimated and measured numbers."""
    lines = []
    for goals, results in ((GOALS, small), (LARGE_GOALS, large)):
        for what, estimate, family, key, batch, prompt in goals:
            cell = Cell(system_of(family), batch, prompt)
            one = {**results.get(cell.slug, {}), TIMES_AR: times_ar(cell, results)}
            name = f"{what}, batch {batch}, prompt {prompt}"
            lines.append([name, f"{estimate:g}", number_cell(one.get(key), ".4g")])
    return f"## Expected\n\n{markdown_table(('', 'expected', 'measured'), lines)}"


# --- Speed


def speed(title: str, parts: Results, cases: Sequence[EngineCase], preset: Preset) -> str:
    """Return a row for each cell, with its ratio to plain decoding and its roofline."""
    device = named(DEVICE, shapes(preset)[0].weight_bytes)
    rows = make_rows([cell for case in cases for cell in case.cells], parts, preset, device)
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


def times_ar(cell: Cell, parts: Results) -> float | None:
    """Return the ratio to AR at the same batch and prompt."""
    ours, plain = (parts.get(one.slug, {}).get(SPEED_OF) for one in (cell, cell.reference))
    return None if plain is None or ours is None else ours / plain


# --- Where a round goes


def profiled(parts: Results) -> str:
    """Return the parts of a round, and its largest kernels."""
    cells = [cell for case in PROFILE for cell in case.cells]
    found = {c: parts[c.slug] for c in cells if "round_ms" in parts.get(c.slug, {})}
    if not found:
        return "\n".join(failures(parts))
    tables = [rounds.markdown(found).rstrip()]
    headers = ("kernel", "of", "does", "launches a round", "ms a round")
    for cell, one in found.items():
        lines = rounds.largest(one)
        if lines:
            tables.append(f"**{cell.name}**\n\n{markdown_table(headers, lines)}")
    return "\n\n".join(["## Where a round goes", *tables, *failures(parts)])
