"""Measure tokens per target pass of SMC, SGLang's chains and its trees, on the shipped pair.

    .venv/bin/python bench/trees.py                 # all rows, resumable, a quarter of an hour
    .venv/bin/python bench/trees.py --list          # lists the cells
    .venv/bin/python bench/trees.py --problems 10   # a quick run, in another --output-dir

Every row answers the same problems at all temperatures. Each cell has its own seeds, so that the
tilts that a server measures on its `exact` answers are independent between cells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import answers
from answers import COMMON, Record, Request, Study, request
from fidelity.grid import AUTO, EXACT
from intervals import Interval, watched_tilt
from results import interval_cell, markdown_table, provenance, tokens_a_pass
from study import PAIR, PUBLISHED, as_script, copy, digest

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
#: Beyond the problems of all other studies.
FIRST_PROBLEM = 5_400_000
#: Distance between the first seeds of consecutive cells.
SEEDS_A_CELL = 100_000
MODEL, HEAD = "draft", "eagle3"
NAMES = {MODEL: "draft model", HEAD: "EAGLE-3 head"}
ALGORITHMS = {MODEL: "STANDALONE", HEAD: "EAGLE3"}
#: The largest N and K of the rows; each request sets its own.
SMC = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": 17,
    "speculative_smc_num_particles": 8,
}
OUTPUTS = ("trees.json", "trees.md")


class Row(NamedTuple):
    """One way to draft and verify."""

    name: str
    draft: str  # the checkpoint's folder beside the target
    rows: int  # tokens that a target pass reads
    passes: int  # of the draft in a round, with a head's pass over the target's columns
    engine: dict[str, Any]  # keywords of `sgl.Engine` besides the models
    smc: dict[str, Any] | None = None  # request fields; None for SGLang's own speculation


def stock(draft: str, topk: int, steps: int, tokens: int) -> Row:
    """Return SGLang's own tree, or its chain of the likeliest tokens if ``topk`` is 1."""
    engine = {
        "speculative_algorithm": ALGORITHMS[draft],
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
    }
    shape = f"tree {topk} / {steps} / {tokens}" if topk > 1 else f"chain of {steps}"
    return Row(f"SGLang, {NAMES[draft]}, {shape}", draft, tokens, steps, engine)


def ours(draft: str, mode: str, num_particles: int, num_steps: int) -> Row:
    """Return a mode of SMC at N and K."""
    asked = {"mode": mode, "num_particles": num_particles, "num_steps": num_steps}
    name = f"`{mode}`, {NAMES[draft]}, N = {num_particles}, K = {num_steps}"
    passes = num_steps + (draft == HEAD)
    return Row(name, draft, num_particles * (num_steps + 1), passes, SMC, asked)


#: 4 / 5 / 8 is SGLang's default for a Llama target; 72 rows are those of N = K = 8.
ROWS = (
    *(stock(HEAD, *shape) for shape in ((4, 5, 8), (1, 8, 9), (10, 8, 72))),
    *(stock(MODEL, *shape) for shape in ((1, 8, 9), (8, 8, 72))),
    *(
        ours(draft, *setting)
        for draft in (HEAD, MODEL)
        for setting in ((EXACT, 1, 8), (EXACT, 8, 8), (EXACT, 4, 17), (AUTO, 8, 8))
    ),
)


@dataclass(frozen=True)
class Cell(answers.Cell):
    """A row at one temperature."""

    row: Row = field(kw_only=True, hash=False)


def cell_of(row: Row, temperature: float) -> Cell:
    """Return a row's cell, of an engine of its own or of the draft's for SMC."""
    engine = f"SMC with the {NAMES[row.draft]}" if row.smc else row.name
    label = "".join(letter for letter in row.name.replace(" = ", "") if letter not in ",`/")
    return Cell(" ".join(label.split()), engine, temperature, row.smc, row=row)


def is_measured(cell: Cell) -> bool:
    """Return whether it is measured: at temperature 0 every mode verifies the same tree."""
    return bool(cell.temperature) or not cell.smc or cell.smc["mode"] == EXACT


#: Cells with their indices, from which their seeds are derived.
PLACES = {
    cell: place for place, cell in enumerate(cell_of(r, t) for r in ROWS for t in TEMPERATURES)
}
CELLS = list(filter(is_measured, PLACES))


#: The ``meta_info`` of a row's answers, by temperature.
Infos = dict[float, list[dict[str, Any]]]


def line(row: Row, infos: Infos) -> dict[str, Any]:
    """Return a row's numbers for JSON."""
    tokens = {f"{t:g}": tokens_a_pass(some)._asdict() for t, some in infos.items()}
    return row._asdict() | {"tokens": tokens, "tilt": tilt([infos])}


def tilt(rows: Sequence[Infos]) -> dict[str, float] | None:
    """Return the servers' tilt over these rows' sampled answers; None without any."""
    told = watched_tilt([info for infos in rows for t in infos if t for info in infos[t]])
    return None if told is None else told._asdict()


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table, with a column for each temperature that was measured."""
    temperatures = sorted({t for row in rows for t in row["tokens"]}, key=float)
    lines = []
    for row in rows:
        found = [row["tokens"].get(t) for t in temperatures]
        cells = [interval_cell(one and Interval(**one), ".2f") for one in found]
        lines.append([row["name"], str(row["rows"]), str(row["passes"]), *cells])
    headers = ["", "rows", "draft passes", *(f"T = {t}" for t in temperatures)]
    return markdown_table(headers, lines)


class Trees(Study[Cell, Record]):
    """The study, with an engine for each tree and chain of SGLang and for each draft of SMC."""

    name = "trees"
    about = "Tokens a target pass of SMC, and of SGLang's own chains and trees."
    problems = 100
    first_problem = FIRST_PROBLEM

    def grid(self) -> list[Cell]:
        return CELLS

    def _row(self, engine: str) -> Row:
        return next(cell.row for cell in CELLS if cell.engine == engine)

    def engine(self, name: str) -> dict[str, Any]:
        return COMMON | self._row(name).engine

    def models(self, name: str) -> tuple[str, str | None]:
        return "target", self._row(name).draft

    def identity(self, cell: Cell) -> dict[str, Any]:
        draft = digest((PAIR / cell.row.draft).glob("*"))
        return super().identity(cell) | {"draft": draft}

    def request_of(self, cell: Cell, index: int) -> Request:
        seed = FIRST_PROBLEM + PLACES[cell] * SEEDS_A_CELL + index
        return request(FIRST_PROBLEM + index, seed, cell.temperature, cell.smc)

    def rows(self) -> list[tuple[Row, Infos]]:
        """Return the answers of complete cells by row."""
        found: dict[str, tuple[Row, Infos]] = {}
        for cell in self.complete():
            _, infos = found.setdefault(cell.label, (cell.row, {}))
            infos[cell.temperature] = [record.info for record in self.read(cell)]
        return list(found.values())

    def told(self, rows: list[tuple[Row, Infos]]) -> str:
        """Write the report of all complete cells."""
        exact = [infos for row, infos in rows if (row.smc or {}).get("mode") == EXACT]
        own = {"engine": COMMON, "seeds_a_cell": SEEDS_A_CELL}
        kept = {
            "provenance": provenance(self.settings() | own),
            "rows": [line(*one) for one in rows],
            "tilt of exact": tilt(exact),
        }
        numbers, page = (self.options.output_dir / name for name in OUTPUTS)
        numbers.write_text(json.dumps(kept, indent=1) + "\n")
        table = markdown(kept["rows"])
        page.write_text(table + "\n")
        return f"{table}\n\ntilt of exact: {kept['tilt of exact']}"

    def publish(self) -> None:
        self.require_all()
        copy([self.options.output_dir / name for name in OUTPUTS], PUBLISHED / self.name)


if __name__ == "__main__":
    as_script(Trees.main)
