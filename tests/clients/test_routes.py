"""Presets, particles and counts on every route that generates text."""

import json
from typing import Any

import pytest
from http_server import Server
from routed import (
    PRESETS,
    PROMPT,
    ROUTES,
    STREAMED,
    WITHOUT_CUSTOM_PARAMS,
    chat,
    completion,
    counts_of,
    ollama_chat,
    ollama_generate,
    parts_of,
    rounds_and_particles,
    text_of,
)
from trace_replay import read, replay

pytestmark = pytest.mark.engine

CUSTOM = {"smc": {"num_particles": 3}}


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return server.get("/v1/models").json()["data"][0]["id"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_preset_is_followed(server: Server, model: str, route: str) -> None:
    rounds, particles = rounds_and_particles(server)
    answer = server.post(route, **ROUTES[route](model, "two"))
    assert answer.status_code == 200, answer.text
    assert text_of(answer.json())
    after = rounds_and_particles(server)
    assert after[0] > rounds
    assert after[1] - particles == 2 * (after[0] - rounds)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_preset_is_refused(server: Server, model: str, route: str, stream: bool) -> None:
    answer = server.post(route, **ROUTES[route](model, "exat") | {"stream": stream})
    if stream and route == "/generate":  # SGLang's streams tell in their first event
        (event,) = parts_of(answer.text)
        assert event["error"]["code"] == 400
    else:
        assert answer.status_code == 400, answer.text
    assert "'exat'" in answer.text and all(f"'{name}'" in answer.text for name in PRESETS)


@pytest.mark.parametrize("route", WITHOUT_CUSTOM_PARAMS)
def test_custom_params_that_a_route_cannot_carry_are_refused(
    server: Server, model: str, route: str
) -> None:
    body = ROUTES[route](model, None)
    answer = server.post(route, **body, custom_params=CUSTOM)
    assert answer.status_code == 400 and "preset" in answer.text and "custom_params" in answer.text
    if "options" in body:
        body["options"]["custom_params"] = CUSTOM
        assert server.post(route, **body).status_code == 400
    for shows in ("all-particles", "traced"):
        refused = server.post(route, **body | {"model": f"{model}:{shows}"})
        assert refused.status_code == 400 and "/v1/chat/completions" in refused.text


def test_ollamas_own_tag_names_no_preset(server: Server, model: str) -> None:
    assert server.post("/api/generate", **ollama_generate(model, "latest")).status_code == 200


def test_ollamas_wrong_options_are_bad_requests(server: Server, model: str) -> None:
    answer = server.post("/api/chat", **ollama_chat(model, None, temperature=-1))
    assert answer.status_code == 400 and "temperature" in answer.json()["error"]


def test_own_keys_win_over_a_presets(server: Server, model: str) -> None:
    def numbers(**smc: Any) -> tuple[str, int]:
        asked = chat(model, "two", custom_params={"smc": smc}, return_meta_info=True)
        meta_info = server.post("/v1/chat/completions", **asked).json()["choices"][0]["meta_info"]
        return meta_info["spec_smc_mode"], meta_info["spec_smc_num_particles"]

    assert numbers() == ("exact", 2)
    assert numbers(num_particles=3) == ("exact", 3)
    refused = chat(model, "two", custom_params={"smc": {"power": 2}})
    answer = server.post("/v1/chat/completions", **refused)
    assert answer.status_code == 400 and "'two'" in answer.text and "power" in answer.text


def test_each_prompt_of_a_batch_has_a_preset_of_its_own(server: Server) -> None:
    answers = server.post(
        "/generate",
        text=[PROMPT] * 3,
        lora_path=["two", None, "exact"],
        sampling_params={"max_new_tokens": 4},
    ).json()
    found = [answer["meta_info"]["spec_smc_num_particles"] for answer in answers]
    assert found == [2, 4, 4]
    assert [answer["meta_info"]["spec_smc_mode"] for answer in answers] == ["exact", "smc", "exact"]


def test_presets_are_listed(server: Server, model: str) -> None:
    named = [f"{model}:{name}" for name in PRESETS]
    listed = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == [model, *named]
    assert {card["max_model_len"] for card in listed} == {listed[0]["max_model_len"]}
    assert server.get(f"/v1/models/{named[0]}").json()["id"] == named[0]
    assert server.get(f"/v1/models/{model}:exat").status_code == 404
    tags = [card["name"] for card in server.get("/api/tags").json()["models"]]
    assert tags == [model, *named]
    shown = server.get("/server_info").json()["speculative_smc_presets"]
    assert json.loads(shown) == PRESETS


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("by", ["preset", "key"])
def test_particles_come_whole_and_streamed(server: Server, model: str, route: str, by: str) -> None:
    asked = ROUTES[route](model, "all-particles" if by == "preset" else None, n=2, seed=3)
    if by == "key":
        asked["custom_params"] = {"smc": PRESETS["all-particles"]}
    choices = server.post(route, **asked).json()["choices"]
    whole = [choice["meta_info"]["spec_smc_particles"] for choice in choices]
    assert [len(particles) for particles in whole] == [3, 3]
    parts = list(parts_of(server.post(route, **asked, stream=True).text))
    ends = [c for part in parts for c in part["choices"] if c["finish_reason"]]
    streamed = {choice["index"]: choice["meta_info"]["spec_smc_particles"] for choice in ends}
    assert [[p["output_ids"] for p in streamed[i]] for i in range(2)] == [
        [p["output_ids"] for p in particles] for particles in whole
    ]
    others = [c for part in parts for c in part["choices"] if not c["finish_reason"]]
    assert others and not any("meta_info" in choice for choice in others)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("by", ["preset", "key"])
def test_traces_come_whole_and_streamed(server: Server, model: str, route: str, by: str) -> None:
    """Each sample with its own, readable: red if a chunk or a choice has none, or another's."""
    asked = ROUTES[route](model, "traced" if by == "preset" else None, n=2, seed=3)
    if by == "key":
        asked["custom_params"] = {"smc": PRESETS["traced"]}
    choices = server.post(route, **asked).json()["choices"]
    parts = list(parts_of(server.post(route, **asked, stream=True).text))
    ends = [c for part in parts for c in part["choices"] if c["finish_reason"]]
    streamed = {choice["index"]: choice["meta_info"]["spec_smc_trace"] for choice in ends}
    for choice in choices:
        trace = choice["meta_info"]["spec_smc_trace"]
        assert streamed[choice["index"]] == trace
        ids = replay(read(choice["meta_info"])).output_ids
        said = "".join(trace["pieces"][str(one)] for one in ids)
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text and text.strip() in said
    others = [c for part in parts for c in part["choices"] if not c["finish_reason"]]
    assert others and not any("meta_info" in choice for choice in others)


def test_completions_show_meta_info_on_request(server: Server, model: str) -> None:
    asked = completion(model, None, return_meta_info=True)
    (choice,) = server.post("/v1/completions", **asked).json()["choices"]
    assert choice["meta_info"]["spec_smc_num_particles"] == 4
    parts = list(parts_of(server.post("/v1/completions", **asked, stream=True).text))
    assert parts[-1]["choices"][0]["meta_info"]["spec_smc_num_particles"] == 4
    plain = server.post("/v1/completions", **completion(model, None)).json()["choices"][0]
    assert "meta_info" not in plain
    wrong = server.post("/v1/completions", **completion(model, None, return_meta_info="x"))
    assert wrong.status_code == 400


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_routes_count_alike(server: Server, model: str, temperature: float) -> None:
    """With a seed where the route has one; greedy on all of them."""
    seeded = {} if temperature == 0 else {"seed": 5}
    found = {}
    for route, body in ROUTES.items():
        if seeded and route in ("/v1/responses", "/v1/messages"):
            continue
        more = {"temperature": temperature, **seeded}
        if route == "/generate" and seeded:
            more["sampling_seed"] = more.pop("seed")
        asked = body(model, "two", **more)
        if route == "/v1/responses":
            asked["max_output_tokens"] += 2  # SGLang takes two off
        answer = server.post(route, **asked).json()
        found[route] = (text_of(answer).strip(), *counts_of(answer))
    assert len(set(found.values())) == 1, found
    for route in ("/v1/chat/completions", "/v1/completions"):
        asked = ROUTES[route](model, "two", temperature=temperature, **seeded)
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = parts_of(server.post(route, **asked, **usage).text)
        assert counts_of(last) == found["/generate"][1:]


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_is_the_whole_text(server: Server, model: str, route: str) -> None:
    """Up to its last token, which one round may bring with many others."""
    body = ROUTES[route](model, "two", temperature=0.0)
    whole = text_of(server.post(route, **body).json())
    parts = [
        STREAMED[route](p) for p in parts_of(server.post(route, **body | {"stream": True}).text)
    ]
    streamed = parts[-1] if route == "/generate" else "".join(parts)
    assert streamed == whole and len(parts) > 2
