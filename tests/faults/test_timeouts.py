"""Who waits or runs too long hears what SGLang says without SMC.

One request holds the only place to run until it has run too long; all others wait too long.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from edit_cases import Slow
from fault_client import FaultServer
from http_server import HANGS, running_server
from routed import ROUTES, parts_of
from same_answers import shown
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

LIMITS = {"SGLANG_REQ_WAITING_TIMEOUT": "2", "SGLANG_REQ_RUNNING_TIMEOUT": "15"}
WAITED = "Request waiting timeout reached."
RAN = "Request running timeout reached."
HELD = {
    "input_ids": [3],
    "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
    "custom_logit_processor": Slow.to_str(),
}
STREAM = {"stream": True}


def asked(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Routes and bodies: alone, streamed where the route streams, and samples."""
    bodies = {route: (route, make(model, None)) for route, make in ROUTES.items()}
    for route in ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages"):
        bodies[f"{route}, streamed"] = route, bodies[route][1] | STREAM
    samples = ROUTES["/generate"](model, None, n=2)
    return bodies | {"samples": ("/generate", samples), "a list": ("/generate", several(samples))}


def several(samples: dict[str, Any]) -> dict[str, Any]:
    return {**samples, "text": [samples["text"]] * 2, "sampling_params": {"max_new_tokens": 4}}


def told(server: FaultServer, route: str, body: dict[str, Any]) -> Any:
    """The status and the body; of a stream its parts."""
    reply = server.post(route, **body)
    parts = [*parts_of(reply.text)] if body.get("stream") else reply.json()
    return reply.status_code, shown(parts)


def all_told(folder: Path, **arguments: Any) -> dict[str, Any]:
    """What a server says to who waits and to who runs, by request."""
    settings: dict[str, Any] = {"max_running_requests": 1, "enable_custom_logit_processor": True}
    template = folder.with_suffix(".jinja")
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    settings |= {"chat_template": template, "served_model_name": "one", "context_length": 512}
    with (
        running_server(folder, LIMITS, kind=FaultServer, **arguments, **settings) as server,
        ThreadPoolExecutor(32) as pool,
    ):
        held = pool.submit(told, server, "/generate", HELD)
        while not server.load()[0]:
            assert not held.done(), held.result()
            time.sleep(0.05)
        waiting = {name: pool.submit(told, server, *one) for name, one in asked("one").items()}
        found = {name: one.result(HANGS) for name, one in waiting.items()}
        assert not held.done(), "the place to run is free too soon"
        found["held"] = held.result(HANGS)
        server.assert_nothing_is_lost()
        assert "Traceback" not in server.log.read_text()
    return found


def test_who_waits_or_runs_too_long_is_told_so(
    tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each route the status and the body are those of SGLang without speculation."""
    monkeypatch.chdir(Path(__file__).parents[1] / "support")  # of what slows the request
    target, draft = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    stock = all_told(tmp_path / "stock", model_path=target)
    found = all_told(tmp_path / "smc", **smc_arguments(target, draft, num_particles=4))
    for name, wanted in stock.items():
        assert found[name] == wanted, name
    for name, message in {"/generate": WAITED, "held": RAN}.items():
        status, body = found[name]
        assert (status, body["error"]["message"]) == (503, message)
