"""How far a server's answers are from the target's law, by what their rounds have watched.

`smc.fidelity` says what is measured. One answer's tilt is mostly noise; those of some hundred,
added up, tell the draft's pull to a few hundredths.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

INFORMATION = 1000.0
"""Of a whole window, whose tilt has a standard error of 0.03 then; the shipped pair has about 3 an
answer."""

MOST_ANSWERS = 10_000
"""Of a whole window, where each says little since the draft is good."""

FAULT = 5.0
"""Standard errors from 0 at which mode exact is not exact: by chance one window in 1.7 million."""

FAR, SURE = 0.5, 2.0
"""A tilt worth advice, half of the way to the draft, and by how many standard errors beyond it."""

WARNING_SECONDS = 600.0
"""Between two warnings of a mode."""

ALL = "all"


class Answer(NamedTuple):
    """What was watched of an answer that has ended, and how it was made."""

    mode: str
    evidence_threshold: float  # c in force; infinite where all was verified
    tilt_sum: float
    tilt_information: float
    innovation_sum: float
    watched_ct: float


class Sums(NamedTuple):
    """Over answers, and what they say together."""

    answers: int = 0
    pull: float = 0.0
    information: float = 0.0
    pull_squared: float = 0.0
    pull_information: float = 0.0  # of each answer, the one times the other
    information_squared: float = 0.0
    innovation_sum: float = 0.0
    watched: float = 0.0

    def plus(self, other: "Sums") -> "Sums":
        """Over the answers of both."""
        return Sums._make(mine + its for mine, its in zip(self, other, strict=True))

    @classmethod
    def of(cls, answer: Answer) -> "Sums":
        """Of one."""
        pull, information = answer.tilt_sum, answer.tilt_information
        products = pull * pull, pull * information, information * information
        return cls(1, pull, information, *products, answer.innovation_sum, answer.watched_ct)

    @property
    def tilt(self) -> float | None:
        """The pull to the draft over the information; None where there is none."""
        return self.pull / self.information if self.information else None

    @property
    def tilt_error(self) -> float | None:
        """The standard error of the tilt.

        What the laws say of it, or what answers differ by, if that is more.
        """
        if self.tilt is None:
            return None
        crossed = self.tilt * (self.tilt * self.information_squared - 2 * self.pull_information)
        return math.sqrt(max(self.pull_squared + crossed, self.information)) / self.information

    @property
    def innovation(self) -> float | None:
        """Mean of log p(x) + H(p), nats a watched token."""
        return self.innovation_sum / self.watched if self.watched else None

    def as_dict(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "answers": self.answers,
            "watched_tokens": int(self.watched),
            "tilt": self.tilt,
            "tilt_error": self.tilt_error,
            "tilt_information": self.information,
            "innovation": self.innovation,
        }

    def __str__(self) -> str:
        return "-" if self.tilt is None else f"{self.tilt:.2f} +- {self.tilt_error:.2f}"


class Window:
    """The newest answers, in two halves: as the newer one is whole, the older one is let go.

    So nothing is ever subtracted, and an answer costs the same however many there are.

    Args:
        information: of both halves together.
        most: answers of both.
    """

    def __init__(self, information: float = INFORMATION, most: int = MOST_ANSWERS) -> None:
        self._information, self._most = information / 2, most / 2
        self._older = self._newer = Sums()
        self._is_second = False

    @property
    def sums(self) -> Sums:
        """Over the answers of both halves."""
        return self._older.plus(self._newer)

    def add(self, answer: Answer) -> Sums | None:
        """Take an answer in; sums of a whole window, of which none was told before."""
        self._newer = self._newer.plus(Sums.of(answer))
        if self._newer.information < self._information and self._newer.answers < self._most:
            return None
        whole = self.sums if self._is_second else None
        self._older, self._newer, self._is_second = self._newer, Sums(), not self._is_second
        return whole


class Watched:
    """The windows of a server, of each mode and of all, and warnings where they ask for some.

    Args:
        now: a clock in seconds.
        window: makes one.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, window: Callable[[], Window] = Window
    ) -> None:
        self._now = now
        self._make = window
        self._windows = {ALL: window()}
        self._not_before: dict[str, float] = {}

    @property
    def all(self) -> Sums:
        """Of all modes."""
        return self._windows[ALL].sums

    def add(self, answer: Answer) -> str | None:
        """Take in an answer that has ended.

        Nothing is taken where nothing of it was watched. Each mode is judged once for each whole
        window of new answers.

        Returns:
            What the log is to warn of, if anything.
        """
        if not answer.watched_ct:
            return None
        self._windows[ALL].add(answer)
        whole = self._windows.setdefault(answer.mode, self._make()).add(answer)
        text = None if whole is None else judge(answer.mode, whole)
        if text is None or self._now() < self._not_before.get(answer.mode, -math.inf):
            return None
        self._not_before[answer.mode] = self._now() + WARNING_SECONDS
        return text

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """For /server_info: by mode, and of all."""
        return {name: window.sums.as_dict() for name, window in self._windows.items()}


def judge(mode: str, sums: Sums) -> str | None:
    """What is wrong with the answers of a mode, with advice; None where nothing is."""
    tilt, error = sums.tilt, sums.tilt_error
    if tilt is None or error is None:
        return None
    if mode == "exact":
        if abs(tilt) <= FAULT * error:
            return None
        return (
            f"Mode exact is not exact here: the tilt of {sums.answers} answers is {sums}, where "
            "the target's own law has 0. This is a fault. Please report it, with the models, this "
            "line, /server_info and a request that shows it. --speculative-smc-kernels torch "
            "tells whether a kernel has it."
        )
    if tilt <= FAR + SURE * error:
        return None
    return (
        f"Answers in mode {mode} are far from the target's law: the tilt of {sums.answers} is "
        f"{sums}, where 0 is the target and 1 about the draft. Any of these lowers it: "
        "--speculative-smc-mode auto, or exact, which has 0; a larger "
        "--speculative-smc-evidence-threshold; another --speculative-draft-model-path. A request "
        "may choose all but the last in custom_params."
    )
