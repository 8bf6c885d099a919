"""One server, small and partly broken, on a full disk, for all that is done to it."""

import socket
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from fault_client import FaultServer
from fault_models import fault_pair
from http_server import running_server
from tiny_models import smc_arguments

# Holds few populations; a prompt of more than 24 tokens is prefilled in several steps.
SMALL = {
    "num_particles": 4,
    "num_steps": 3,
    "max_lag": 16,
    "max_total_tokens": 900,
    "max_running_requests": 6,
    "chunked_prefill_size": 24,
    "decode_log_interval": 1,
}


def full_folder(path: Path, *names: str) -> Path:
    """Return a folder in which these files can be opened, and not written."""
    path.mkdir()
    for name in names:
        (path / name).symlink_to("/dev/full")
    return path


@pytest.fixture(scope="package")
def server(
    schedule: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultServer]:
    """Serve a pair that breaks at the tokens of `fault_models.RARE`; its records cannot be kept."""
    folder = tmp_path_factory.mktemp("faults")
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    hours = [datetime.now() + timedelta(hours=hours) for hours in range(24)]
    records = [f"sglang-request-metrics-{hour:%Y%m%d_%H}.log" for hour in hours]
    written = {
        "log_requests": True,
        "log_requests_level": 3,
        "log_requests_target": full_folder(folder / "log", f"{socket.gethostname()}_0.log"),
        "export_metrics_to_file": True,
        "export_metrics_to_file_dir": full_folder(folder / "records", *records),
    }
    arguments = smc_arguments(*fault_pair(folder), **SMALL, **written, chat_template=template)
    with running_server(folder, schedule, kind=FaultServer, **arguments) as running:
        yield running
