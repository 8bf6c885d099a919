"""Measure what the plain command serves, beside plain decoding and fixed N and K.

    .venv/bin/python bench/speed --preset served --only 'claim-*'  # beside plain decoding, 35 min
    .venv/bin/python bench/speed --preset served                   # all, two hours and a half

The *default* server is started with a target, a draft and mode `exact`, and chooses N and K itself.
Users ask real prompts and take whole answers; one who is answered asks again, until a turn's are
through. In a turn every way to decode answers the same prompts, one after another, in another order
each time; a server that is not asked sleeps. Speeds are of all tokens, from the first request to
the last answer, and ratios are taken within turns. No request has a seed: with one it would keep
the server's N and K.

A cell goes on until its interval is narrow (`turns.AIM`), or its seconds are over. Servers have all
cores, as a server on its own has, since one works at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import study
from results import provenance
from speed import turns as of_turns
from speed.remote import RemoteEngine, TimedBatch, Work, running
from speed.runner import Attempt, Case, Clock, Entry, Records, Runner, Stage
from speed.served_report import REPORT, note, rows_of
from speed.texts import PAIRS, TEMPERATURE, ModelFolders, Question, ServedPair
from study import bar, code_fingerprint

from sglang_smc.options.request import Budget
from sglang_smc_tools.demo.serving import Launch

NAME = "served"
WARM_UP_TOKENS = 24
START_SECONDS = 25.0  # of a server
LEAST_ANSWERS = 2  # of a turn
#: KV slots of a server, enough for 32 users.
POOL = 24_576
#: Users and answers of a load that moves, and the pairs that get it.
PHASES = ((1, 6), (32, 128), (1, 6))
MOVING = ("head", "mixture")
MOVING_SECONDS = 600.0
KINDS = ("claim", "moving", "grid")
SETTINGS = {"temperature": TEMPERATURE, "phases": PHASES}
FORM = "{desc}{bar}| {elapsed}{postfix}"


class ServedWay(NamedTuple):
    """A way to decode: a server, and what requests ask of it."""

    name: str
    server: str
    smc: Mapping[str, int] = {}

    def work(self, questions: Sequence[Question], users: int) -> Work:
        """Return requests, so many at a time, for as long as there are any."""
        asked = {"custom_params": {"smc": dict(self.smc)}} if self.smc else {}
        params = [{"temperature": TEMPERATURE, **asked, **one.params} for one in questions]
        return Work([one.prompt for one in questions], params, at_once=users)


PLAIN = ServedWay("plain decoding", "plain")
DEFAULT = ServedWay(of_turns.DEFAULT, "default")
FIXED = "fixed"


def fixed(budget: Budget) -> ServedWay:
    """Return the way of a server that does not adapt, of which requests ask N and K."""
    return ServedWay("N={} K={}".format(*budget), FIXED, budget._asdict())


class ServedCell(NamedTuple):
    """What is measured at once: phases of users and answers, by ways to decode."""

    slug: str
    kind: str
    pair: ServedPair
    phases: Sequence[tuple[int, int]]
    ways: Sequence[ServedWay]
    seconds: float


def cells_of(kind: str, pair: ServedPair) -> list[ServedCell]:
    """Return the cells of a kind: ``claim``, ``grid`` or ``moving``."""
    each = list(map(fixed, pair.grid))
    ways = {"claim": [PLAIN, DEFAULT], "grid": [DEFAULT, *each], "moving": [DEFAULT, PLAIN, *each]}
    slug = f"{kind}-{pair.name}"
    chosen = ways[kind]
    if kind == "moving":
        return [ServedCell(slug, kind, pair, PHASES, chosen, MOVING_SECONDS)]
    sizes = [(users, max(pair.per_user * users, LEAST_ANSWERS)) for users in pair.users]
    seconds = pair.seconds * len(chosen) / 2
    return [ServedCell(f"{slug}-b{size[0]}", kind, pair, [size], chosen, seconds) for size in sizes]


def every_cell() -> dict[str, list[ServedCell]]:
    """Return the cells of each start of servers, by its name, the claim's first."""
    return {
        f"{kind}-{pair.name}": cells_of(kind, pair)
        for kind in KINDS
        for pair in PAIRS
        if kind != "moving" or pair.name in MOVING
    }


def launch_of(server: str, models: ModelFolders, grid: Sequence[Budget]) -> Launch:
    """Return the launch of a server, from the plain command; several share a machine's memory."""
    arguments: dict[str, Any] = {
        "model_path": str(models.target),
        "max_total_tokens": POOL,
        "sleep_on_idle": True,
        "watchdog_timeout": 900,
    }
    if server != PLAIN.server:
        arguments |= {
            "speculative_draft_model_path": str(models.draft),
            "speculative_algorithm": "SMC",
            "speculative_smc_mode": "exact",
        }
    if server == FIXED:
        arguments |= {
            "speculative_smc_num_particles": max(n for n, _ in grid),
            "speculative_num_steps": max(k for _, k in grid),
            "speculative_smc_adaptive": "off",
        }
    return Launch(arguments)


# --- Measuring


def measure(cells: Sequence[ServedCell], folder: Path, progress: Any, attempt: Attempt) -> None:
    """Measure the missing cells of one start of servers."""
    first = cells[0]
    models = first.pair.models(folder / "models")
    attempt.goes_on()
    with contextlib.ExitStack() as stack:
        engines = {}
        for server in dict.fromkeys(way.server for way in first.ways):
            log = folder / "logs" / f"{attempt.case.slug}-{server}.log"
            launch = launch_of(server, models, first.pair.grid)
            engines[server] = stack.enter_context(running(launch, log))
            attempt.goes_on()
            advance(progress, START_SECONDS)
        attempt.started = True
        for cell in (cell for cell in cells if cell.slug in attempt.missing):
            turns = turns_of(engines, cell, folder, progress, attempt)
            told = engines[DEFAULT.server].internal_state().get("smc")
            attempt.add(cell.slug, {"ratio": of_turns.told(turns), "turns": turns, "server": told})


def turns_of(
    engines: Mapping[str, RemoteEngine],
    cell: ServedCell,
    folder: Path,
    progress: Any,
    attempt: Attempt,
) -> list[Entry]:
    """Return the turns of a cell: as many as its ratios and its seconds ask for."""
    began = time.monotonic()
    found = list[Entry]()
    shown = 0.0
    warm_up(engines, cell, folder)
    for turn in endless(engines, cell, folder):
        attempt.goes_on()
        found.append(turn)
        spent = time.monotonic() - began
        progress.set_postfix_str(f"{cell.slug}: {of_turns.told(found)}")
        advance(progress, min(spent, cell.seconds) - shown)
        shown = min(spent, cell.seconds)
        if of_turns.is_over(found, cell.seconds - spent):
            break
    advance(progress, cell.seconds - shown)
    return found


def advance(progress: Any, seconds: float) -> None:
    """Advance the bar, and say how long the rest takes where no cell ends before its time."""
    progress.update(seconds)
    progress.set_description_str(f"at most {(progress.total - progress.n) / 60:.0f} minutes to go")


def warm_up(engines: Mapping[str, RemoteEngine], cell: ServedCell, folder: Path) -> None:
    """Have every way answer in short, as many as will ask at once: what is lazy is made then."""
    most = max(users for users, _ in cell.phases)
    for way in cell.ways:
        asked = cell.pair.questions(folder / "models", f"{cell.slug} warm-up", most)
        short = [
            one._replace(params=one.params | {"max_new_tokens": WARM_UP_TOKENS}) for one in asked
        ]
        engines[way.server].ask(way.work(short, most))


def endless(engines: Mapping[str, RemoteEngine], cell: ServedCell, folder: Path) -> Iterator[Entry]:
    """Yield turns: by way what each phase took, and the seconds of all."""
    turn = 0
    while True:
        began = time.monotonic()
        found = dict[str, list[Entry]]()
        asked = [
            cell.pair.questions(folder / "models", f"{cell.slug} {turn} {phase}", count)
            for phase, (_, count) in enumerate(cell.phases)
        ]
        at = turn % len(cell.ways)
        for way in (*cell.ways[at:], *cell.ways[:at]):
            found[way.name] = [
                _reduced(engines[way.server].ask(way.work(questions, users)))
                for questions, (users, _) in zip(asked, cell.phases, strict=True)
            ]
        yield {"ways": found, "took": time.monotonic() - began}
        turn += 1


def _reduced(batch: TimedBatch) -> Entry:
    """Return tokens, seconds, target passes and lengths of a phase."""
    return {
        "tokens": batch.tokens,
        "seconds": max(batch.end),
        "passes": sum(batch.passes),
        "first": fmean(batch.first),
        "lengths": [info["completion_tokens"] for info in batch.infos],
    }


# --- The study


def cases_of(folder: Path, progress: Any) -> list[Case]:
    """Return a case for each start of servers."""
    return [_case(slug, cells, folder, progress) for slug, cells in every_cell().items()]


def _case(slug: str, cells: Sequence[ServedCell], folder: Path, progress: Any) -> Case:
    first = cells[0]
    servers = list(dict.fromkeys(way.server for way in first.ways))
    models = ModelFolders(Path("TARGET"), Path("DRAFT"))
    shown = [str(launch_of(server, models, first.pair.grid)) for server in servers]
    shared = {"ways": [way.name for way in first.ways], "servers": shown, **code_fingerprint()}
    parts = {cell.slug: {"phases": cell.phases, **shared} for cell in cells}
    seconds = START_SECONDS * len(servers) + sum(cell.seconds for cell in cells)
    return Case(slug, parts, seconds, partial(measure, cells, folder, progress), "\n  ".join(shown))


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    folder = options.output_dir / NAME
    with bar(bar_format=FORM, disable=options.list) as progress:
        every = cases_of(folder, progress)
        cases = study.selected(every, options.only)
        study.prepare_folder(options.output_dir)
        records = Records([folder], [], provenance(SETTINGS))
        runner = Runner(records, Clock(options.minutes), fresh=options.fresh, say=progress.write)
        left = [case for case in cases if runner.missing(NAME, case)]
        if options.list:
            show(cases, left)
            return
        progress.reset(sum(case.seconds for case in left))
        advance(progress, 0.0)
        runner.run(Stage(NAME, "", lambda: cases))
    report(options, every, records)


def show(cases: Sequence[Case], left: Sequence[Case]) -> None:
    """Print what a run would start, and the most that it takes."""
    for case in cases:
        state = f"{case.seconds / 60:.0f} minutes at most" if case in left else "measured"
        print(f"{case.slug}: {', '.join(case.parts)}; {state}\n  {case.shown}")
    print(f"{sum(case.seconds for case in left) / 60:.0f} minutes at most in all")


def report(options: argparse.Namespace, every: Sequence[Case], records: Records) -> None:
    """Write what is measured as asked now, and publish it if that is asked for."""
    folder = options.output_dir / NAME
    done = records.of(NAME)
    parts = [part for case in every for part in case.parts.items()]
    found = {part: done[part] for part, one in parts if not records.lacks(NAME, part, one)}
    each = (cell for cells in every_cell().values() for cell in cells if cell.slug in found)
    rows = [
        row
        for cell in each
        for row in rows_of(
            cell.kind, cell.pair.title, [u for u, _ in cell.phases], found[cell.slug]
        )
    ]
    if not rows:
        raise study.BenchError("Nothing was measured: the lines above say why.")
    print(f"\n{REPORT.write(folder, rows, SETTINGS, note)}\nAll is in {folder}/.")
    if options.publish:
        REPORT.publish(folder, study.PUBLISHED / "speed" / NAME)
