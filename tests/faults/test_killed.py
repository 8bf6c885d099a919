"""A scheduler that is killed takes the server down, at once and visibly, and no client hangs."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from http_server import Server, running_server
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

ENDS_WITHIN = 60.0  # seconds


def scheduler_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if "scheduler" in " ".join(child.cmdline()))


def outcome(server: Server, stream: bool) -> str:
    """How a long request ends for its client."""
    params = {"max_new_tokens": 200, "ignore_eos": True}
    body = {"input_ids": [3, 4], "sampling_params": params, "stream": stream}
    try:
        return str(server.post("/generate", **body).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


def test_a_killed_scheduler_ends_the_server_and_its_clients(
    tiny: Callable[..., str], tmp_path: Path
) -> None:
    target, draft = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    arguments = smc_arguments(target, draft, num_particles=4, num_steps=2, max_lag=64)
    with running_server(tmp_path, cold=True, **arguments) as server, ThreadPoolExecutor(8) as pool:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        clients = [pool.submit(outcome, server, stream=i % 2 == 0) for i in range(8)]
        time.sleep(0.5)
        os.kill(scheduler_of(server).pid, signal.SIGKILL)
        assert server.process.wait(ENDS_WITHIN) != 0
        outcomes = [client.result(timeout=ENDS_WITHIN) for client in clients]
        assert "200" not in outcomes or len(set(outcomes)) > 1, "nobody was interrupted"
        assert set(outcomes) <= {"200", "500", "RemoteProtocolError", "ReadError", "ConnectError"}
        assert "crashed with exit code -9" in server.log.read_text()
        _, alive = psutil.wait_procs(processes, timeout=ENDS_WITHIN)
        assert not alive, "the server left processes behind"
