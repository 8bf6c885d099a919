"""How an answer streams: in how many chunks, and how long the reader waits for the next one.

    .venv/bin/python bench/streams.py                # all modes, some minutes
    .venv/bin/python bench/streams.py --answers 20   # a quick look

One request at a time, as one user asks. A silence is counted in rounds, from one chunk with new
tokens to the next, as a share of the answer's rounds: that does not depend on the machine. Seconds
stand beside it. Answers of other lengths than `LENGTHS` are left out, since the share of one round
depends on how many there are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from fidelity.engines import EngineAsker, running
from fidelity.measure import MAX_TOKENS
from fidelity.stats import mean_interval
from pair.task import held_out, messages
from results import Interval, interval_cell, markdown_table, number_cell, provenance
from study import PAIR, PUBLISHED, as_script, bar, copy, main_of, parser, positive, prepare_folder

from sglang_smc.options.server import DEFAULTS, LONG_LAG

#: Beyond the problems of the fidelity tables and of the demo.
FIRST_PROBLEM = 30_000
#: Tokens of the answers that count: around 80.
LENGTHS = range(70, 91)
SIZES = {"num_particles": DEFAULTS.num_particles, "num_steps": DEFAULTS.num_steps}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "AR, target": ("target", {}),
    "smc, the default": ("smc", {"mode": "smc"}),
    f"smc, lag {LONG_LAG}": ("smc", {"mode": "smc", "max_lag": LONG_LAG}),
    "auto": ("smc", {"mode": "auto"}),
    "exact": ("smc", {"mode": "exact"}),
}
OUTPUTS = ("streams.json", "streams.md")


class Chunk(NamedTuple):
    """What a reader sees at once."""

    tokens: int  # of the answer so far
    rounds: int  # so far
    seconds: float  # since the request was sent


class Stream(NamedTuple):
    """One streamed answer, as shares of the whole."""

    chunks: int
    silence: float  # the longest, of its rounds
    seconds_of_silence: float  # the longest, of its time


@dataclass(frozen=True)
class Row:
    """The streams of one kind."""

    label: str
    answers: int
    chunks: Interval | None
    silence: Interval | None
    seconds_of_silence: Interval | None


def stream_of(chunks: Sequence[Chunk]) -> Stream:
    """The shares of one answer; ``chunks`` are those with new tokens."""
    longest = max(after.rounds - before.rounds for before, after in pairwise(chunks))
    waits = (after.seconds - before.seconds for before, after in pairwise(chunks))
    whole = chunks[-1].seconds - chunks[0].seconds
    return Stream(len(chunks), longest / chunks[-1].rounds, max(waits) / whole)


def chunks_of(engine: Any, prompt: str, params: dict[str, Any]) -> Iterator[Chunk]:
    """The chunks with new tokens, in order."""
    began, tokens = time.perf_counter(), 0
    for chunk in engine.generate(prompt, params, stream=True):
        info = chunk["meta_info"]
        if info["completion_tokens"] > tokens:
            tokens = info["completion_tokens"]
            rounds = info.get("spec_smc_rounds_ct", tokens)  # AR: a token each
            yield Chunk(tokens, rounds, time.perf_counter() - began)


def streams(asker: EngineAsker, smc: dict[str, Any], options: argparse.Namespace) -> list[Stream]:
    """Stream so many answers of the lengths that count; others are asked for and left out."""
    found: list[Stream] = []
    index = FIRST_PROBLEM
    with bar(total=options.answers, desc="answers", leave=False) as progress:
        while len(found) < options.answers:
            chunks = list(chunks_of(*_question(asker, index, smc, options.temperature)))
            index += 1
            if chunks[-1].tokens in LENGTHS:
                found.append(stream_of(chunks))
                progress.update()
    return found


def _question(
    asker: EngineAsker, index: int, smc: dict[str, Any], temperature: float
) -> tuple[Any, str, dict[str, Any]]:
    params: dict[str, Any] = {
        "temperature": temperature,
        "max_new_tokens": MAX_TOKENS,
        "sampling_seed": index,
    }
    if smc:
        params["custom_params"] = {"smc": {**SIZES, **smc}}
    return asker.engine, asker.prompt(messages(held_out(index))), params


def measure(options: argparse.Namespace) -> list[Row]:
    """All kinds, engine by engine."""
    rows = {}
    for name in dict.fromkeys(engine for engine, _ in KINDS.values()):
        with running(name, PAIR) as asker:
            assert isinstance(asker, EngineAsker)
            for label, (engine, smc) in KINDS.items():
                if engine == name:
                    print(f"{label} ...", flush=True)
                    rows[label] = row_of(label, streams(asker, smc, options))
    return [rows[label] for label in KINDS]


def row_of(label: str, found: Sequence[Stream]) -> Row:
    """Means over answers."""
    columns = (
        mean_interval([float(value) for value in column]) for column in zip(*found, strict=True)
    )
    return Row(label, len(found), *columns)


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        [
            row.label,
            number_cell(row.chunks.mean if row.chunks else None, ".1f"),
            f"{interval_cell(row.silence, '.1f', 100)} %",
            f"{interval_cell(row.seconds_of_silence, '.1f', 100)} %",
        ]
        for row in rows
    ]
    headers = ["", "chunks an answer", "longest silence, of its rounds", "of its seconds"]
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
