"""Limit a run's time: skip what does not fit, and stop what takes too long."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import NoReturn


class TimeUpError(Exception):
    """A block has used up its seconds."""


class Clock:
    """The time left of a call."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Raise `TimeUpError` in a block of the main thread after ``seconds``.

        Or earlier, at the end of the call. A signal interrupts blocking calls of the block.
        """

        def ring(number: int, frame: object) -> NoReturn:
            raise TimeUpError

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, min(seconds, self.left)))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
