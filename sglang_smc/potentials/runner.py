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

from sglang_smc.operator_code import describe
from sglang_smc.potentials.base import Potential, Text

logger = logging.getLogger(__name__)

MOST_LATE = 3
"""Late calls in a row after which a potential is not called."""

COOL_DOWN = 60.0
"""Seconds from the last late call to the next trial call."""


class Query(NamedTuple):
    """A text for which a value is wanted, and the request it belongs to."""

    text: Text
    is_whole: bool
    owner: int  # the request's index in its batch


class MissingValue(NamedTuple):
    """The reason for a missing value."""

    message: str
    is_late: bool = False


class PotentialRunner:
    """The thread of one potential, with its time limit and circuit breaker.

    Args:
        potential: opened.
        seconds: time limit of a call.
        waited: called with the seconds that a round waited for a call's values.
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

    def submit(self, queries: Sequence[Query]) -> "Call":
        """Start a call; queries of one request are adjacent."""
        deadline = time.monotonic() + self._seconds
        return Call(self, queries, self._thread.submit(self._run, queries), deadline)

    def refusal(self) -> MissingValue | None:
        """Return why the potential is not called now; None where it is."""
        if self._num_late < MOST_LATE:
            return None
        is_back = self._hung is None or self._hung.done()
        if is_back and self._now() >= self._last_late + COOL_DOWN:
            return None  # half open: one trial call
        return MissingValue(self._stopped, is_late=True)

    @property
    def _stopped(self) -> str:
        return (
            f"The potential {self.name!r} is not asked: its last {self._num_late} calls took more "
            f"than {self._seconds:g} s each (--speculative-smc-potential-timeout), for which all "
            f"requests waited. It is tried again {COOL_DOWN:g} s after the last of them, once that "
            "has come back. Try again later, or leave it out."
        )

    def wait(self, future: Future, seconds: float) -> list[float | MissingValue] | MissingValue:
        """Return the values of a call within ``seconds``, or the failure of a late one."""
        begun = time.monotonic()
        try:
            values = future.result(seconds)
            self._num_late = 0
            return values
        except TimedOut:
            self._note_late(future)
            return MissingValue(
                f"The potential {self.name!r} took more than {self._seconds:g} s "
                "(--speculative-smc-potential-timeout): this request ends, and so does each whose "
                "texts it was asked about in the same call. Try again later, or leave it out.",
                is_late=True,
            )
        finally:
            self.waited(time.monotonic() - begun)

    def _note_late(self, future: Future) -> None:
        self._num_late += 1
        self._last_late = self._now()
        if not future.cancel():  # a call still in the queue is dropped
            self._hung = future
        if self._num_late == MOST_LATE:
            logger.error("%s", self._stopped)

    def _run(self, queries: Sequence[Query]) -> list[float | MissingValue]:
        try:
            return self._values(queries)
        except BaseException as error:  # the operator's code: SystemExit, a panic of Rust's, too
            owners = dict.fromkeys(query.owner for query in queries)
            if len(owners) == 1:
                return [self._missing(f"raised {describe(error)}")] * len(queries)
        return [
            value
            for owner in owners
            for value in self._run([query for query in queries if query.owner == owner])
        ]

    def _values(self, queries: Sequence[Query]) -> list[float | MissingValue]:
        """Query prefixes and whole texts; raise what the potential raises."""
        found: list[float | MissingValue] = [0.0] * len(queries)
        for is_whole, method in ((False, self.potential.prefix), (True, self.potential.complete)):
            places = [place for place, query in enumerate(queries) if query.is_whole == is_whole]
            if not places:
                continue
            values = list(method([queries[place].text for place in places]))
            if len(values) != len(places):
                raise ValueError(
                    f"{method.__name__} gave {len(values)} values for {len(places)} texts"
                )
            for place, value in zip(places, map(float, values), strict=True):
                is_valid = not math.isnan(value) and value < math.inf
                invalid = f"gave {value}; allowed: finite logarithms and -inf"
                found[place] = value if is_valid else self._missing(invalid)
        return found

    def _missing(self, what: str) -> MissingValue:
        return MissingValue(f"The potential {self.name!r} {what}. Others are not affected.")


class Call(NamedTuple):
    """A call under way; a round that is played in slices has one for each slice."""

    runner: PotentialRunner
    queries: Sequence[Query]
    future: "Future[list[float | MissingValue]]"
    deadline: float  # by time.monotonic()

    def result(self) -> list[float | MissingValue]:
        """Return the values, waiting for them, or a failure for each."""
        values = self.runner.wait(self.future, max(0.0, self.deadline - time.monotonic()))
        return [values] * len(self.queries) if isinstance(values, MissingValue) else values
