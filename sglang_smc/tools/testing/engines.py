"""Run engines in child processes of this command.

`sglang.Engine.shutdown` ends all children of its process, and an engine that dies ends its
process. In child processes engines start in parallel, leave the caller's other children alone, and
their end becomes an error message.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from sglang_smc.tools.testing.model import RefusedError

#: Settings for short texts with many particles; they differ from a server's.
_SETTINGS: dict[str, Any] = {
    "random_seed": 0,
    "context_length": 1024,
    "max_running_requests": 64,
    "max_total_tokens": 131_072,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "watchdog_timeout": 600,
    "log_level": "error",
}
_STOP_SECONDS = 60.0


class Engine(NamedTuple):
    """An engine in another process, usable once `ready` has returned."""

    models: str
    pipe: Connection

    def ready(self) -> dict[str, Any]:
        """Wait for the engine's start; return its server info."""
        return self._answer()

    def send(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a /generate body; return the replies."""
        self.pipe.send(body)
        return self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            raise ValueError(
                f"{self.models}: the engine has ended; what it said last stands above. Try whether "
                "python -m sglang.launch_server starts with the same models and flags."
            ) from None
        if kind == "answer":
            return value
        raise RefusedError(f"{self.models}: {value}")


@contextlib.contextmanager
def starting(target: str, draft: str, **arguments: Any) -> Iterator[Engine]:
    """Start an SMC engine for the ``with`` block; the block begins before the engine is ready.

    Args:
        arguments: keywords of `sglang.Engine`, such as `device` and `dtype`.
    """
    given = _SETTINGS | arguments
    given |= {
        "model_path": target,
        "speculative_algorithm": "SMC",
        "speculative_draft_model_path": draft,
    }
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, given))
    process.start()
    theirs.close()
    try:
        yield Engine(f"--target {target} --draft {draft}", ours)
    except BaseException:
        process.terminate()  # it may still be starting
        raise
    finally:
        ours.close()
        process.join(_STOP_SECONDS)
        if process.is_alive():
            process.kill()


def _serve(pipe: Connection, arguments: dict[str, Any]) -> None:
    """Serve requests in the child process until the pipe is closed."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # dozens, about missing hardware
    import sglang

    try:
        engine = sglang.Engine(**arguments)
    except ValueError as error:
        pipe.send(("error", str(error)))
        return
    try:
        pipe.send(("answer", engine.get_server_info()))
        while True:
            pipe.send(_reply(engine, pipe.recv()))
    except (EOFError, BrokenPipeError):
        pass  # the caller closed the pipe
    finally:
        engine.shutdown()


def _reply(engine: Any, body: dict[str, Any]) -> tuple[str, Any]:
    given = dict(body)
    try:
        return "answer", engine.generate(prompt=given.pop("text", None), **given)
    except ValueError as error:  # raised for an invalid request
        return "error", str(error)
