"""Measure tokens a target pass of SMC beside SGLang's own chains and trees, on the shipped pair.

    .venv/bin/python bench/trees.py                 # all rows, a quarter of an hour
    .venv/bin/python bench/trees.py --problems 10   # a quick look

Every row answers the same problems at temperatures 0, 0.7 and 1. Each cell has seeds of its own, so
that the tilts that a server measures of its `exact` answers are independent from cell to cell.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from answers import COMMON, Asker, at_least_two, request, started
from fidelity.grid import AUTO, EXACT
from fidelity.measure import WARM_UP, grade
from fidelity.nats import ratio, watched_tilt
from results import Interval, interval_cell, markdown_table, provenance
from study import PUBLISHED, as_script, bar, copy, main_of, parser, prepare_folder

TEMPERATURES = (0.0, 0.7, 1.0)
#: Beyond the problems of all other studies.
FIRST_PROBLEM = 5_400_000
#: Seeds of a cell begin so far behind those of the cell before.
SEEDS_A_CELL = 100_000
MODEL, HEAD = "draft", "eagle3"
NAMES = {MODEL: "draft model", HEAD: "EAGLE-3 head"}
ALGORITHMS = {MODEL: "STANDALONE", HEAD: "EAGLE3"}
#: The widest N and K of the rows, of which each request asks for a part.
SMC = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": 17,
    "speculative_smc_num_particles": 8,
}
OUTPUTS = ("trees.json", "trees.md")


@dataclass(frozen=True)
class Row:
    """One way to draft and verify.

    Attributes:
        draft: the checkpoint's folder beside the target.
        rows: tokens that a pass of the target reads.
        passes: draft passes a round, with a head's own pass over what the target has read.
        engine: keywords of `sgl.Engine` besides the models.
        smc: what requests ask of an SMC engine; None for SGLang's own speculation.
    """

    name: str
    draft: str
    rows: int
    passes: int
    engine: dict[str, Any] = field(hash=False)
    smc: dict[str, Any] | None = field(default=None, hash=False)


def stock(draft: str, topk: int, steps: int, tokens: int) -> Row:
    """Return SGLang's own tree, or its chain of the likeliest tokens where ``topk`` is 1."""
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


#: 4 / 5 / 8 is SGLang's default for a Llama target, 72 rows are those of N = K = 8.
ROWS = (
    *(stock(HEAD, *shape) for shape in ((4, 5, 8), (1, 8, 9), (10, 8, 72))),
    *(stock(MODEL, *shape) for shape in ((1, 8, 9), (8, 8, 72))),
    *(
        ours(draft, *setting)
        for draft in (HEAD, MODEL)
        for setting in ((EXACT, 1, 8), (EXACT, 8, 8), (EXACT, 4, 17), (AUTO, 8, 8))
    ),
)


def is_measured(row: Row, temperature: float) -> bool:
    """Return whether a cell is its own: at temperature 0 every N and mode runs one chain."""
    twin = row.smc and row.smc["num_particles"] == 8
    return bool(temperature) or not twin


def ask(asker: Asker, row: Row, temperature: float, problems: int) -> list[dict]:
    """Ask all problems of one cell; return what the server tells of each answer."""
    place = ROWS.index(row) * len(TEMPERATURES) + TEMPERATURES.index(temperature)
    asked = [
        request(index, index + place * SEEDS_A_CELL, temperature, row.smc)
        for index in range(FIRST_PROBLEM, FIRST_PROBLEM + problems)
    ]
    list(asker.ask([request(WARM_UP, WARM_UP, temperature, row.smc)]))
    name = f"{row.name}, temperature {temperature:g}"
    replies = bar(iterable=asker.ask(asked), total=problems, desc=name)
    return [grade(reply, part=0, at=0.0).info for reply in replies]


def yielded(infos: Sequence[dict[str, Any]]) -> Interval:
    """Return tokens a target pass, prompts and the tokens that they yield left out."""
    tokens = np.array([info["completion_tokens"] - 1 for info in infos], dtype=float)
    return ratio(tokens, np.array([info["spec_verify_ct"] for info in infos]))


def measure(problems: int) -> Iterator[tuple[Row, dict[float, list[dict]]]]:
    """Yield what the answers of each row tell, by temperature, engine by engine."""
    for (draft, engine), group in groupby(ROWS, key=lambda row: (row.draft, row.engine)):
        with started(COMMON | engine, "target", draft) as asker:
            for row in group:
                own = [t for t in TEMPERATURES if is_measured(row, t)]
                yield row, {t: ask(asker, row, t, problems) for t in own}


def line(row: Row, infos: dict[float, list[dict]]) -> dict[str, Any]:
    """Return a row's numbers as they are kept."""
    tokens = {f"{t:g}": yielded(found)._asdict() for t, found in infos.items()}
    return asdict(row) | {"tokens": tokens, "tilt": tilt([(row, infos)])}


def tilt(found: Sequence[tuple[Row, dict[float, list[dict]]]]) -> dict[str, float] | None:
    """Return the tilt that servers measure of these rows' sampled answers, None if they do not."""
    told = watched_tilt([info for _, by in found for t in by if t for info in by[t]])
    return None if told is None else told._asdict()


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    headers = ["", "rows", "draft passes", *(f"T = {t:g}" for t in TEMPERATURES)]
    lines = [
        [
            row["name"],
            str(row["rows"]),
            str(row["passes"]),
            *(
                interval_cell(Interval(**row["tokens"][f"{t:g}"]), ".2f")
                if f"{t:g}" in row["tokens"]
                else ""
                for t in TEMPERATURES
            ),
        ]
        for row in rows
    ]
    return markdown_table(headers, lines)


def report(options: argparse.Namespace) -> None:
    """Measure and write down."""
    prepare_folder(options.output_dir)
    found = list(measure(options.problems))
    exact = [one for one in found if (one[0].smc or {}).get("mode") == EXACT]
    settings = {"problems": options.problems, "first_problem": FIRST_PROBLEM, "engine": COMMON}
    kept = {
        "provenance": provenance(settings | {"seeds_a_cell": SEEDS_A_CELL}),
        "rows": [line(*one) for one in found],
        "tilt of exact": tilt(exact),
    }
    text, page = (options.output_dir / name for name in OUTPUTS)
    text.write_text(json.dumps(kept, indent=1) + "\n")
    page.write_text(markdown(kept["rows"]) + "\n")
    print(f"\n{page.read_text()}\ntilt of exact: {kept['tilt of exact']}")
    if options.publish:
        copy((text, page), PUBLISHED / "trees")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    found = parser("trees", "Tokens a target pass of SMC, and of SGLang's own chains and trees.")
    found.add_argument("--problems", type=at_least_two, default=100, help="for each cell")
    found.add_argument(
        "--publish", action="store_true", help="also copy the results to bench/results/trees"
    )
    return found.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 where it came to its end."""
    options = parse_arguments(argv)
    return main_of(lambda: report(options), "Nothing was kept.")


if __name__ == "__main__":
    as_script(main)
