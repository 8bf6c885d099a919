"""Write tables from the results of all calls, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu.engines import LARGE, MORE, SPEED, SPEED_8B, SPEED_70B, TINY, on_a_cpu
from gpu.expected import for_one, is_complete, page, table
from gpu.smoke import DEFAULT
from results import markdown_table
from speed.grid import Preset
from speed.measure import EngineCase
from speed.report import Results, make_rows, markdown, short
from speed.runner import RESULTS, read_results
from study import PUBLISHED, REPOSITORY, BenchError, write_between

PAGE = REPOSITORY / "docs" / "expect.md"
MARKS = ("<!-- expected -->", "<!-- end -->")
GIB = 1 << 30
LARGEST = 25  # kernels of a table


class Listed(NamedTuple):
    """Cases in the order of a table, and their preset."""

    title: str
    stages: Sequence[str]
    cases: Sequence[EngineCase]
    preset: Preset


ON_A_GPU = (
    Listed("8B + 1B", ("speed", "more"), SPEED + MORE, SPEED_8B),
    Listed("70B in FP8 + 1B", ("70b",), LARGE, SPEED_70B),
)
ON_A_CPU = tuple(
    one._replace(cases=on_a_cpu(one.cases), preset=TINY, title=f"{one.title}, stood in for")
    for one in ON_A_GPU
)


def write_report(raw: Path, folder: Path, *, on_gpu: bool = True) -> str:
    """Write the report as ``gpu.md``, and return its text."""
    machines, calls = read_results(raw)
    if not machines:
        raise BenchError(f"{raw / RESULTS} holds no results.")
    sections = [heading(calls)]
    for name, stages in machines.items():
        smoke = stages.get("smoke", {})
        small = {**stages.get("speed", {}), **stages.get("more", {})}
        sections += [
            f"# {name}",
            default_server(smoke.get(DEFAULT, {})),
            faults({**stages.get("kernels", {}), **stages.get("layers", {}), **smoke}),
            layers(stages.get("layers", {})),
            lm_heads(stages.get("layers", {})),
            *(speed(stages, one) for one in (ON_A_GPU if on_gpu else ON_A_CPU)),
            costs(small),
            profiled(stages.get("profile", {})),
            starts(stages),
        ]
        # A machine with part of the results leaves the page as it is.
        if raw == PUBLISHED / "gpu" / "raw" and "H200" in name and is_complete(small):
            write_between(PAGE, MARKS, table(small))
            (PUBLISHED / "gpu" / "expected.md").write_text(page(small))
            sections.append(for_one(small))
    text = "\n\n".join(section for section in sections if section) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text(text)
    return text


def heading(calls: Results) -> str:
    """Return the heading: date, commit, machine and versions of each call."""
    lines = []
    for one in calls.values():
        gpu = one.get("gpu") or {}
        versions = one["versions"]
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
    counts = markdown_table(("", "wrong"), lines)
    told = "\n".join(wrong_of(parts) + failures(parts))
    return "\n\n".join(["## Engines", counts, told]).rstrip()


def wrong_of(parts: Results) -> list[str]:
    return [f"- {part}: {short(w)}" for part, one in parts.items() for w in one.get("wrong", ())]


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


def lm_heads(parts: Results) -> str:
    """Return the milliseconds of an LM head's product, by rows and width."""
    lines = [
        [f"{rows} x {width}", f"{cast:.3f}", f"{at_once:.3f}"]
        for one in parts.values()
        for rows, width, cast, at_once in one.get("lm_heads", ())
    ]
    headers = ("rows x width", "bfloat16, then a cast", "float32 at once")
    table = markdown_table(headers, lines)
    return f"## An LM head of 128,256 tokens, ms\n\n{table}" if lines else ""


# --- Speed


def speed(stages: Mapping[str, Results], listed: Listed) -> str:
    """Return a table of the cells, each with its ratio to plain decoding, below a note."""
    preset = listed.preset
    found = dict[str, Mapping[str, Any]]()
    for stage in listed.stages:
        found |= stages.get(stage, {})
    rows = make_rows([cell for case in listed.cases for cell in case.cells], found, preset)
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
    return f"## Speed: {listed.title}\n\n{markdown(rows, note)}".rstrip()


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
    for sizes in (one for one in measured if one not in ("reading", "nodes")):
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
    tables += wrong_of(parts) + failures(parts)
    return "\n\n".join(["## Where a round goes", *tables]) if tables else ""


# --- Starts


def starts(stages: Mapping[str, Results]) -> str:
    """Return what the start of each engine took, and the clocks after its last result."""
    lines = {}
    for stage, parts in stages.items():
        for part, one in parts.items():
            if found := one.get("conditions"):
                # Results of one start follow each other.
                lines[stage, found["start_seconds"]] = [f"{stage} {part}", *_start_cells(found)]
    headers = ("the last result", *START_COLUMNS)
    table = markdown_table(headers, list(lines.values()))
    return f"## Starts\n\n{table}" if lines else ""


START_COLUMNS = ("start, s", "capture, s", "compiled", "in s", "Triton", "draft's layers", "clocks")


def _start_cells(found: Mapping[str, Any]) -> list[str]:
    captured = found["capture_seconds"]
    clocks = found["clocks"] or {}
    return [
        f"{found['start_seconds']:.0f}",
        "" if captured is None else f"{captured:.1f}",
        str(found["compiled_kernels"]),
        f"{found['compile_seconds']:.0f}",
        found["triton"] or "",
        found["draft_layers"] or "",
        ", ".join(clocks.values()),
    ]
