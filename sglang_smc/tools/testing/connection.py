"""Connect the checks to models: in a running server, or in servers of their own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang_smc.tools.commands import client_of
from sglang_smc.tools.testing.model import Model, RefusedError

TIMEOUT = 600.0
_ROUNDING = {"float32": 1e-3}  # nats per token
_COARSE_ROUNDING = 0.05  # for 16-bit models
#: Flags for short texts with many particles; they differ from a server's.
_SETTINGS: dict[str, Any] = {
    "context_length": 1024,
    "max_total_tokens": 131_072,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "watchdog_timeout": 600,
    "log_level": "error",
}
_CONCURRENCY = 64


class Pair(NamedTuple):
    """The checked SMC model, and optionally the draft model alone, which extends two checks."""

    smc: Model
    draft: Model | None = None


def connect(url: str, *, api_key: str | None = None, needs_smc: bool = True) -> Model:
    """Return the model of a running server.

    Args:
        needs_smc: False for a server of the draft, which may be any SGLang server.

    Raises:
        ValueError: there is no server, or it does not run SMC.
    """
    import httpx

    client = client_of(url, api_key, TIMEOUT)

    def send(body: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            reply = client.post("/generate", json=body)
        except httpx.HTTPError as error:
            raise ValueError(
                f"--url {url}: the server stopped answering ({type(error).__name__}). Its own log "
                "says why."
            ) from error
        if reply.status_code != 200:
            raise RefusedError(f"{url} answered HTTP {reply.status_code}: {reply.text[:500]}")
        return reply.json()

    try:
        reply = client.get("/server_info", timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"--url {url}: no server answers there ({type(error).__name__}). Start one with "
            "python -m sglang.launch_server --speculative-algorithm SMC, or check host and port."
        ) from error
    info = _server_info(url, reply)
    algorithm = info["speculative_algorithm"]
    if needs_smc and algorithm != "SMC":
        raise ValueError(
            f"--url {url}: this server runs --speculative-algorithm {algorithm}; needed: SMC. "
            "Start it with --speculative-algorithm SMC --speculative-draft-model-path DRAFT."
        )
    state = info["internal_states"][0]
    return Model(
        send,
        state["smc"]["settings"] if algorithm == "SMC" else {},
        same_models=info["model_path"] == info["speculative_draft_model_path"],
        rounding=_ROUNDING.get(state.get("dtype", ""), _COARSE_ROUNDING),
    )


def _server_info(url: str, reply: Any) -> dict[str, Any]:
    if reply.status_code in (401, 403):
        raise ValueError(f"--url {url}: the server wants a key. Give it with --api-key.")
    try:
        info = reply.json()
    except ValueError:
        info = None
    if reply.status_code != 200 or not isinstance(info, dict) or "model_path" not in info:
        raise ValueError(
            f"--url {url}: something answers there, but not as an SGLang server (GET /server_info: "
            f"HTTP {reply.status_code}). Give the address of the server itself, without a route."
        )
    return info


@contextlib.contextmanager
def started(target: str, draft: str, **arguments: Any) -> Iterator[Pair]:
    """Start two servers for the ``with`` block: SMC with the pair, and with the draft for both.

    The second has equal models, and returns the draft's own distribution.

    Args:
        arguments: of the servers, by `sglang.Engine`'s keywords, such as ``device`` and ``dtype``.

    Raises:
        ValueError: a folder has no model, or a server does not start.
    """
    from sglang_smc.tools.demo.serving import Launch, ServerError, running

    for flag, path in (("--target", target), ("--draft", draft)):
        _check_folder(flag, path)
    settings = _SETTINGS | arguments
    settings |= {"speculative_algorithm": "SMC", "speculative_draft_model_path": draft}
    flags: list[str] = []
    for name, value in settings.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with tempfile.TemporaryDirectory(prefix="smc-check-") as logs:
        launches = [
            Launch(f"--target {model}", Path(model), Path(logs) / name, _CONCURRENCY, flags=flags)
            for name, model in (("pair.log", target), ("draft.log", draft))
        ]
        try:
            with running(*launches) as urls:
                yield Pair(*map(connect, urls))
        except ServerError as error:
            raise ValueError(str(error)) from error


def _check_folder(flag: str, path: str) -> None:
    """Raise ValueError for a local path without a config.json; other names may be on the Hub."""
    looks_local = path.startswith((".", "/", "~")) or Path(path).is_dir()
    if looks_local and not (Path(path).expanduser() / "config.json").is_file():
        raise ValueError(
            f"{flag} {path}: no config.json there. Give the folder of a Hugging Face checkpoint, "
            "or its name on the hub."
        )
