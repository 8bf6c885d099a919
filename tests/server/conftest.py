"""One server for everything that a request chooses, with all of it switched on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Server, running_server
from spelling import spelling_model
from tiny_models import smc_arguments

from server.kinds import EOS, KINDS, PRESETS
from server.target import Target

POTENTIALS = [
    "count=steered:Count",
    "offset=steered:Count(offset=0.5)",
    "slow=steered:Slow",
    "broken=steered:Broken",
]


@pytest.fixture(scope="package")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft that spell, of 540 tokens."""
    folder = tmp_path_factory.mktemp("spelling")
    return spelling_model(folder / "target", 1), spelling_model(folder / "draft", 2)


@pytest.fixture(scope="package")
def server(
    schedule: dict[str, str], spelling: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Results reach its scheduler one round late, as on a GPU; nightly also at once."""
    arguments = smc_arguments(
        *spelling,
        num_particles=4,
        num_steps=4,
        max_lag=32,
        presets=json.dumps(PRESETS),
        potential=POTENTIALS,
        api_key="a key of this server",
        context_length=512,  # all positions that its models have
        max_total_tokens=20_000,
        decode_log_interval=1,
        enable_metrics=True,
        enable_cache_report=True,
        enable_custom_logit_processor=True,
        enable_priority_scheduling=True,
        enable_streaming_session=True,
        tool_call_parser="hermes",
        constrained_json_disable_any_whitespace=True,  # most JSON of a random model is whitespace
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parents[1] / "support")  # from where it loads its potentials
        folder = tmp_path_factory.mktemp("server")
        with running_server(folder, schedule, **arguments) as running:
            yield running


@pytest.fixture(scope="package")
def crowd(server: Server) -> dict[str, dict[str, Any]]:
    """Answers to requests of every kind, sent at once."""
    return dict(zip(KINDS, server.generate(list(KINDS.values())), strict=True))


@pytest.fixture(scope="package")
def target(spelling: tuple[str, str]) -> Target:
    """The server's target, in this process."""
    return Target(spelling[0], EOS)


@pytest.fixture(scope="package")
def model(server: Server) -> str:
    return server.get("/v1/models").json()["data"][0]["id"]
