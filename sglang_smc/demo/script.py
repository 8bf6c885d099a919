"""How a command shows progress, and how it ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from tqdm import tqdm


class ScriptError(RuntimeError):
    """It cannot go on; the message says why and what to do."""


def bar(**options: object) -> tqdm:
    """A progress bar, with fewer states where each becomes a line of a log."""
    return tqdm(mininterval=0.2 if sys.stderr.isatty() else 10.0, **options)  # pyright: ignore[reportArgumentType, reportCallIssue] -- as tqdm has them


def main_of(run: Callable[[], int | None], interrupted: str) -> int:
    """Do it; the exit status is what it returns, or 0 for nothing, where it comes to its end."""
    try:
        return run() or 0
    except ScriptError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted. {interrupted}", file=sys.stderr)
        return 130


def as_script(main: Callable[[], int]) -> NoReturn:
    """Leave Python with the status of ``main``; other signals end it as Ctrl-C does.

    So they stop the servers and engines, too.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, interrupt)
    sys.exit(main())
