"""The two studies with timers inside the scheduler: the parts of a round, and long answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speed import positions, rounds
from speed.engines import launch
from speed.grid import AR, BLOCK, SMC, Cell, System
from speed.plan import SpeedPlan
from speed.presets import write_models
from speed.probing import FORWARDS_EVERY, FORWARDS_ONCE, StartProbed, probe, start_probed
from study import BenchError

ROUNDS, POSITIONS = "rounds", "positions"
#: How to read the table of parts, by how it came about.
RUN_AGAIN = (
    "Medians in ms. The ratio is of a whole round over its own forwards, run again alone on the "
    "same rows, with a 95 % interval. Parts are without the forwards in them."
)
REPLAYED = (
    "In ms. Rounds are replayed from CUDA graphs and timed by CUDA events; parts are sums of their "
    "kernels by name, in other rounds that torch's profiler saw. Forwards alone are the kernels of "
    "both models; the ratio is of a whole round over these, with a 95 % interval. Gaps are what no "
    "kernel fills."
)


def probed_starter(plan: SpeedPlan, forwards_every: int) -> StartProbed:
    """What starts engines with timers."""
    models = write_models(plan.preset.pair, plan.options.output_dir / "models")

    def start(system: System) -> Any:
        return start_probed(
            system, launch(system, plan.preset, models), plan.folder, forwards_every
        )

    return start


def time_rounds(plan: SpeedPlan, origin: Mapping[str, Any], start: StartProbed | None) -> str:
    """Time the rounds of the selected SMC cells, and write rounds.csv, .md and .png."""
    logs = _complete(plan, SMC, start or probed_starter(plan, FORWARDS_EVERY))
    rows = rounds.make_rows(logs)
    _require(rows)
    text = rounds.markdown(rows, REPLAYED if any(row.replayed for row in rows) else RUN_AGAIN)
    rounds.write_csv(rows, plan.folder / f"{ROUNDS}.csv", origin)
    (plan.folder / f"{ROUNDS}.md").write_text(text)
    title = f"A round of SMC, {plan.preset.pair.name} on {origin['hardware']}"
    rounds.plot_rows(rows, plan.folder / f"{ROUNDS}.png", title=title)
    return text


def time_positions(plan: SpeedPlan, origin: Mapping[str, Any], start: StartProbed | None) -> str:
    """Time long answers, and write positions.csv and .png."""
    logs = _complete(plan, (AR, BLOCK), start or probed_starter(plan, FORWARDS_ONCE))
    points = positions.make_points(logs)
    _require(points)
    positions.write_csv(points, plan.folder / f"{POSITIONS}.csv", origin)
    title = f"Cost of a round, {plan.preset.pair.name} on {origin['hardware']}"
    positions.plot_points(points, plan.folder / f"{POSITIONS}.png", title=title)
    return positions.growth(points)


def _complete(plan: SpeedPlan, families: Sequence[str], start: StartProbed) -> dict[Cell, Any]:
    cells = [cell for cell in plan.selected if cell.system.family in families]
    if not cells:
        raise BenchError(f"No cell of {', '.join(families)} matches --only; --dry-run shows all.")
    logs = {cell: plan.timers_log(cell) for cell in cells}
    probe(logs, plan.preset, plan.preset.repeats, start)
    return logs


def _require(found: Sequence[object]) -> None:
    if not found:
        raise BenchError("Nothing was timed.")


#: By the option that asks for it: what runs, and the files that it writes.
STUDIES: dict[str, Callable[[SpeedPlan, Mapping[str, Any], StartProbed | None], str]] = {
    ROUNDS: time_rounds,
    POSITIONS: time_positions,
}


def outputs(folder: Path) -> list[Path]:
    """The files of both studies that are there."""
    return [path for name in STUDIES for path in sorted(folder.glob(f"{name}.*"))]
