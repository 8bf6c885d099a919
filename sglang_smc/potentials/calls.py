"""Query potentials while the device works: each in its own thread, one call at a time.

A call has the texts of all requests for which one potential is due in a round. Where it raises, the
potential is called again for each request alone, so that only the faulty one fails. Where it
exceeds the time limit the call is abandoned, and all of its requests fail, since the cause cannot
be attributed. The round, and so every running request, waits until then. A circuit breaker bounds
that: after `MOST_LATE` late calls in a row the potential is not called until a trial call
`COOL_DOWN` seconds later.
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
"""Late calls in a row after which a potential is not called."""

COOL_DOWN = 60.0
"""Seconds from the last late call to the next trial call."""


class Question(NamedTuple):
    """A text to query, and the request it belongs to."""

    text: Text
    is_whole: bool
    owner: int  # the request's index in its batch


class Failed(NamedTuple):
    """The reason for a missing value."""

    message: str
    is_late: bool = False


class Caller:
    """A client of one potential.

    Args:
        name: the potential's name on the server.
        potential: opened.
        seconds: time limit of a call.
        waited: called with the seconds that a round waited for a call's answers.
        now: a clock in seconds, for the circuit breaker. Only one rank calls potentials and
            broadcasts the results, so no other rank's clock matters.
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
        """Start a call; questions of one request are adjacent."""
        deadline = time.monotonic() + self._seconds
        return Call(self, questions, self._thread.submit(self._answer, questions), deadline)

    def refusal(self) -> Failed | None:
        """Return why the potential is not called now; None where it is."""
        if self._num_late < MOST_LATE:
            return None
        is_back = self._hung is None or self._hung.done()
        if is_back and self._now() >= self._last_late + COOL_DOWN:
            return None  # half open: one trial call
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
        """Record the end of a call: in time, or abandoned."""
        self._num_late = self._num_late + 1 if is_late else 0
        if not is_late:
            return
        self._last_late = self._now()
        if not future.cancel():  # a call still in the queue is dropped
            self._hung = future
        if self._num_late == MOST_LATE:
            logger.error("%s", self._stopped)

    def late(self) -> Failed:
        """Return the failure of a late call."""
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
        """Query prefixes and whole texts; raise what the potential raises."""
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
        """Return the values, waiting for them, or a failure for each."""
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
    """Return the callers of a server's potentials, by name.

    Args:
        given: values of the flag, which `problems` has accepted.
        seconds: time limit of a call.
        waited: see `Caller`.
        opens: whether this process calls the potentials.

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
