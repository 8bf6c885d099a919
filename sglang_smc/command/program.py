"""Parse a command's words, and end it with an exit status."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any


class ScriptError(RuntimeError):
    """An error that ends the command; the message gives the reason and the remedy."""


def main_of(run: Callable[[], int | None], interrupted: str = "") -> int:
    """Call ``run``; return its exit status (0 for None), 1 for a ScriptError, or 130 for Ctrl-C.

    Args:
        interrupted: printed after Ctrl-C.
    """
    try:
        return run() or 0
    except ScriptError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted. {interrupted}".rstrip(), file=sys.stderr)
        return 130


def command(
    parser: Callable[[], argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int | None],
    interrupted: str = "",
    *,
    refused: int = 2,
) -> Callable[..., int]:
    """Return the ``main`` of a command: parse its words and ``run``, as `main_of` does.

    Args:
        refused: the exit status of a ValueError or OSError, which is printed.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        options = parser().parse_args(argv)
        try:
            status = main_of(lambda: run(options), interrupted)
            sys.stdout.flush()
            return status
        except BrokenPipeError:  # of `| head`; Python would flush again as it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return refused

    return main


def number(
    kind: type, low: float = -math.inf, high: float = math.inf, *, is_open: bool = False
) -> Callable[[str], Any]:
    """Return a parser of finite numbers from ``low`` to ``high``, both excluded if ``is_open``."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not finite")
        inside = low < value < high if is_open else low <= value <= high
        if inside:
            return value
        if high == math.inf:
            raise argparse.ArgumentTypeError(
                f"{text} is not {'above' if is_open else 'at least'} {low:g}"
            )
        raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")

    parse.__name__ = "number"  # as argparse names what it cannot parse
    return parse


positive = number(int, 1)
natural = number(int, 0)


def several(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of values separated by commas."""

    def parse_all(text: str) -> tuple[Any, ...]:
        return tuple(parse(part) for part in text.split(","))

    parse_all.__name__ = "list"
    return parse_all
