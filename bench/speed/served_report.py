"""Write the tables of what the plain command serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intervals import Interval
from results import Report, interval_cell, markdown_table
from speed import turns as of
from speed.runner import Entry

#: What the default server is held to, beside plain decoding and beside the best fixed N and K.
LEAST_TO_PLAIN = 0.95
LEAST_TO_FIXED = 0.95
LEAST_OF_MOVING = 0.97


@dataclass(frozen=True, kw_only=True)
class ServedRow:
    """The default server beside another way to decode, in a phase of a cell."""

    kind: str  # claim, grid or moving
    pair: str
    users: int
    phase: int
    beside: str
    rank: int  # 1: the fastest of all but the default, there
    tokens_per_second: Interval  # of all users
    beside_tokens_per_second: Interval
    ratio: Interval  # of the two, within turns
    tokens_per_pass: float
    shortest: int  # tokens of an answer
    longest: int


def rows_of(kind: str, pair: str, users: Sequence[int], entry: Entry) -> Iterable[ServedRow]:
    """Yield a row for each phase of a cell and each way but the default; none of a failure."""
    turns = entry.get("turns", ())
    for phase in range(of.num_phases(turns) if turns else 0):
        lengths = [n for turn in turns for n in turn["ways"][of.DEFAULT][phase]["lengths"]]
        for rank, way in enumerate(of.rivals(turns, phase), start=1):
            yield ServedRow(
                kind=kind,
                pair=pair,
                users=users[phase],
                phase=phase,
                beside=way,
                rank=rank,
                tokens_per_second=of.speed_of(turns, of.DEFAULT, phase),
                beside_tokens_per_second=of.speed_of(turns, way, phase),
                ratio=of.ratio_to(turns, way, phase),
                tokens_per_pass=of.tokens_a_pass(turns, phase),
                shortest=min(lengths),
                longest=max(lengths),
            )


def verdict(ratio: Interval, least: float) -> str:
    """Return whether a ratio is at least so much, as far as its interval tells."""
    if ratio.low >= least:
        return "yes"
    return "**no**" if ratio.high < least else "open"


def markdown(rows: Sequence[ServedRow], note: str) -> str:
    """Return a table of each kind, below a note."""
    parts = ["# What the plain command serves", note]
    for kind, (title, least) in SECTIONS.items():
        if here := [row for row in rows if row.kind == kind and (row.rank == 1 or kind == "grid")]:
            parts.append(f"## {title}\n\n{_table(here, least)}")
    return "\n\n".join(parts) + "\n"


SECTIONS = {
    "claim": ("Beside plain decoding", LEAST_TO_PLAIN),
    "grid": ("Beside fixed N and K", LEAST_TO_FIXED),
    "moving": ("A load that moves, beside the best fixed setting of each phase", LEAST_OF_MOVING),
}


def _table(rows: Sequence[ServedRow], least: float) -> str:
    headers = ("", "users", "beside", "tokens / s", "the other's", "times it")
    headers += ("turns", "tokens / pass", "lengths", f"{least} at least")
    return markdown_table(headers, [_line(row, least) for row in rows])


def _line(row: ServedRow, least: float) -> list[str]:
    return [
        row.pair,
        str(row.users),
        row.beside,
        f"{row.tokens_per_second.mean:,.1f}",
        f"{row.beside_tokens_per_second.mean:,.1f}",
        interval_cell(row.ratio, ".2f"),
        str(row.ratio.n),
        f"{row.tokens_per_pass:.2f}",
        f"{row.shortest} to {row.longest}",
        verdict(row.ratio, least) if row.rank == 1 else "",
    ]


def note(origin: Mapping[str, Any]) -> str:
    """Return what the tables stand on."""
    return (
        "The default server is started with a target, a draft and mode `exact`, and nothing else; "
        "its N and K are its own. Real prompts, whole answers, no seeds, T = "
        f"{origin['settings']['temperature']}: a user who is answered asks again, until a turn's "
        "prompts are through. Speeds are of all tokens of a turn, from the first request to the "
        "last answer, prompts included. In a turn all ways to decode answer the same prompts, one "
        "server after another, while the others sleep; ratios are taken within turns, with 95 % "
        f"intervals. Cells end once these are narrow, or by time. {origin['hardware']}, load "
        f"{origin['load_average'][0]:.1f} at the end, {origin['date'][:10]}, commit "
        f"{origin['git_sha']}."
    )


REPORT = Report("served", ServedRow, markdown)
