"""What a Prometheus that scrapes a server makes of the dashboard's and the pages' queries."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_server import Server, running_server
from operator_client import (
    LONG,
    SETTINGS,
    generate,
    queries_of_dashboard,
    queries_of_page,
    streaming,
)
from real_prometheus import ACCEPT_3, Prometheus, asking, find_binary, prometheus
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.fixture(scope="module")
def binary() -> str:
    found = find_binary()
    if found is None:
        pytest.skip("no Prometheus here, and no package of it for `apt-get download`")
    return found


@pytest.fixture(scope="module")
def server(
    binary: str, tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    target, draft = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    arguments = smc_arguments(target, draft, **SETTINGS)
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, enable_metrics=True, **arguments) as running:
        use(running)  # a series that begins at its first event shows no rate of it
        yield running


def use(server: Server) -> None:
    """Requests of all modes, and a stream."""
    generate(server)
    with streaming(server) as stream:
        stream.finish()


@pytest.fixture(scope="module")
def scraping(
    binary: str, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Prometheus]]:
    """By what it asks for: by itself, as Prometheus 3 does, and as what reads plain text."""
    address, folder = server.url.removeprefix("http://"), tmp_path_factory.mktemp("prometheus")
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


def test_each_query_of_the_dashboard_has_data(scraper: Prometheus) -> None:
    queries = queries_of_dashboard()
    assert len(queries) > 25
    assert not [query for query in queries if not scraper.ask(query)]


def test_each_query_of_the_page_has_data(scraper: Prometheus) -> None:
    queries = queries_of_page()
    assert queries
    assert not [query for query in queries if not scraper.ask(query)]


def test_the_dashboard_finds_the_models(scraper: Prometheus) -> None:
    query = {"match[]": "sglang_spec_smc_rounds_total"}
    found: Any = scraper.get("label/model_name/values", **query)
    assert len(found) == 1 and found[0]


def test_both_spellings_of_sglangs_names_are_there_to_be_found(
    scraping: dict[str, Prometheus],
) -> None:
    """Else this module asks one question three times."""
    names = {who: one.get("label/__name__/values") for who, one in scraping.items()}
    assert "sglang:token_usage" in names["3"] and "sglang:token_usage" in names["text"]
    assert "sglang_token_usage" not in names["3"]
    ours = {who: {name for name in found if "spec_smc" in name} for who, found in names.items()}
    assert ours["own"] == ours["3"] == ours["text"] and ours["own"]


def test_what_streams_were_is_what_the_metrics_say(scraper: Prometheus) -> None:
    """The client's own tokens, of two streams of one length."""
    (tokens,) = scraper.ask("sglang_spec_smc_chunk_tokens_sum")
    (chunks,) = scraper.ask("sglang_spec_smc_chunk_tokens_count")
    (gaps,) = scraper.ask("sglang_spec_smc_chunk_gap_seconds_count")
    assert (tokens, gaps) == (2 * LONG, chunks - 2)
