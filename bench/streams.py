"""How an answer streams: in how many chunks, and how long the reader waits for the next one.

    .venv/bin/python bench/streams.py                # all modes, some minutes
    .venv/bin/python bench/streams.py --answers 20   # a quick look

One request at a time, as one user asks, on a machine that does nothing else. A silence is the time
from one chunk with new tokens to the next, as a share of the time from the first to the last: which
hardly depends on how fast the machine is, since rounds take about as long as each other. Answers of
other lengths than `LENGTHS` are left out, since the share of one round depends on how many there
are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple

from fidelity.engines import EngineAsker, running
from fidelity.grid import AR_TARGET, AUTO, DEFAULT, EXACT, LATE, SIZES, Cell, Kind, kinds
from fidelity.measure import request
from fidelity.stats import mean_interval
from results import Interval, interval_cell, markdown_table, number_cell, provenance
from study import PAIR, PUBLISHED, as_script, bar, copy, main_of, parser, positive, prepare_folder

#: Beyond the problems of the fidelity tables and of the demo.
FIRST_PROBLEM = 30_000
#: Tokens of the answers that count: around 80.
LENGTHS = range(70, 91)
FAMILIES = (AR_TARGET, DEFAULT, LATE, AUTO, EXACT)
OUTPUTS = ("streams.json", "streams.md")


class Chunk(NamedTuple):
    """What a reader sees at once."""

    tokens: int  # of the answer so far
    seconds: float  # since the request was sent


class Stream(NamedTuple):
    """One streamed answer, as shares of the whole."""

    chunks: int
    silence: float  # the longest


@dataclass(frozen=True)
class Row:
    """The streams of one kind."""

    label: str
    answers: int
    chunks: Interval | None
    silence: Interval | None


def stream_of(chunks: Sequence[Chunk]) -> Stream:
    """The shares of one answer; ``chunks`` are those with new tokens."""
    waits = (after.seconds - before.seconds for before, after in pairwise(chunks))
    return Stream(len(chunks), max(waits) / (chunks[-1].seconds - chunks[0].seconds))


def chunks_of(infos: Iterable[dict[str, Any]]) -> Iterator[Chunk]:
    """The chunks with new tokens, of what all of a stream tell as they come."""
    began, tokens = time.perf_counter(), 0
    for info in infos:
        if info["completion_tokens"] > tokens:
            tokens = info["completion_tokens"]
            yield Chunk(tokens, time.perf_counter() - began)


def streams(asker: EngineAsker, cell: Cell, answers: int) -> list[Stream]:
    """Stream so many answers of the lengths that count; others are asked for and left out."""
    found: list[Stream] = []
    with bar(total=answers, desc=cell.name) as progress:
        for index in count(FIRST_PROBLEM):
            chunks = list(chunks_of(asker.stream(request(cell, index))))
            if chunks[-1].tokens in LENGTHS:
                found.append(stream_of(chunks))
                progress.update()
            if len(found) == answers:
                break
    return found


def measure(options: argparse.Namespace) -> list[Row]:
    """All kinds, engine by engine."""
    by_family = {kind.family: kind for kind in kinds()}
    wanted = [by_family[family] for family in FAMILIES]
    rows = {}
    for name in dict.fromkeys(kind.engine for kind in wanted):
        with running(name, PAIR) as asker:
            assert isinstance(asker, EngineAsker)
            for kind in (kind for kind in wanted if kind.engine == name):
                found = streams(asker, Cell(kind, options.temperature), options.answers)
                rows[kind] = row_of(kind, found)
    return [rows[kind] for kind in wanted]


def row_of(kind: Kind, found: Sequence[Stream]) -> Row:
    """Means over answers."""
    columns = (
        mean_interval([float(value) for value in column]) for column in zip(*found, strict=True)
    )
    return Row(kind.name, len(found), *columns)


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        [
            row.label,
            number_cell(row.chunks.mean if row.chunks else None, ".1f"),
            f"{interval_cell(row.silence, '.1f', 100)} %",
        ]
        for row in rows
    ]
    headers = ["", "chunks an answer", "longest silence, of its time"]
    return markdown_table(headers, lines)


def report(options: argparse.Namespace) -> None:
    """Measure and write down."""
    prepare_folder(options.output_dir)
    rows = measure(options)
    table = markdown(rows)
    settings = {"answers": options.answers, "temperature": options.temperature, **SIZES}
    lengths = {"first": LENGTHS[0], "last": LENGTHS[-1]}
    found = {
        "provenance": provenance({**settings, "tokens": lengths, "first_problem": FIRST_PROBLEM}),
        "rows": [asdict(row) for row in rows],
    }
    text, page = (options.output_dir / name for name in OUTPUTS)
    text.write_text(json.dumps(found, indent=1) + "\n")
    page.write_text(table + "\n")
    print(f"\n{table}\n")
    if options.publish:
        copy((text, page), PUBLISHED / "streams")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    found = parser("streams", "Chunks and silences of streamed answers.")
    add = found.add_argument
    add("--answers", type=positive, default=60, help="of some 80 tokens, for each kind")
    add("--temperature", type=float, default=0.7)
    add("--publish", action="store_true", help="also copy the results to bench/results/streams")
    return found.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 where it came to its end."""
    options = parse_arguments(argv)
    return main_of(lambda: report(options), "Nothing was kept.")


if __name__ == "__main__":
    as_script(main)
