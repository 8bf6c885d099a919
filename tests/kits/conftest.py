"""SMC servers for SGLang's kits, one at a time."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_server import Server, running_server
from tiny_models import smc_arguments
from transformers import AutoTokenizer

from kits.by_heart import make_pair

COMMON: dict[str, Any] = {
    "num_particles": 4,
    "num_steps": 4,
    "max_total_tokens": 100_000,
    "max_running_requests": 32,
    "context_length": 16_384,
}
LONGEST = 131_072  # the session kit asks for 100,000 tokens, and ends the request in half a second
#: What the kits ask of a server: environment, arguments.
KINDS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sessions": (
        {},
        {"enable_streaming_session": True, "reasoning_parser": "qwen3", "context_length": LONGEST},
    ),
    "short wait": ({"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}, {"max_running_requests": 1}),
    "short run": (
        {"SGLANG_REQ_RUNNING_TIMEOUT": "4"},
        {"enable_streaming_session": True, "context_length": 4096},
    ),
}


@pytest.fixture(scope="package")
def by_heart(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_pair(tmp_path_factory.mktemp("by_heart"), LONGEST)


@pytest.fixture(scope="package")
def serve(
    by_heart: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Server]]:
    """Have a server of a kind; asking for another kind ends the last one."""
    running: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:

        def start(kind: str) -> Server:
            if kind not in running:
                running.clear()
                stack.close()
                environment, own = KINDS[kind]
                arguments = smc_arguments(*by_heart, **{**COMMON, **own})
                folder = tmp_path_factory.mktemp("server")
                running[kind] = stack.enter_context(
                    running_server(folder, environment, **arguments)
                )
            return running[kind]

        yield start


@pytest.fixture(autouse=True, scope="class")
def served(request: pytest.FixtureRequest) -> None:
    """Give a kit's class the server that it names, as SGLang's own fixtures do."""
    if request.cls is None or not hasattr(request.cls, "kind"):
        return
    server = request.getfixturevalue("serve")(request.cls.kind)
    request.cls.base_url = server.url
    request.cls.process = server.process
    request.cls.model = request.getfixturevalue("by_heart")[0]
    request.cls.tokenizer = AutoTokenizer.from_pretrained(request.cls.model)
