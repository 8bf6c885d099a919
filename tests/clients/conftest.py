"""One server with the shipped pair, for all clients."""

from collections.abc import Iterator

import openai
import pytest
from http_server import Server, running_server
from routed import pair_arguments


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    with running_server(folder, cold=True, **pair_arguments()) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
