"""One server with the shipped pair, for all clients."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Server, running_server
from routed import PRESETS
from tiny_models import smc_arguments

PAIR = Path(__file__).parents[2] / "bench" / "pair"


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = smc_arguments(
        str(PAIR / "target"),
        str(PAIR / "draft"),
        num_particles=4,
        num_steps=4,
        max_total_tokens=60_000,
        context_length=2048,
        enable_metrics=True,
        presets=json.dumps(PRESETS),
        decode_log_interval=1,  # the accept length that benchmarks ask for is renewed as often
        tool_call_parser="pythonic",
        constrained_json_disable_any_whitespace=True,  # what the pair writes, where it may
    )
    with running_server(tmp_path_factory.mktemp("clients"), cold=True, **arguments) as running:
        yield running
