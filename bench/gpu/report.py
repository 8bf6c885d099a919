"""Write tables from the results of all calls, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu import rounds
from gpu.engines import LARGE, MORE, PROFILE, SPEED, SPEED_8B, SPEED_70B, K, system_of
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
SPEED_OF = "decode_tokens_per_second"


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


# --- Estimates, made before the first run from the sizes of the models, the memory's bandwidth and
# counts of launches (docs/performance.md)

SLACK = 1.25


class Goal(NamedTuple):
    """An estimated number: a measured one of a family's cell, over AR's if ``to_ar``."""

    what: str
    expected: float
    form: str
    key: str  # of a result
    family: str
    batch: int = 1
    prompt: int = 256
    times: float = 1.0
    to_ar: bool = False
    is_large: bool = False  # of the 70B
    slack: float = SLACK  # factor within which a result is as expected

    def found(self, results: Results) -> float | None:
        """Return the measured number; None without."""
        cell = Cell(system_of(self.family), self.batch, self.prompt)
        if self.to_ar:
            return times_ar(cell, results)
        ours = results.get(cell.slug, {}).get(self.key)
        return ours and self.times * ours

    def verdict(self, value: float | None) -> str:
        """Return the outcome of comparing a result with the estimate."""
        if value is None:
            return "not measured"
        is_time = self.key == "round_ms"
        gain = self.expected / value if is_time else value / self.expected
        if gain > self.slack:
            return "better"
        return "as expected" if gain * self.slack >= 1 else "worse"


def _speed(what: str, expected: float, family: str) -> Goal:
    return Goal(f"{what}, batch 1, prompt 256: tokens/s", expected, ".0f", SPEED_OF, family)


def _round(what: str, expected: float, family: str, prompt: int = 256) -> Goal:
    name = f"{what}, batch 1, prompt {prompt}: ms a round"
    return Goal(name, expected, ".1f", "round_ms", family, prompt=prompt)


def _times(what: str, expected: float, family: str, batch: int = 1, **more: Any) -> Goal:
    name = f"{what}, batch {batch}: times AR"
    return Goal(name, expected, ".2f", SPEED_OF, family, batch, to_ar=True, **more)


GOALS = (
    _speed("8B alone", 215, AR),
    Goal(f"{K} passes of the 1B alone, ms", 9.0, ".1f", "round_ms", AR_DRAFT, times=K),
    _speed("smc, whole blocks", 617, BLOCK),
    _round("smc with the 1B", 14.6, BLOCK),
    _round("smc with the 1B", 15.1, BLOCK, 4096),
    _round("exact with the 1B", 15.3, EXACT),
    _round("exact with an EAGLE-3 head", 8.9, EXACT_HEAD),
    _round("SGLang's EAGLE-3 with the same head", 7.4, EAGLE),
    _times("adaptive", 1.0, ADAPTIVE, 32, slack=1.0),
    _times("adaptive", 1.0, ADAPTIVE, 64, slack=1.0),
    _times("70B FP8 + 1B, smc", 5.2, BLOCK, is_large=True),
)


def expected(small: Results, large: Results) -> str:
    """Return the table of estimated and measured numbers."""
    lines = []
    for goal in GOALS:
        value = goal.found(large if goal.is_large else small)
        shown = number_cell(value, goal.form)
        lines.append([goal.what, format(goal.expected, goal.form), shown, goal.verdict(value)])
    told = "Estimated for an H200 before the first run, to about 25 %."
    headers = ("", "expected", "measured", "")
    return f"## Expected\n\n{told}\n\n{markdown_table(headers, lines)}"


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
