"""Run the cases of stages: skip those that are done, or longer than the time left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gpu.clock import Clock, TimeUpError
from gpu.records import Records
from speed.remote import EngineError

#: A case that exceeds its expected time by this factor is treated as hanging.
PATIENCE = 3.0
LEAST_PATIENCE = 240.0


@dataclass
class Attempt:
    """One start of a case."""

    stage: str
    case: Case
    records: Records
    clock: Clock
    say: Callable[[str], None]
    started: bool = False  # whether a failure concerns one part instead of all

    def add(self, part: str, content: Mapping[str, Any]) -> None:
        """Record the result of a part, and print a line about it."""
        self.records.add(self.stage, part, self.case.parts[part], content)
        self.say(f"{self.stage} {part}: {told(content)}")

    def require(self, seconds: float) -> None:
        """Raise TimeUpError if less time is left of the call."""
        if self.clock.left < seconds:
            raise TimeUpError


@dataclass(frozen=True)
class Case:
    """A unit that is started once, such as an engine; each of its parts has its own result.

    Args:
        parts: by name the identity of each result; an existing equal one is not measured again.
        seconds: expected time of all parts.
        shown: the command that it starts, for display.
    """

    slug: str
    parts: Mapping[str, Mapping[str, Any]]
    seconds: float
    run: Callable[[Sequence[str], Attempt], None]
    shown: str = ""


@dataclass(frozen=True)
class Stage:
    """A list of cases, the most important first."""

    name: str
    minutes: float  # at most, per call
    about: str
    cases: Callable[[], list[Case]]


@dataclass
class Runner:
    """Runner that completes stages within the time of a call."""

    records: Records
    clock: Clock
    only: Sequence[str] = ("*",)
    fresh: bool = False
    say: Callable[[str], None] = print
    patience: float = PATIENCE
    left: list[str] = field(default_factory=list)  # cases left for another call

    def run(self, stage: Stage) -> None:
        """Run all unfinished cases of a stage, as far as time allows."""
        clock = Clock(min(stage.minutes, self.clock.left / 60))
        for case in stage.cases():
            if any(fnmatchcase(case.slug, pattern) for pattern in self.only):
                self._complete(stage.name, case, clock)

    def missing(self, stage: str, case: Case) -> list[str]:
        """Return the parts without a result."""
        return [part for part, identity in case.parts.items() if self._lacks(stage, part, identity)]

    def _lacks(self, stage: str, part: str, identity: Mapping[str, Any]) -> bool:
        if not self.records.has(stage, part, identity):
            return True
        return self.fresh and not self.records.is_of_this_call(stage, part)

    def _complete(self, stage: str, case: Case, clock: Clock) -> None:
        """Start a case until all parts have results: after a failed part the others are retried."""
        while missing := self.missing(stage, case):
            share = len(missing) / len(case.parts)
            if clock.left < case.seconds * (0.5 + 0.5 * share):
                self._leave(stage, case, f"takes about {case.seconds:.0f} s")
                return
            if not self._attempt(stage, case, missing, clock):
                return

    def _attempt(self, stage: str, case: Case, missing: Sequence[str], clock: Clock) -> bool:
        """Start a case once; return False if the call's time is over."""
        attempt = Attempt(stage, case, self.records, clock, self.say)
        reason = "it ended without a result"
        limit = max(LEAST_PATIENCE, self.patience * case.seconds)
        began = clock.left
        self.say(f"{stage} {case.slug}: {began:.0f} s left")
        try:
            with clock.at_most(limit):
                case.run(missing, attempt)
        except TimeUpError:
            if began - clock.left < limit - 0.1:  # the call's time, not the case's
                self._leave(stage, case, "time is up")
                return False
            reason = f"it took more than {limit:.0f} s"
        except EngineError as error:
            reason = str(error)
        except Exception as error:  # later cases may still succeed
            reason = f"{type(error).__name__}: {error}"
        failed = self.missing(stage, case)
        for part in failed[:1] if attempt.started else failed:
            attempt.add(part, {"failed": reason})
        return True

    def _leave(self, stage: str, case: Case, reason: str) -> None:
        self.left.append(f"{stage} {case.slug}")
        self.say(f"{stage} {case.slug}: left for another call: {reason}")


def told(content: Mapping[str, Any]) -> str:
    """Return a result in one line."""
    if "failed" in content:
        return f"FAILED: {content['failed']}"
    shown = {k: v for k, v in content.items() if isinstance(v, (int, float, str))}
    if content.get("wrong"):
        shown["WRONG"] = f"{len(content['wrong'])}, the first: {content['wrong'][0]}"
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()
    )


@dataclass(frozen=True)
class Places:
    """Folders of a call: results in ``out``, and temporary files in ``work``."""

    out: Path
    work: Path

    @property
    def logs(self) -> Path:
        return self.work / "logs"

    @property
    def models(self) -> Path:
        return self.work / "models"
