"""One server, small and partly broken, for all that is done to it; under each schedule in turn."""

from collections.abc import Iterator

import pytest
from fault_client import FaultServer
from fault_models import fault_pair
from http_server import running_server
from tiny_models import smc_arguments

from sglang_smc.options.server import CPU_OVERLAP_ENV

# Holds few populations; a prompt of more than 24 tokens is prefilled in several steps.
SMALL = {
    "num_particles": 4,
    "num_steps": 3,
    "max_lag": 16,
    "max_total_tokens": 900,
    "max_running_requests": 6,
    "chunked_prefill_size": 24,
}


@pytest.fixture(
    scope="session", params=[pytest.param("in turn", marks=pytest.mark.thorough), "overlapped"]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultServer]:
    """Its pair breaks at the tokens of `fault_models.RARE`."""
    folder = tmp_path_factory.mktemp("faults")
    environment = {CPU_OVERLAP_ENV: str(int(request.param == "overlapped"))}
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    arguments = smc_arguments(*fault_pair(folder), **SMALL, chat_template=template)
    with running_server(folder, environment, **arguments) as running:
        yield FaultServer(running)
