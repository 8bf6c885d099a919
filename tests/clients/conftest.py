"""One server with the shipped pair, and the potential of a page, for all clients."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from http_server import Server, running_server
from routed import pair_arguments

PAGE = Path(__file__).parents[2] / "docs" / "potentials.md"


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    found = re.search(r"```python\n(# my_rewards\.py.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    (folder / "my_rewards.py").write_text(found[1])
    arguments = pair_arguments() | {"speculative_smc_potential": ["polite=my_rewards:Politeness"]}
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with running_server(folder, environment, cold=True, **arguments) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
