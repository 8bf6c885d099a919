"""Estimate how far a server's answers are from the target distribution, and warn where too far.

`smc.fidelity` defines the measurements. One answer's tilt is mostly noise; the sums of some
hundred answers give the tilt to a few hundredths.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

INFORMATION = 1000.0
"""Information of a whole window: its tilt then has a standard error of 0.03. The shipped pair gives
about 3 per answer."""

MOST_ANSWERS = 10_000
"""Most answers of a whole window, where each has little information since the draft is good."""

FAULT = 5.0
"""Standard errors of the tilt at which mode exact is faulty; by chance 1 window in 1.7 million."""

FAR = 0.5
SURE = 2.0
"""Tilt that warrants a warning, half-way to the draft, and the standard errors beyond it."""

WARNING_SECONDS = 600.0
"""Seconds between two warnings of a mode."""

ALL = "all"


class AnswerFidelity(NamedTuple):
    """Measurements of an answer that has ended, with its mode and evidence threshold."""

    mode: str
    evidence_threshold: float  # c in force; infinite where all was verified
    tilt_sum: float
    tilt_information: float
    innovation_sum: float
    watched_ct: float


class Sums(NamedTuple):
    """Sums of measurements over answers, and the estimates from them."""

    answers: int = 0
    pull: float = 0.0
    information: float = 0.0
    pull_squared: float = 0.0
    pull_information: float = 0.0  # sum of each answer's pull times its information
    information_squared: float = 0.0
    innovation_sum: float = 0.0
    watched: float = 0.0

    def plus(self, other: "Sums") -> "Sums":
        return Sums._make(mine + its for mine, its in zip(self, other, strict=True))

    @classmethod
    def of(cls, answer: AnswerFidelity) -> "Sums":
        pull = answer.tilt_sum
        information = answer.tilt_information
        return cls(
            answers=1,
            pull=pull,
            information=information,
            pull_squared=pull * pull,
            pull_information=pull * information,
            information_squared=information * information,
            innovation_sum=answer.innovation_sum,
            watched=answer.watched_ct,
        )

    @property
    def tilt(self) -> float | None:
        """Return the pull to the draft over the information; None without information."""
        return self.pull / self.information if self.information else None

    @property
    def tilt_error(self) -> float | None:
        """Return the standard error of the tilt.

        It is the larger of that from the information and that from the spread between answers.
        """
        if self.tilt is None:
            return None
        crossed = self.tilt * (self.tilt * self.information_squared - 2 * self.pull_information)
        return math.sqrt(max(self.pull_squared + crossed, self.information)) / self.information

    @property
    def innovation(self) -> float | None:
        """Return the mean of log p(x) + H(p), in nats per measured token."""
        return self.innovation_sum / self.watched if self.watched else None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for /server_info."""
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
    """Sums of the newest answers, in two halves: once the newer is whole, the older is dropped.

    So nothing is ever subtracted, and adding an answer takes constant time.

    Args:
        information: of both halves together.
        most: answers of both halves together.
    """

    def __init__(self, information: float = INFORMATION, most: int = MOST_ANSWERS) -> None:
        self._information = information / 2
        self._most = most / 2
        self._older = self._newer = Sums()
        self._is_second = False

    @property
    def sums(self) -> Sums:
        return self._older.plus(self._newer)

    def add(self, answer: AnswerFidelity) -> Sums | None:
        """Add an answer; return the sums of a window of new answers once it is whole, else None."""
        self._newer = self._newer.plus(Sums.of(answer))
        if self._newer.information < self._information and self._newer.answers < self._most:
            return None
        whole = self.sums if self._is_second else None
        self._older = self._newer
        self._newer = Sums()
        self._is_second = not self._is_second
        return whole


class FidelityWindows:
    """Windows of a server, per mode and over all modes, with warnings.

    Args:
        now: a clock in seconds.
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
        return self._windows[ALL].sums

    def add(self, answer: AnswerFidelity) -> str | None:
        """Add an answer that has ended.

        An answer without measured tokens is ignored. Each mode is tested once per whole window of
        new answers.

        Returns:
            The warning to log, or None.
        """
        if not answer.watched_ct:
            return None
        self._windows[ALL].add(answer)
        whole = self._windows.setdefault(answer.mode, self._make()).add(answer)
        text = None if whole is None else warning_of(answer.mode, whole)
        if text is None or self._now() < self._not_before.get(answer.mode, -math.inf):
            return None
        self._not_before[answer.mode] = self._now() + WARNING_SECONDS
        return text

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the fields for /server_info, by mode and over all."""
        return {name: window.sums.as_dict() for name, window in self._windows.items()}


def warning_of(mode: str, sums: Sums) -> str | None:
    """Return a warning with advice if a mode's tilt is too large, else None."""
    tilt = sums.tilt
    error = sums.tilt_error
    if tilt is None or error is None:
        return None
    if mode == "exact":
        if abs(tilt) <= FAULT * error:
            return None
        return (
            f"Mode exact is not exact here: the tilt of {sums.answers} answers is {sums}, where "
            "the target has 0. This is a fault. Please report it, with the models, this "
            "line, /server_info and a request that shows it. --speculative-smc-kernels torch "
            "tells whether a kernel has it."
        )
    if tilt <= FAR + SURE * error:
        return None
    return (
        f"Answers in mode {mode} are far from the target's: the tilt of {sums.answers} is "
        f"{sums}, where 0 is the target and about 1 the draft. Any of these lowers it: "
        "--speculative-smc-mode auto, or exact, which has 0; a larger "
        "--speculative-smc-evidence-threshold; another --speculative-draft-model-path. A request "
        "may choose all but the last in custom_params."
    )
