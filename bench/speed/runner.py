"""Run the cases of stages within a call's time, and store results that a later call continues.

Results are lines of JSON, each a call's provenance or a result; they may come from another machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from study import BenchError, matching, whole_lines

RESULTS = "results.jsonl"
#: Seconds without a result after which a case is treated as hanging; one that is expected to take
#: longer has `PATIENCE` times its seconds.
LEAST_PATIENCE = 120.0
PATIENCE = 1.5

Entry = dict[str, Any]
#: The last result of each part, by stage.
Stages = dict[str, dict[str, Entry]]


def machine_of(call: Mapping[str, Any]) -> Entry:
    """Return the part of identities that keeps results of two machines or releases apart."""
    driver = (call.get("gpu") or {}).get("driver_version")
    sglang = call["versions"].get("sglang")
    return {"hardware": call["hardware"], "driver": driver, "sglang": sglang}


def machine_name(identity: Mapping[str, Any]) -> str:
    """Return a machine and its SGLang in words."""
    return "{hardware}, driver {driver}, SGLang {sglang}".format(**identity)


def _entries(folders: Iterable[Path]) -> list[Entry]:
    """Return calls and results, each once; older results get their machine from their call."""
    entries = [one for folder in folders for one in whole_lines(folder / RESULTS)]
    calls = {one["call"]: one["provenance"] for one in entries if "provenance" in one}
    for one in (one for one in entries if "stage" in one):
        one["identity"] = {**one["identity"], **machine_of(calls[one["call"]])}
        one["identity"].get("engine", {}).pop("log_level", None)  # see `settings_of`
    return list({json.dumps(one): one for one in entries}.values())


def _stages_of(entries: Iterable[Entry], machine: str) -> Stages:
    stages: Stages = {}
    for one in entries:
        if "stage" in one and machine_name(one["identity"]) == machine:
            stages.setdefault(one["stage"], {})[one["part"]] = one
    return stages


def read_results(folder: Path) -> tuple[dict[str, Stages], dict[str, Entry]]:
    """Return the last result of each part by machine and stage, and the calls behind them."""
    entries = _entries([folder])
    names = dict.fromkeys(machine_name(one["identity"]) for one in entries if "stage" in one)
    machines = {name: _stages_of(entries, name) for name in names}
    stages = (parts for found in machines.values() for parts in found.values())
    used = {one["call"] for parts in stages for one in parts.values()}
    calls = {one["call"]: one["provenance"] for one in entries if "provenance" in one}
    return machines, {name: found for name, found in calls.items() if name in used}


class Records:
    """All stored results, and the files for new ones.

    Args:
        writes: folders that are brought to hold every result.
        reads: further folders with results of earlier calls.
        call: provenance of this call.
    """

    def __init__(
        self, writes: Sequence[Path], reads: Sequence[Path], call: Mapping[str, Any]
    ) -> None:
        self._found = _entries(dict.fromkeys((*reads, *writes)))
        self._paths = [folder / RESULTS for folder in writes]
        self._call = datetime.now(timezone.utc).isoformat()
        self._machine = machine_of(call)
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{json.dumps(one)}\n" for one in self._found))
        self._append({"call": self._call, "provenance": dict(call)})

    def add(self, stage: str, part: str, identity: Mapping[str, Any], content: Entry) -> None:
        """Write one result."""
        whole = {**identity, **self._machine}
        entry = {"stage": stage, "part": part, "identity": whole, "call": self._call}
        self._append({**entry, **content})

    def _append(self, entry: Entry) -> None:
        text = json.dumps(entry, default=str)
        self._found.append(json.loads(text))
        for path in self._paths:
            with path.open("a") as file:
                file.write(text + "\n")

    def lacks(
        self, stage: str, part: str, identity: Mapping[str, Any], *, fresh: bool = False
    ) -> bool:
        """Return whether no result has this identity, or with ``fresh`` none of this call."""
        found = self.of(stage).get(part)
        whole = json.loads(json.dumps({**identity, **self._machine}, default=str))
        if found is None or found["identity"] != whole:
            return True
        return fresh and found["call"] != self._call

    def of(self, stage: str) -> dict[str, Entry]:
        """Return the last result of each part of a stage, on this machine."""
        return _stages_of(self._found, machine_name(self._machine)).get(stage, {})


class CallError(BenchError):
    """An error of the whole call, which is no result."""


class TimeUpError(Exception):
    """A block has used up its seconds."""


class Clock:
    """The time left of a call."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self._limit: float | None = None  # of the block that runs

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Raise `TimeUpError` in a block of the main thread after ``seconds`` since `renew`.

        Or earlier, at the end of the call. A signal interrupts blocking calls of the block.
        """

        def ring(number: int, frame: object) -> NoReturn:
            raise TimeUpError

        before = signal.signal(signal.SIGALRM, ring)
        self._limit = seconds
        self.renew()
        try:
            yield
        finally:
            self._limit = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def renew(self) -> None:
        """Give the block that runs its seconds again, if there is one."""
        if self._limit is not None:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, min(self._limit, self.left)))


# --- Cases and stages


class Case(NamedTuple):
    """A unit that is started once, such as an engine; each of its parts has its own result.

    Attributes:
        parts: by name the identity of each result; an existing equal one is not measured again.
        seconds: expected time of all parts.
        run: measures the missing parts.
        shown: the command that it starts, for display.
    """

    slug: str
    parts: Mapping[str, Mapping[str, Any]]
    seconds: float
    run: Callable[[Attempt], None]
    shown: str = ""


@dataclass
class Attempt:
    """One start of a case."""

    stage: str
    case: Case
    missing: Sequence[str]
    records: Records
    clock: Clock
    say: Callable[[str], None]
    started: bool = False  # whether a failure concerns one part instead of all
    since: float = math.inf  # what was left of the call when the last sign of life came

    def add(self, part: str, content: Entry) -> None:
        """Record the result of a part, and print a line about it."""
        self.records.add(self.stage, part, self.case.parts[part], content)
        self.say(f"{self.stage} {part}: {in_a_line(content)}")
        self.goes_on()

    def goes_on(self) -> None:
        """Say that the case does not hang: its patience begins anew."""
        self.since = self.clock.left
        self.clock.renew()

    def failure(self, limit: float) -> str | None:
        """Run the case; return why parts have no result, or None if the call's time is over."""
        self.since = self.clock.left
        try:
            with self.clock.at_most(limit):
                self.case.run(self)
        except TimeUpError:
            is_hanging = self.clock.left <= self.since - limit + 0.1
            return f"nothing came for {limit:.0f} s" if is_hanging else None
        except CallError:
            raise
        except BenchError as error:
            return str(error)
        except Exception as error:  # later cases may still succeed
            return f"{type(error).__name__}: {error}"
        return "it ended without a result"


class Stage(NamedTuple):
    """A list of cases, the most important first; stages of one name share their results."""

    name: str
    about: str
    cases: Callable[[], list[Case]]


@dataclass
class Runner:
    """Completes stages within the time of a call."""

    records: Records
    clock: Clock
    only: Sequence[str] = ("*",)
    fresh: bool = False
    say: Callable[[str], None] = print
    slower: float = 1.0  # than a machine of the expected times
    left: list[str] = field(default_factory=list)  # cases left for another call

    def run(self, stage: Stage) -> None:
        """Run all unfinished cases of a stage, as far as time allows."""
        for case in matching(stage.cases(), self.only):
            if reason := self._complete(stage.name, case):
                self.left.append(f"{stage.name} {case.slug}")
                self.say(f"{stage.name} {case.slug}: left for another call: {reason}")

    def missing(self, stage: str, case: Case) -> list[str]:
        """Return the parts without a result."""
        lacks = self.records.lacks
        return [
            part for part, one in case.parts.items() if lacks(stage, part, one, fresh=self.fresh)
        ]

    def _complete(self, stage: str, case: Case) -> str | None:
        """Start a case until all parts have results; return why it is left, if it is.

        After a failed part the others are tried again.
        """
        while missing := self.missing(stage, case):
            share = len(missing) / len(case.parts)
            clock = self.clock
            if clock.left < case.seconds * (0.5 + 0.5 * share):
                return f"takes about {case.seconds:.0f} s"
            left = "begins" if math.isinf(clock.left) else f"{clock.left:.0f} s left"
            self.say(f"{stage} {case.slug}: {left}")
            attempt = Attempt(stage, case, missing, self.records, clock, self.say)
            reason = attempt.failure(self._limit(case))
            failed = self.missing(stage, case)
            if reason is None:
                return "time is up"
            for part in failed[:1] if attempt.started else failed:
                attempt.add(part, {"failed": reason})
        return None

    def _limit(self, case: Case) -> float:
        """Return the seconds without a result after which a case hangs."""
        is_long = case.seconds > LEAST_PATIENCE
        return self.slower * (PATIENCE * case.seconds if is_long else LEAST_PATIENCE)


def in_a_line(content: Mapping[str, Any]) -> str:
    """Return a result's numbers, its first fault, or its failure."""
    if "failed" in content:
        return f"FAILED: {content['failed']}"
    shown = {k: v for k, v in content.items() if isinstance(v, (int, float, str))}
    if content.get("wrong"):
        shown["WRONG"] = f"{len(content['wrong'])}, the first: {content['wrong'][0]}"
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()
    )
