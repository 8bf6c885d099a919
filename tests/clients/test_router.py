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


def test_a_chat_s_preset_comes_through_its_template_s_arguments(
    router: Server, replicas: list[Server], model: str
) -> None:
    before = [rounds_and_particles(replica) for replica in replicas]
    for _ in range(4):
        asked = chat(model, None, chat_template_kwargs={"smc_preset": "two"})
        answer = router.post("/v1/chat/completions", **asked)
        assert answer.status_code == 200, answer.text
    for replica, (rounds, particles) in zip(replicas, before, strict=True):
        after = rounds_and_particles(replica)
        assert after[1] - particles == 2 * (after[0] - rounds) > 0


TOO_MANY = {"smc": {"num_particles": 99}}


@pytest.mark.parametrize(
    ("route", "status"),
    [("/generate", 200), ("/v1/chat/completions", 200), ("/v1/completions", 400)],
)
def test_which_routes_hand_on_a_request_s_own_settings(
    router: Server, model: str, route: str, status: int
) -> None:
    """Invalid ones, which a server refuses. When more are 400, docs/operations.md may say so."""
    asked = ROUTES[route](model, None)
    params = asked["sampling_params"] if route == "/generate" else asked
    params["custom_params"] = TOO_MANY
    assert router.post(route, **asked).status_code == status
