"""Measure what speculative decoding leaves of the prefix cache over chats of many turns.

    .venv/bin/python bench/chats                      # ready-made servers on this CPU, half an hour
    .venv/bin/python bench/chats --only '*-tight'     # the pool that holds two thirds of the chats
    .venv/bin/python bench/chats --publish            # and into the table of docs/operations.md

Eight chats go on at once, ten turns each. A turn's prompt is the whole chat so far, of which the
radix cache has the turns before, unless others took their slots. All servers of a pool run beside
each other and play the same chats in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import study
from intervals import Interval, mean_of, paired_ratio_of_ratios, ratio, speed_ratio
from pair.task import held_out
from results import Report, interval_cell, table
from speed.remote import FLUSH, RemoteEngine, running
from study import PAIR, PUBLISHED, REPOSITORY, Log, bar, write_between

from sglang_smc_tools.demo.serving import Launch

CHATS = 8
TURNS = 10
ANSWER = 24  # tokens of each turn
TEMPERATURE = 0.7
PLAIN = "plain"
PAGE = REPOSITORY / "docs" / "operations.md"
MARKS = "<!-- chats:begin -->", "<!-- chats:end -->"
COMMON = {
    "device": "cpu",
    "dtype": "float32",
    "model_path": str(PAIR / "target"),
    "context_length": 1024,
    "max_running_requests": CHATS,
    "log_level": "error",
    "sleep_on_idle": True,  # while others play
}
#: KV slots: of all chats to their ends and more, and of about two thirds of them.
POOLS = {"roomy": 12_000, "tight": 4_600}
HEAD = {"speculative_draft_model_path": str(PAIR / "eagle3"), "speculative_num_steps": 5}
SERVERS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "EAGLE-3": {
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 16,
        **HEAD,
    },
    "SMC": {
        "speculative_algorithm": "SMC",
        "speculative_smc_mode": "exact",
        "speculative_smc_adaptive": "off",
        "speculative_smc_num_particles": 4,
        **HEAD,
    },
}


@dataclass(frozen=True)
class ChatCell:
    """A server with a pool."""

    server: str
    pool: str

    @property
    def slug(self) -> str:
        return study.slug_of(f"{self.server} {self.pool}")

    @property
    def launch(self) -> Launch:
        pool = {"max_total_tokens": POOLS[self.pool]}
        return Launch({**COMMON, **pool, **SERVERS[self.server]}, label=self.slug)


def cells() -> list[ChatCell]:
    """Return all cells, those of one pool together."""
    return [ChatCell(server, pool) for pool in POOLS for server in SERVERS]


class PlayedChats(NamedTuple):
    """What was counted of all chats of a repeat; lists are by chat, without its first turn."""

    prompt: list[int]  # tokens
    cached: list[int]  # of them, found in the cache
    seconds: float  # of all turns


# --- Chats


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PAIR / "target")


def question(repeat: int, chat: int, turn: int) -> list[int]:
    """Return the token ids of what a user says."""
    item = held_out((repeat * CHATS + chat) * TURNS + turn)
    return _tokenizer().encode(f"{item.question}\n", add_special_tokens=turn == 0)


def play(engine: RemoteEngine, repeat: int) -> PlayedChats:
    """Play all chats at once, from an empty cache."""
    engine.post(FLUSH)
    began = time.perf_counter()
    with ThreadPoolExecutor(CHATS) as pool:
        found = list(pool.map(lambda chat: _play_one(engine, repeat, chat), range(CHATS)))
    prompt, cached = zip(*found, strict=True)
    return PlayedChats(list(prompt), list(cached), time.perf_counter() - began)


def _play_one(engine: RemoteEngine, repeat: int, chat: int) -> tuple[int, int]:
    """Play a chat; return its tokens of prompts, and those found in the cache."""
    ids: list[int] = []
    read = 0
    cached = 0
    for turn in range(TURNS):
        ids += question(repeat, chat, turn)
        params = {
            "temperature": TEMPERATURE,
            "max_new_tokens": ANSWER,
            "ignore_eos": True,
            "sampling_seed": (repeat * CHATS + chat) * TURNS + turn,
        }
        told = engine.generate(input_ids=ids, sampling_params=params)
        if turn:
            read += len(ids)
            cached += told["meta_info"]["cached_tokens"]
        ids += told["output_ids"]
    return read, cached


# --- Measurement


def identity(cell: ChatCell) -> dict[str, Any]:
    """Return what a cell's numbers depend on."""
    arguments = {key: value for key, value in cell.launch.arguments.items() if "path" not in key}
    sizes = {"chats": CHATS, "turns": TURNS, "answer": ANSWER, "temperature": TEMPERATURE}
    return study.code_fingerprint() | {"cell": cell.slug, "engine": arguments} | sizes


def measure(logs: Mapping[ChatCell, Log], repeats: int, folder: Path) -> None:
    """Measure what is missing of cells of one pool; servers take turns to begin."""
    there = {cell: len(log.read()) for cell, log in logs.items()}
    missing = [cell for cell, count in there.items() if count < repeats]
    if not missing:
        return
    with contextlib.ExitStack() as stack:
        engines = {
            cell: stack.enter_context(running(cell.launch, folder / f"{cell.slug}.log"))
            for cell in missing
        }
        for engine in engines.values():
            engine.generate(input_ids=question(0, 0, 0), sampling_params={"max_new_tokens": ANSWER})
        total = sum(repeats - there[cell] for cell in missing)
        progress = stack.enter_context(bar(total=total, unit="repeat", desc=missing[0].pool))
        for repeat in range(repeats):
            for cell in missing:
                if repeat >= there[cell]:
                    with logs[cell].writing() as append:
                        append({"repeat": repeat, **play(engines[cell], repeat)._asdict()})
                    progress.update()
            missing.reverse()


# --- Results


@dataclass(frozen=True)
class ChatRow:
    """What a cell has, and that beside plain decoding in the same pool."""

    pool: str
    server: str
    repeats: int
    hits: Interval  # share of prompts' tokens that were in the cache
    hits_to_plain: Interval | None
    seconds: Interval  # of all chats
    time_to_plain: Interval | None


def rows_of(played: Mapping[ChatCell, Sequence[PlayedChats]]) -> Iterator[ChatRow]:
    """Yield a row for each cell that has been played."""
    for cell, repeats in played.items():
        if not repeats:
            continue
        plain = played.get(ChatCell(PLAIN, cell.pool), ())
        both = list(zip(repeats, plain, strict=False)) if cell.server != PLAIN else []
        pairs = [one for one, _ in both], [other for _, other in both]
        yield ChatRow(
            pool=cell.pool,
            server=cell.server,
            repeats=len(repeats),
            hits=ratio(*_counts(repeats)),
            hits_to_plain=paired_ratio_of_ratios(*map(_counts, pairs)) if both else None,
            seconds=mean_of([one.seconds for one in repeats]),
            time_to_plain=speed_ratio([math.log(a.seconds / b.seconds) for a, b in both])
            if both
            else None,
        )


def _counts(repeats: Sequence[PlayedChats]) -> tuple[np.ndarray, np.ndarray]:
    """Return the cached tokens of all chats ``[n]``, and those of their prompts."""
    cached = np.array([one.cached for one in repeats], dtype=float)
    return cached.ravel(), np.array([one.prompt for one in repeats], dtype=float).ravel()


COLUMNS = {
    "pool": lambda row: row.pool,
    "server": lambda row: row.server,
    "cached, %": lambda row: interval_cell(row.hits, ".1f", 100),
    "to plain decoding": lambda row: interval_cell(row.hits_to_plain, ".3f"),
    "seconds": lambda row: interval_cell(row.seconds, ".1f"),
    "times plain decoding": lambda row: interval_cell(row.time_to_plain, ".2f"),
}


def markdown(rows: Sequence[ChatRow], note: str) -> str:
    """Return the table, below a note."""
    return f"{note}\n\n{table(COLUMNS, rows)}\n"


def note_of(origin: Mapping[str, Any]) -> str:
    """Return the text above the table."""
    return (
        f"{CHATS} chats of {TURNS} turns at once, the shipped target with its EAGLE-3 head in "
        f"float32, {ANSWER} tokens a turn, {origin['settings']['repeats']} repeats, on "
        f"{origin['hardware']}, {origin['date'][:10]}. Cached: of the tokens of prompts after the "
        f"first turn. Pools have {POOLS['roomy']:,} and {POOLS['tight']:,} slots; EAGLE-3 is "
        "SGLang's, a tree of 16 tokens, SMC `exact`, N = 4, K = 5. In brackets 95 % intervals."
    )


REPORT = Report("chats", ChatRow, markdown)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells; return exit status 0 if it completes."""
    made = study.parser("chats", "What speculation leaves of the prefix cache in long chats.")
    study.add_selection(made)
    made.add_argument("--repeats", type=study.positive, default=5, help="of all chats")
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options), study.GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    grid = study.selected(cells(), options.only)
    folder: Path = options.output_dir
    if options.list:
        print(*(cell.slug for cell in grid), sep="\n")
        return
    study.prepare_folder(folder)
    logs = {cell: Log(folder / f"{cell.slug}.jsonl", identity(cell)) for cell in grid}
    if options.fresh:
        for log in logs.values():
            log.drop()
    for pool in POOLS:
        measure(
            {cell: log for cell, log in logs.items() if cell.pool == pool}, options.repeats, folder
        )
    rows = list(rows_of({cell: _played(log) for cell, log in logs.items()}))
    print(REPORT.write(folder, rows, {"repeats": options.repeats}, note_of))
    if options.publish:
        REPORT.publish(folder, PUBLISHED / "chats")
        write_between(PAGE, MARKS, table(COLUMNS, REPORT.read(folder)))


def _played(log: Log) -> list[PlayedChats]:
    return [PlayedChats(entry["prompt"], entry["cached"], entry["seconds"]) for entry in log.read()]
