"""One server for all that an operator does, and one that has the new weights from the start."""

import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from http_server import HANGS, running_server
from operator_client import OVERLAPPED, SETTINGS, Fresh, Models, Operator
from tiny_models import smc_arguments


@pytest.fixture(scope="package")
def models(tiny: Callable[..., str]) -> Models:
    alike = [tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2, 3, 4)]
    return Models(*alike, tiny(vocab_size=64, scale=0.3, seed=2, layers=1))


@pytest.fixture(scope="package")
def fresh(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    folder = tmp_path_factory.mktemp("fresh")
    arguments = smc_arguments(models.new_target, models.new_draft, **SETTINGS)
    with running_server(folder, OVERLAPPED, kind=Operator, **arguments) as server:
        found = server.texts(), server.greedy()[0]
        process = psutil.Process(server.process.pid)
        tree = [process, *process.children(recursive=True)]
        with server.streaming() as stream:
            server.process.send_signal(signal.SIGTERM)
            while (health := server.get("/health").status_code) == 200:
                time.sleep(0.05)
            last = stream.finish()["meta_info"]
        returncode = server.process.wait(timeout=600)
        processes = len(tree), len(psutil.wait_procs(tree, timeout=HANGS)[1])
        reason = last["finish_reason"]["type"]
        return Fresh(*found, last["completion_tokens"], reason, health, returncode, processes)


@pytest.fixture(scope="package")
def server(
    fresh: Fresh, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    """After ``fresh``: one server at a time."""
    folder = tmp_path_factory.mktemp("server")
    arguments = smc_arguments(models.target, models.draft, enable_metrics=True, **SETTINGS)
    with running_server(folder, OVERLAPPED, kind=Operator, **arguments) as running:
        yield running


@pytest.fixture(scope="package")
def expected(server: Operator) -> list[str]:
    found = server.texts()
    assert len(set(found)) == len(found)
    return found


@pytest.fixture(scope="package")
def undisturbed(server: Operator) -> str:
    """The text of `Operator.streaming`, from the weights of the server's start."""
    with server.streaming() as stream:
        return stream.finish()["text"]


@pytest.fixture(scope="module")
def unharmed(server: Operator, expected: list[str]) -> Iterator[None]:
    """Behind the module's tests the server gives the texts of its start, and holds nothing."""
    yield
    assert server.texts() == expected
    assert server.get("/flush_cache", params={"timeout": HANGS}).status_code == 200


@pytest.fixture
def loaded_back(server: Operator, models: Models) -> Iterator[None]:
    yield
    assert server.load(models.target, models.draft).status_code == 200


@pytest.fixture
def by_file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share tensors by the names of files: descriptors are handed to child processes alone."""
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", "file_system")
