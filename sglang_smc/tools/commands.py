"""Share what the command lines have in common: numbers, tables, progress and exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

if TYPE_CHECKING:
    import httpx


class ScriptError(RuntimeError):
    """An error that ends the command; the message gives the reason and the remedy."""


def bar(**options: Any) -> tqdm:
    """Return a progress bar, refreshed less often if each refresh becomes a line of a log."""
    return tqdm(mininterval=0.2 if sys.stderr.isatty() else 10.0, **options)


def main_of(
    run: Callable[[], int | None],
    interrupted: str = "",
    *,
    refused: tuple[type[Exception], ...] = (),
    status: int = 2,
) -> int:
    """Call ``run``; return its exit status (0 for None), 1 for a ScriptError, or 130 for Ctrl-C.

    Args:
        interrupted: printed after Ctrl-C.
        refused: errors of wrong arguments, printed with exit status ``status``.
    """
    try:
        return run() or 0
    except ScriptError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except refused as error:
        print(f"error: {error}", file=sys.stderr)
        return status
    except KeyboardInterrupt:
        print(f"\nInterrupted. {interrupted}".rstrip(), file=sys.stderr)
        return 130


def as_script(main: Callable[[], int]) -> NoReturn:
    """Exit Python with the status of ``main``, which signals interrupt as in `interruptible`."""
    with interruptible():
        sys.exit(main())


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the ``with`` block as Ctrl-C does, so that servers stop."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    is_main = threading.current_thread() is threading.main_thread()
    # A signal is ignored under nohup.
    handled = {n: old for n, old in before.items() if is_main and old is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, old in handled.items():
            signal.signal(number, old)


def client_of(url: str, api_key: str | None, timeout: float) -> httpx.Client:
    """Return an HTTP client of a running server."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # The environment's proxies cannot reach this machine's own ports.
    is_here = any(f"//{name}" in url for name in ("localhost", "127.", "[::1]"))
    base = url.rstrip("/")
    return httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=not is_here)


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


def table(rows: Sequence[Mapping[str, str]], left: Collection[str], rule: bool = True) -> list[str]:
    """Return lines: the rows' keys as headings, a ``rule``, and the rows.

    Columns in ``left`` are left-aligned.
    """
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name for name in widths}, *rows]
    if rule:
        lines.insert(1, {name: "-" * width for name, width in widths.items()})
    return [
        "  ".join(
            line[name].ljust(width) if name in left else line[name].rjust(width)
            for name, width in widths.items()
        ).rstrip()
        for line in lines
    ]
