"""Asks potentials while the device works: each in a thread of its own, one call at a time.

A call is of all texts that all requests ask one potential about in a round. Where it raises, each
request is asked about by itself, so that one alone fails. Where it takes too long it is left
behind, and all whose texts it had fail: nobody can tell whose fault it was. The round, and so every
running request, waits until then. A circuit breaker bounds that: behind `MOST_LATE` late calls in
a row the potential is not asked, until one call tries again `COOL_DOWN` seconds later.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from typing import NamedTuple

from sglang_smc.potentials.base import Potential, Text
from sglang_smc.potentials.declared import FLAG, load, said

logger = logging.getLogger(__name__)

MOST_LATE = 3
"""Late calls in a row behind which a potential is not asked."""

COOL_DOWN = 60.0
"""Seconds from the last late call to one that tries again."""


class Question(NamedTuple):
    """A text to ask about."""

    text: Text
    is_whole: bool
    owner: int  # the request's place in its batch


class Failed(NamedTuple):
    """In place of a value: why there is none."""

    message: str
    is_late: bool = False


class Caller:
    """Asks one potential.

    Args:
        name: by which a server knows it.
        potential: opened.
        seconds: that a call may take.
        waited: is told the seconds that somebody waited for a call's answers.
        now: a clock in seconds, of the breaker. One rank asks, and tells the others what came of
            it, so that no other rank's clock counts.
    """

    def __init__(
        self,
        name: str,
        potential: Potential,
        seconds: float,
        waited: Callable[[float], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.potential = potential
        self.waited = waited
        self._seconds = seconds
        self._now = now
        self._num_late = 0  # calls in a row
        self._last_late = 0.0  # when
        self._hung: Future | None = None  # the late call that the thread may still be in
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"potential-{name}")

    def ask(self, questions: Sequence[Question]) -> "Call":
        """Begin a call; questions of one request stand together."""
        deadline = time.monotonic() + self._seconds
        return Call(self, questions, self._thread.submit(self._answer, questions), deadline)

    def refusal(self) -> Failed | None:
        """Return why the potential is not asked now; None where it is."""
        if self._num_late < MOST_LATE:
            return None
        is_back = self._hung is None or self._hung.done()
        if is_back and self._now() >= self._last_late + COOL_DOWN:
            return None  # half open: one call tries
        return Failed(self._stopped, is_late=True)

    @property
    def _stopped(self) -> str:
        return (
            f"The potential {self.name!r} is not asked: its last {self._num_late} calls took more "
            f"than {self._seconds:g} s each (--speculative-smc-potential-timeout), for which all "
            f"requests waited. It is tried again {COOL_DOWN:g} s after the last of them, once that "
            "has come back. Try again later, or leave it out."
        )

    def end(self, future: Future, *, is_late: bool) -> None:
        """Note how a call has ended: in time, or left behind."""
        self._num_late = self._num_late + 1 if is_late else 0
        if not is_late:
            return
        self._last_late = self._now()
        if not future.cancel():  # one that waits behind another need not be made any more
            self._hung = future
        if self._num_late == MOST_LATE:
            logger.error("%s", self._stopped)

    def late(self) -> Failed:
        """Return what stands in place of values that did not come in time."""
        return Failed(
            f"The potential {self.name!r} took more than {self._seconds:g} s "
            "(--speculative-smc-potential-timeout): this request ends, and so does each whose "
            "texts it was asked about in the same call. Try again later, or leave it out.",
            is_late=True,
        )

    def _answer(self, questions: Sequence[Question]) -> list[float | Failed]:
        try:
            return self._values(questions)
        except BaseException as error:  # the operator's code: SystemExit, a panic of Rust's, too
            owners = dict.fromkeys(question.owner for question in questions)
            if len(owners) == 1:
                return [self._failed(f"raised {said(error)}")] * len(questions)
        return [
            answer
            for owner in owners
            for answer in self._answer([one for one in questions if one.owner == owner])
        ]

    def _values(self, questions: Sequence[Question]) -> list[float | Failed]:
        """Ask about beginnings and about whole texts; raises what the potential does."""
        found: list[float | Failed] = [0.0] * len(questions)
        for is_whole, method in ((False, self.potential.prefix), (True, self.potential.complete)):
            places = [place for place, one in enumerate(questions) if one.is_whole == is_whole]
            if not places:
                continue
            values = list(method([questions[place].text for place in places]))
            if len(values) != len(places):
                raise ValueError(
                    f"{method.__name__} gave {len(values)} values for {len(places)} texts"
                )
            for place, value in zip(places, values, strict=True):
                found[place] = self._checked(value)
        return found

    def _checked(self, value: float) -> float | Failed:
        value = float(value)
        if math.isnan(value) or value == math.inf:
            return self._failed(f"gave {value}; allowed: finite logarithms and -inf")
        return value

    def _failed(self, what: str) -> Failed:
        return Failed(f"The potential {self.name!r} {what}. Others are not affected.")


class Call(NamedTuple):
    """A call under way."""

    caller: Caller
    questions: Sequence[Question]
    future: "Future[list[float | Failed]]"
    deadline: float  # by time.monotonic()

    def answers(self) -> list[float | Failed]:
        """The values, once they are there, or what stands in their place."""
        begun = time.monotonic()
        try:
            found = self.future.result(max(0.0, self.deadline - begun))
            self.caller.end(self.future, is_late=False)
            return found
        except TimedOut:
            self.caller.end(self.future, is_late=True)
            return [self.caller.late()] * len(self.questions)
        finally:
            self.caller.waited(time.monotonic() - begun)


def callers_of(
    given: tuple[str, ...], seconds: float, waited: Callable[[float], None], *, opens: bool
) -> dict[str, Caller]:
    """Who asks the potentials of a server, by their names.

    Args:
        given: values of the flag, without `problems`.
        seconds: that a call may take.
        waited: as of `Caller`.
        opens: whether this process is the one that asks.

    Raises:
        RuntimeError: where one cannot be opened.
    """
    found = load(given)
    for name, potential in found.items() if opens else ():
        try:
            potential.open()
        except BaseException as error:  # the operator's code
            raise RuntimeError(
                f"The potential {name!r} cannot be opened: {said(error)}. Mend it, or leave it out "
                f"of {FLAG}."
            ) from error
    return {name: Caller(name, potential, seconds, waited) for name, potential in found.items()}
