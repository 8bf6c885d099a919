"""Asks potentials while the device works: each in a thread of its own, one call at a time.

A call is of all texts that all requests ask one potential about in a round. Where it raises, each
request is asked about by itself, so that one alone fails. Where it takes too long it is left
behind, and all whose texts it had fail: nobody can tell whose fault it was.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from typing import NamedTuple

from sglang_smc.potentials.base import Potential, Text
from sglang_smc.potentials.declared import FLAG, load


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
    """

    def __init__(
        self,
        name: str,
        potential: Potential,
        seconds: float,
        waited: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.potential = potential
        self.waited = waited
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"potential-{name}")

    def ask(self, questions: Sequence[Question]) -> "Call":
        """Begin a call; questions of one request stand together."""
        deadline = time.monotonic() + self._seconds
        return Call(self, questions, self._thread.submit(self._answer, questions), deadline)

    def late(self) -> Failed:
        """What there is in place of values that did not come in time."""
        return Failed(
            f"The potential {self.name!r} took more than {self._seconds:g} s "
            "(--speculative-smc-potential-timeout): this request ends, and so does each whose "
            "texts it was asked about in the same call. Try again later, or leave it out.",
            is_late=True,
        )

    def _answer(self, questions: Sequence[Question]) -> list[float | Failed]:
        try:
            return self._values(questions)
        except Exception as error:  # the operator's code
            owners = dict.fromkeys(question.owner for question in questions)
            if len(owners) == 1:
                return [self._failed(f"raised {type(error).__name__}: {error}")] * len(questions)
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
            return self.future.result(max(0.0, self.deadline - begun))
        except TimedOut:
            self.future.cancel()  # one that waits behind another need not be made any more
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
        except Exception as error:  # the operator's code
            raise RuntimeError(
                f"The potential {name!r} cannot be opened: {type(error).__name__}: {error}. Mend "
                f"it, or leave it out of {FLAG}."
            ) from error
    return {name: Caller(name, potential, seconds, waited) for name, potential in found.items()}
