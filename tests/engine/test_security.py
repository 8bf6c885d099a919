"""Who may talk to a server, from where, and what a hostile request can make of it: nothing."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dill
import httpx
import psutil
import pytest
from http_server import Server, running_server
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

KEY = "a key of this server"


@pytest.fixture(scope="module")
def server(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target, draft = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    settings = {"num_particles": 2, "num_steps": 2, "max_lag": 16, "api_key": KEY}
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, **smc_arguments(target, draft, **settings)) as running:
        yield running


def ask(server: Server, key: str | None = KEY, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 4}, **fields}
    return httpx.post(server.url + "/generate", json=body, headers=headers, timeout=120)


@pytest.mark.parametrize("key", [None, "another key", KEY[:-1], KEY.upper()])
def test_without_the_key_nothing_is_served(server: Server, key: str | None) -> None:
    assert ask(server, key).status_code == 401
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    for route in ("/server_info", "/get_model_info", "/v1/models"):
        assert server.get(route, headers=headers).status_code == 401


def test_with_the_key_requests_are_served(server: Server) -> None:
    answer = ask(server)
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["spec_smc_num_particles"] == 2
    assert server.get("/health").status_code == 200, "the one thing that needs no key"


def test_only_this_machine_can_connect(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    process = psutil.Process(server.process.pid)
    listening = [
        connection.laddr
        for one in (process, *process.children(recursive=True))
        for connection in one.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert {address.ip for address in listening} == {"127.0.0.1"}


class MakesAFolder:
    """To unpickle it is to make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.mkdir, (self.path,)


def test_pickled_code_in_a_request_is_never_read(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "made"
    dill.loads(dill.dumps(MakesAFolder(path)))
    path.rmdir()  # so it would have worked
    processor = json.dumps({"callable": dill.dumps(MakesAFolder(path)).hex()})
    answer = ask(server, custom_logit_processor=processor)
    assert answer.status_code == 400
    assert "custom_logit_processor" in answer.text or "custom logit processor" in answer.text
    assert not path.exists()
    assert ask(server).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"image_data": "file:///etc/passwd"},
        {"lora_path": "/etc/passwd"},
        {"sampling_params": {"custom_params": {"smc": {"mode": "__import__('os').getcwd()"}}}},
        {"sampling_params": {"custom_params": {"smc": {"kernels": "/etc/passwd"}}}},
    ],
)
def test_paths_and_code_in_a_request_are_refused(server: Server, fields: dict) -> None:
    answer = ask(server, **fields)
    assert answer.status_code == 400
    assert "root:" not in answer.text
