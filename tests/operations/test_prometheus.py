"""What a Prometheus that scrapes a server makes of the dashboard's and the pages' queries."""

import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import running_server
from little_server import answering
from operator_client import SETTINGS, Operator, queries_of_dashboard, queries_of_page
from tiny_models import smc_arguments

from sglang_smc_tools.demo.serving import free_port

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

CACHE = Path.home() / ".cache/sglang-smc/prometheus"
CONFIG = Path(__file__).parents[2] / "examples/grafana/prometheus.yaml"
TARGET = "127.0.0.1:30000"  # which stands in the configuration

# What Prometheus 3 asks for by default (`acceptHeader` in its scrape/scrape.go).
ACCEPT_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


def find_binary() -> str | None:
    """An installed Prometheus, or the one of the package; None where there is neither."""
    if (installed := shutil.which("prometheus")) is not None:
        return installed
    binary = CACHE / "usr/bin/prometheus"
    if not binary.exists() and shutil.which("apt-get") is not None:
        CACHE.mkdir(parents=True, exist_ok=True)
        # As any user; the lists of packages are those of the last `apt-get update`.
        subprocess.run(["apt-get", "download", "prometheus"], cwd=CACHE, capture_output=True)
        for package in CACHE.glob("prometheus_*.deb"):
            subprocess.run(["dpkg", "-x", package, CACHE], check=True)
    return str(binary) if binary.exists() else None


class Prometheus:
    def __init__(self, port: int) -> None:
        self._api = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(self._api + path, params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def ask(self, query: str) -> list[float]:
        """The values of a query's series, those that are no numbers aside."""
        found = [float(one["value"][1]) for one in self.get("query", query=query)["result"]]
        return [value for value in found if math.isfinite(value)]

    def wait_for_scrapes(self, number: int) -> None:
        """Until it has read so many more."""
        taken = self._num_scrapes()
        deadline = time.monotonic() + 60
        while self._num_scrapes() < taken + number:
            assert time.monotonic() < deadline, self.get("targets")
            time.sleep(0.3)

    def _num_scrapes(self) -> float:
        return sum(self.ask('sum_over_time(up{job="sglang"}[1h])'))


@contextmanager
def prometheus(binary: str, folder: Path, server: str) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration, but for the address ``server`` that it reads."""
    folder.mkdir()
    shipped = CONFIG.read_text()
    port = free_port()
    assert shipped.count(TARGET) == 1
    (folder / "prometheus.yaml").write_text(shipped.replace(TARGET, server))
    command = [binary, f"--config.file={folder}/prometheus.yaml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (log_of := folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not _is_ready(port):
            assert process.poll() is None and time.monotonic() < deadline, log_of.read_text()
            time.sleep(0.1)
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def asking(server: str, accept: str) -> Iterator[str]:
    """The address of a proxy that asks a server's /metrics as ``accept`` says."""

    def answer(*_: Any) -> tuple[int, httpx.Response]:
        found = httpx.get(f"http://{server}/metrics", headers={"Accept": accept})
        return found.status_code, found

    with answering(answer) as url:
        yield url.removeprefix("http://")


@pytest.fixture(scope="module")
def binary() -> str:
    found = find_binary()
    if found is None:
        pytest.skip("no Prometheus here, and no package of it for `apt-get download`")
    return found


@pytest.fixture(scope="module")
def server(
    binary: str, tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    target, draft = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    arguments = smc_arguments(target, draft, **SETTINGS)
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, kind=Operator, enable_metrics=True, **arguments) as running:
        use(running)  # a series that begins at its first event shows no rate of it
        yield running


def use(server: Operator) -> None:
    server.answers()
    with server.streaming() as stream:
        stream.finish()


@pytest.fixture(scope="module")
def scraping(
    binary: str, server: Operator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Prometheus]]:
    """By what it asks for: by itself, as Prometheus 3 does, and as what reads plain text."""
    address = server.url.removeprefix("http://")
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        asking(address, ACCEPT_3) as as_3,
        asking(address, "text/plain;version=0.0.4") as as_text,
        prometheus(binary, folder / "own", address) as own,
        prometheus(binary, folder / "3", as_3) as third,
        prometheus(binary, folder / "text", as_text) as plain,
    ):
        found = {"own": own, "3": third, "text": plain}
        for one in found.values():
            one.wait_for_scrapes(1)
        use(server)
        for one in found.values():
            one.wait_for_scrapes(2)
        yield found


@pytest.fixture(params=["own", "3", "text"])
def scraper(scraping: dict[str, Prometheus], request: pytest.FixtureRequest) -> Prometheus:
    return scraping[request.param]


@pytest.mark.parametrize(("queries", "least"), [(queries_of_dashboard, 26), (queries_of_page, 4)])
def test_each_query_has_data(
    scraper: Prometheus, queries: Callable[[], list[str]], least: int
) -> None:
    asked = queries()
    assert len(asked) >= least
    assert not [query for query in asked if not scraper.ask(query)]


def test_the_dashboard_finds_the_models(scraper: Prometheus) -> None:
    query = {"match[]": "sglang_spec_smc_rounds_total"}
    found: Any = scraper.get("label/model_name/values", **query)
    assert len(found) == 1 and found[0]


def test_both_spellings_of_sglangs_names_are_found(
    scraping: dict[str, Prometheus],
) -> None:
    """Else this module asks one question three times."""
    names = {who: one.get("label/__name__/values") for who, one in scraping.items()}
    assert "sglang:token_usage" in names["3"] and "sglang:token_usage" in names["text"]
    assert "sglang_token_usage" not in names["3"]
    ours = {who: {name for name in found if "spec_smc" in name} for who, found in names.items()}
    assert ours["own"] == ours["3"] == ours["text"] and ours["own"]
