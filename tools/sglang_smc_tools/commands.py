"""Share what commands have in common: servers, signals, tables, progress."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

if TYPE_CHECKING:
    import httpx


def bar(**options: Any) -> tqdm:
    """Return a progress bar, refreshed less often if each refresh becomes a line of a log."""
    return tqdm(mininterval=0.2 if sys.stderr.isatty() else 10.0, **options)


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


def client_of(url: str, api_key: str | None, timeout: float | None) -> httpx.Client:
    """Return an HTTP client of a running server."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # The environment's proxies cannot reach this machine's own ports.
    is_here = any(f"//{name}" in url for name in ("localhost", "127.", "[::1]"))
    return httpx.Client(
        base_url=url.rstrip("/"),
        headers=headers,
        timeout=timeout,
        trust_env=not is_here,
        # No idle connections are kept: a server may close one just as a request is sent on it.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


def told_by(url: str, route: str, key: str, api_key: str | None) -> dict[str, Any]:
    """Return the JSON of a GET to an SGLang server.

    Args:
        key: one that SGLang's answers have.

    Raises ValueError if there is no server, or another one.
    """
    import httpx

    try:
        reply = client_of(url, api_key, 30.0).get(route)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"{url}: no server answers there ({type(error).__name__}). Start one with python -m "
            "sglang.launch_server --speculative-algorithm SMC, or check host and port."
        ) from error
    if reply.status_code in (401, 403):
        raise ValueError(f"{url}: the server wants a key. Give it with --api-key.")
    try:
        told = reply.json()
    except ValueError:
        told = None
    if not reply.is_success or not isinstance(told, dict) or key not in told:
        raise ValueError(
            f"{url}: something answers there, but not as an SGLang server (GET {route}: HTTP "
            f"{reply.status_code}). Give the address of the server itself, without a route."
        )
    return told


def prompts_in(path: Path) -> list[str]:
    """Return the lines of a file of --prompts that have text; raise ValueError without any."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--prompts {path}: {error}. Give a text file, one prompt a line."
        ) from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ValueError(f"--prompts {path}: no prompt in there; needed: one a line, 1 or more.")
    return found


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
