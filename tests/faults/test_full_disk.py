"""A disk that fills up under a running server costs its logs, and no answer.

For what the server opens itself, `/dev/full` is such a disk: it takes no byte. Its own log cannot
grow, by a limit on the size of its processes' files.
"""

import json
import resource
import socket
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
from fault_client import FaultServer, request, text_of
from http_server import Server, running_server
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine


def full_folder(path: Path, *names: str) -> Path:
    """A folder in which these files can be opened, and not written."""
    path.mkdir()
    for name in names:
        (path / name).symlink_to("/dev/full")
    return path


def let_the_log_end_here(server: Server) -> int:
    """From now on its processes fail to write; the length that the log has at most, in bytes."""
    process = psutil.Process(server.process.pid)
    length = server.log.stat().st_size
    for one in [process, *process.children(recursive=True)]:
        _, hard = resource.prlimit(one.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (length, hard))
    return server.log.stat().st_size  # who had no limit yet may have written


def test_a_full_disk(tiny: Callable[..., str], tmp_path: Path) -> None:
    """Red for a line that is printed, or written, without being ready for this."""
    pair = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    hours = [datetime.now() + timedelta(hours=hours) for hours in (0, 1)]
    records = [f"sglang-request-metrics-{hour:%Y%m%d_%H}.log" for hour in hours]
    written = {
        "log_requests": True,
        "log_requests_level": 3,
        "log_requests_target": full_folder(tmp_path / "log", f"{socket.gethostname()}_0.log"),
        "export_metrics_to_file": True,
        "export_metrics_to_file_dir": full_folder(tmp_path / "records", *records),
        "decode_log_interval": 1,
    }
    arguments = smc_arguments(*pair, num_particles=4, num_steps=3, max_lag=16, **written)
    with running_server(tmp_path, **arguments) as running:
        server = FaultServer(running)
        body = request([5, 6, 7], 11, tokens=40)
        (text,) = server.alone([body])
        length = let_the_log_end_here(running)
        bodies = [{**body, "rid": f"full-{i:03}"} for i in range(12)]
        answers = server.together(*map(server.ask, bodies))
        assert [answer.status_code for answer in answers] == [200] * len(bodies)
        assert all(text_of(answer.json()) == text for answer in answers)
        lines = running.post("/generate", **body, stream=True).text.split("\n\n")
        assert text_of(json.loads(lines[-3].removeprefix("data: "))) == text
        server.assert_nothing_is_lost()
        assert running.log.stat().st_size <= length, "nothing was kept from being written"
        assert "No space left on device" in running.log.read_text()  # of the first request
