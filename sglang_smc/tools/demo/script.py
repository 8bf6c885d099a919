"""Show progress of a command, and end it with an exit status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from tqdm import tqdm


class ScriptError(RuntimeError):
    """An error that ends the command; the message gives the reason and the remedy."""


def bar(**options: object) -> tqdm:
    """Return a progress bar, refreshed less often if each refresh becomes a line of a log."""
    return tqdm(mininterval=0.2 if sys.stderr.isatty() else 10.0, **options)  # pyright: ignore[reportArgumentType, reportCallIssue] -- as tqdm has them


def main_of(run: Callable[[], int | None], interrupted: str) -> int:
    """Call ``run``; return its exit status (0 for None), 1 for a ScriptError, or 130 for Ctrl-C."""
    try:
        return run() or 0
    except ScriptError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted. {interrupted}", file=sys.stderr)
        return 130


def as_script(main: Callable[[], int]) -> NoReturn:
    """Exit Python with the status of ``main``; SIGTERM and SIGHUP interrupt it as Ctrl-C does.

    So these signals also stop the servers and engines.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, interrupt)
    sys.exit(main())
