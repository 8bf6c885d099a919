"""SGLang's own router before two replicas: it drops `custom_params`, and hands on names."""

from collections.abc import Iterator

import pytest
from http_server import Server, running_router, running_server
from routed import ROUTES, chat, pair_arguments, parts_of, rounds_and_particles

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

SHOWS_PARTICLES = ("/v1/chat/completions", "/v1/completions")
ROUTED = ("/generate", *SHOWS_PARTICLES)


@pytest.fixture(scope="module")
def replicas(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with running_server(tmp_path_factory.mktemp("replica"), **pair_arguments()) as second:
        yield [server, second]


@pytest.fixture(scope="module")
def router(replicas: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    workers = ["--policy", "round_robin", "--worker-urls", *(r.url for r in replicas)]
    with running_router(tmp_path_factory.mktemp("router"), workers, len(replicas)) as router:
        yield router


@pytest.fixture(scope="module")
def model(replicas: list[Server]) -> str:
    return replicas[0].get("/v1/models").json()["data"][0]["id"]


@pytest.mark.parametrize("route", ROUTED)
def test_presets_hold_on_every_replica(
    router: Server, replicas: list[Server], model: str, route: str
) -> None:
    before = [rounds_and_particles(replica) for replica in replicas]
    for _ in range(4):
        answer = router.post(route, **ROUTES[route](model, "two"))
        assert answer.status_code == 200, answer.text
    for replica, (rounds, particles) in zip(replicas, before, strict=True):
        after = rounds_and_particles(replica)
        assert after[0] > rounds, "each replica had its share"
        assert after[1] - particles == 2 * (after[0] - rounds)


@pytest.mark.parametrize("route", SHOWS_PARTICLES)
def test_particles_come_through_whole_and_streamed(router: Server, model: str, route: str) -> None:
    asked = ROUTES[route](model, "all-particles")
    (choice,) = router.post(route, **asked).json()["choices"]
    assert len(choice["meta_info"]["spec_smc_particles"]) == 3
    chunks = parts_of(router.post(route, **asked, stream=True).text)
    (end,) = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert len(end["meta_info"]["spec_smc_particles"]) == 3


def test_what_the_router_drops_is_why_there_are_presets(router: Server, model: str) -> None:
    """When it hands these on, docs/reference.md may say so."""
    asked = chat(model, None, custom_params={"smc": {"num_particles": 99}}, return_meta_info=True)
    answer = router.post("/v1/chat/completions", **asked)
    assert answer.status_code == 200 and "meta_info" not in answer.text
