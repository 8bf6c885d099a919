"""Time is short: what does not fit is not begun, and what takes too long is stopped."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import NoReturn


class TimeUpError(Exception):
    """A block has used its seconds."""


class Clock:
    """The seconds that are left of a call."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """A block of the main thread that ends with `TimeUpError` after so many seconds.

        Or earlier, when the call itself is over. What the block waits for is interrupted.
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
