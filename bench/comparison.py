"""Summarize the demo's answers as tables: one user first, then several at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from results import (
    Interval,
    ess_share,
    interval_cell,
    number_cell,
    resample_rate,
    wilson,
)
from tabulate import tabulate

from sglang_smc.tools.demo.chat import Answer
from sglang_smc.tools.demo.serving import tokens_per_pass


@dataclass(frozen=True)
class Contender:
    """One decoding method: a row of the table."""

    name: str
    slug: str
    server: str  # "smc", "target", "standalone" or "draft"
    smc: dict[str, Any] | None = None  # SMC request fields
    is_slow: bool = False  # gets fewer problems
    weighs: bool = False  # SMC with particle weights kept between rounds

    @property
    def uses_target(self) -> bool:
        return self.server != "draft"


@dataclass(frozen=True)
class Turn:
    """Answers to a block of problems, and the wall time of the block."""

    answers: list[Answer]
    seconds: float


@dataclass
class Run:
    """All turns of a contender, and the server's ``meta_info`` by request."""

    contender: Contender
    alone: list[Turn] = field(default_factory=list)  # one request at a time
    crowd: list[Turn] = field(default_factory=list)
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def answers(self) -> list[Answer]:
        return [answer for turn in (*self.alone, *self.crowd) for answer in turn.answers]

    def speeds(self, turns: Sequence[Turn]) -> list[float]:
        """Return the tokens per second of each turn."""
        return [self.tokens([turn]) / turn.seconds for turn in turns]

    def tokens(self, turns: Sequence[Turn]) -> int:
        ids = [answer.request_id for turn in turns for answer in turn.answers]
        return sum(self.infos[key]["completion_tokens"] for key in ids)


@dataclass(frozen=True)
class Speed:
    """Clients' measurements of some turns."""

    tokens_per_second: float
    to_ar: Interval | None  # over turns on the same problems, measured one after the other
    seconds_to_first: float
    seconds_per_request: float
    n: int


@dataclass(frozen=True)
class Row:
    """One contender's numbers; ``None`` where a number does not apply."""

    name: str
    alone: Speed
    crowd: Speed
    accuracy: Interval
    tokens_per_target_pass: float | None
    ess_share: float | None
    resample_rate: float | None


def row_of(run: Run, reference: Run) -> Row:
    """Return the row of a contender, compared with plain decoding of the same problems."""
    contender, infos = run.contender, list(run.infos.values())
    weighed = infos if contender.weighs else []
    right = sum(answer.right for answer in run.answers)
    return Row(
        name=contender.name,
        alone=_speed(run, run.alone, reference, reference.alone),
        crowd=_speed(run, run.crowd, reference, reference.crowd),
        accuracy=wilson(right, len(run.answers)),
        tokens_per_target_pass=tokens_per_pass(infos) if contender.uses_target else None,
        ess_share=ess_share(weighed),
        resample_rate=resample_rate(weighed),
    )


def _speed(run: Run, turns: Sequence[Turn], reference: Run, theirs: Sequence[Turn]) -> Speed:
    answers = [answer for turn in turns for answer in turn.answers]
    return Speed(
        tokens_per_second=run.tokens(turns) / sum(turn.seconds for turn in turns),
        to_ar=None if run is reference else _ratio(run, turns, reference, theirs),
        seconds_to_first=fmean(answer.seconds_to_first for answer in answers),
        seconds_per_request=fmean(answer.seconds for answer in answers),
        n=len(answers),
    )


def _ratio(run: Run, turns: Sequence[Turn], reference: Run, theirs: Sequence[Turn]) -> Interval:
    from speed.ratios import log_ratio  # slow to import, and needed only after the measurement

    pairs = zip(run.speeds(turns), reference.speeds(theirs), strict=False)  # slow ones: fewer
    ours, plain = zip(*pairs, strict=True)
    return log_ratio(ours, plain, paired=True).ratio()


SPEED_HEADERS = ("", "tokens / s", "times AR\n[95 %]", "first\ntoken", "whole\nanswer", "n")
HEADERS = (
    "",
    "accuracy\n[95 %]",
    "n",
    "tokens /\ntarget pass",
    "mean\nESS / N",
    "resampled\nrounds",
)


def tables(rows: Sequence[Row], concurrency: int, style: str = "simple") -> str:
    """Return three tables as text; styles are those of tabulate."""
    parts = {
        "One user: one request at a time": (SPEED_HEADERS, [_speeds(r, r.alone) for r in rows]),
        f"{concurrency} at a time": (SPEED_HEADERS, [_speeds(r, r.crowd) for r in rows]),
        "The answers of both": (HEADERS, [_cells(r) for r in rows]),
    }
    return "\n\n".join(f"**{title}**\n\n{_table(*part, style)}" for title, part in parts.items())


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]], style: str) -> str:
    names = headers if style == "simple" else [name.replace("\n", " ") for name in headers]
    align = ("left", *["right"] * (len(headers) - 1))
    return tabulate(lines, names, tablefmt=style, colalign=align, disable_numparse=True)


def _speeds(row: Row, speed: Speed) -> list[str]:
    return [
        row.name,
        f"{speed.tokens_per_second:.0f}",
        interval_cell(speed.to_ar, ".2f"),
        f"{1000 * speed.seconds_to_first:.0f} ms",
        f"{speed.seconds_per_request:.2f} s",
        str(speed.n),
    ]


def _cells(row: Row) -> list[str]:
    mean, low, high, n = row.accuracy
    return [
        row.name,
        f"{mean:.1%} [{100 * low:.1f}, {100 * high:.1f}]",
        str(n),
        number_cell(row.tokens_per_target_pass, ".2f"),
        number_cell(row.ess_share, ".2f"),
        number_cell(row.resample_rate, ".0%"),
    ]


def conclusions(row: Row, concurrency: int) -> str:
    """Return a sentence for each of the row's two speedups."""
    phases = {"One user": row.alone.to_ar, f"{concurrency} at a time": row.crowd.to_ar}
    return "\n".join(
        f"{name + ':':18} {row.name} runs at {interval_cell(ratio, '.2f')} times the speed of AR: "
        f"{_words(ratio)}."
        for name, ratio in phases.items()
        if ratio is not None
    )


def _words(ratio: Interval) -> str:
    if ratio.low > 1:
        return "faster"
    if ratio.high < 1:
        return "slower"
    return f"no difference that {ratio.n} turns can tell"


def answer_lines(run: Run) -> list[dict[str, Any]]:
    """Return an entry for each answer: the client's measurements and the server's ``meta_info``."""
    return [
        {"row": run.contender.name, **asdict(answer), "meta_info": run.infos[answer.request_id]}
        for answer in run.answers
    ]


def plain(row: Row) -> Mapping[str, Any]:
    """Return a row as JSON, with its intervals by name."""
    content = asdict(row)
    content["accuracy"] = row.accuracy._asdict()
    for name, speed in (("alone", row.alone), ("crowd", row.crowd)):
        content[name]["to_ar"] = speed.to_ar and speed.to_ar._asdict()
    return content
