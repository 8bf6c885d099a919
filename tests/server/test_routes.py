"""Presets, particles, traces and counts on every route that generates text."""

import json
from typing import Any

import httpx
import pytest
from http_server import Server
from routed import (
    MESSAGES,
    PRESETS,
    PROMPT,
    ROUTES,
    STREAMED,
    WITH_PRESETS,
    chat,
    completion,
    counts_of,
    parts_of,
    rounds_and_particles,
    text_of,
)
from spelling import PERSON, is_person, tokenizer
from trace_replay import read, replay

from server.kinds import PRESETS as ALL_PRESETS

OPENAI = ("/v1/chat/completions", "/v1/completions")
ON = {"seed": 3, "temperature": 1.0}


@pytest.mark.parametrize("route", WITH_PRESETS)
def test_presets_are_followed(server: Server, model: str, route: str) -> None:
    """Presets are listed, and rounds are of the preset's two particles."""
    listed = [card["id"] for card in server.get("/v1/models").json()["data"]]
    assert listed == [model, *(f"{model}:{name}" for name in ALL_PRESETS)]
    rounds, particles = rounds_and_particles(server)
    answer = server.post(route, **ROUTES[route](model, "two"))
    assert answer.status_code == 200, answer.text
    after = rounds_and_particles(server)
    assert after[1] - particles == 2 * (after[0] - rounds) > 0


@pytest.mark.parametrize("route", ["/api/chat", "/api/generate"])
def test_a_stream_of_ollama_loses_one_token_at_most(server: Server, model: str, route: str) -> None:
    """As without speculation: red if it loses the tokens of its last round."""
    greedy = ROUTES[route](model, None, temperature=0.0)
    shorter = {**greedy, "options": {**greedy["options"], "num_predict": 23}}
    lines = server.post(route, **greedy | {"stream": True}).text.splitlines()
    assert "".join(text_of(json.loads(line)) for line in lines) == text_of(
        server.post(route, **shorter).json()
    )


@pytest.mark.parametrize("route", STREAMED)
def test_a_stream_is_the_whole_text(server: Server, model: str, route: str) -> None:
    asked = ROUTES[route](model, "two" if route in WITH_PRESETS else None, temperature=0.0)
    whole = text_of(server.post(route, **asked).json())
    streamed = server.post(route, **asked | {"stream": True}).text
    parts = [STREAMED[route](part) for part in parts_of(streamed)]
    assert whole == (parts[-1] if route == "/generate" else "".join(parts))
    assert len(parts) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_routes_answer_and_count_alike(server: Server, model: str, temperature: float) -> None:
    """In the server's mode: with a seed where the route has one; greedy on all of them."""
    seeded = {} if temperature == 0 else {"seed": 5}
    found = {}
    for route, body in ROUTES.items():
        if seeded and route not in ("/generate", *OPENAI):
            continue
        more = {"temperature": temperature, **seeded}
        if route == "/generate" and seeded:
            more["sampling_seed"] = more.pop("seed")
        asked = body(model, None, **more)
        if route == "/v1/responses":
            asked["max_output_tokens"] += 2  # SGLang takes two off
        answer = server.post(route, **asked).json()
        found[route] = (text_of(answer).strip(), *counts_of(answer))
    assert len(set(found.values())) == 1, found
    for route in OPENAI:
        asked = ROUTES[route](model, None, temperature=temperature, **seeded)
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = parts_of(server.post(route, **asked, **usage).text)
        assert counts_of(last) == found["/generate"][1:]


@pytest.mark.parametrize("route", WITH_PRESETS)
def test_unknown_presets_are_refused(server: Server, model: str, route: str) -> None:
    answer = server.post(route, **ROUTES[route](model, "exat"))
    assert answer.status_code == 400
    streamed = server.post(route, **ROUTES[route](model, "exat"), stream=True)  # 400, or an event
    for told in (answer.text, streamed.text):
        assert "'exat'" in told and all(f"'{name}'" in told for name in PRESETS)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_conversation_that_cannot_fit_is_refused(server: Server, model: str, route: str) -> None:
    asked = ROUTES[route](model, None)
    if route == "/v1/responses":
        asked["input"] = "a" * 200_000
    else:
        asked["messages"] = [{"role": "user", "content": "a" * 200_000}]
    for stream in (False, True):
        answer = server.post(route, **asked | {"stream": stream})
        assert answer.status_code == 400 and "The conversation has 20000" in answer.text


def test_own_keys_win_over_a_presets(server: Server, model: str) -> None:
    own = {"custom_params": {"smc": {"num_particles": 3}}, "return_meta_info": True}
    (choice,) = server.post("/v1/chat/completions", **chat(model, "two", **own)).json()["choices"]
    info = choice["meta_info"]
    assert (info["spec_smc_mode"], info["spec_smc_num_particles"]) == ("exact", 3)


def test_a_chat_s_preset_may_stand_in_its_template_s_arguments(server: Server, model: str) -> None:
    own = {"chat_template_kwargs": {"smc_preset": "two"}, "return_meta_info": True}
    answer = server.post("/v1/chat/completions", **chat(model, None, **own)).json()
    told = answer["choices"][0]["meta_info"]
    assert (told["spec_smc_mode"], told["spec_smc_num_particles"]) == ("exact", 2)
    plain = server.post("/v1/chat/completions", **chat(model, "two")).json()
    assert answer["usage"] == plain["usage"], "the template is shown the same"
    for other in (None, "exact"):
        refused = chat(model, other, chat_template_kwargs={"smc_preset": "exat"})
        found = server.post("/v1/chat/completions", **refused)
        assert found.status_code == 400 and "'exat'" in found.text


@pytest.mark.parametrize("route", OPENAI)
def test_particles_of_samples_end_as_their_choices_do(
    server: Server, model: str, route: str
) -> None:
    """Red if a particle keeps the stop string, or is another sample's."""
    asked = ROUTES[route](model, "all-particles", n=2, stop=["e", "s "], temperature=1.2, **ON)
    for choice in server.post(route, **asked).json()["choices"]:
        particles = choice["meta_info"]["spec_smc_particles"]
        ends = [(one["text"], one["finish_reason"]["type"]) for one in particles]
        assert (text_of({"choices": [choice]}), choice["finish_reason"]) in ends
        assert not any(stop in text for text, _ in ends for stop in asked["stop"])


@pytest.mark.parametrize("route", OPENAI)
@pytest.mark.parametrize("by", ["preset", "key"])
def test_particles_and_traces_come_streamed(
    server: Server, model: str, route: str, by: str
) -> None:
    """Each sample with its own, readable: red if a chunk or a choice has none, or another's."""
    decode = tokenizer().decode
    for name in ("all-particles", "traced"):
        asked = ROUTES[route](model, name if by == "preset" else None, n=2, **ON)
        if by == "key":
            asked["custom_params"] = {"smc": PRESETS[name]}
        choices = server.post(route, **asked).json()["choices"]
        parts = list(parts_of(server.post(route, **asked, stream=True).text))
        ends = [c for part in parts for c in part["choices"] if c["finish_reason"]]
        streamed = {choice["index"]: choice["meta_info"] for choice in ends}
        for choice in choices:
            text = text_of({"choices": [choice]})
            for info in (choice["meta_info"], streamed[choice["index"]]):
                if name == "all-particles":
                    assert len(info["spec_smc_particles"]) == 3
                    continue
                said = replay(read(info), tolerance=1e-5).output_ids
                whole = decode(said, skip_special_tokens=True).strip()
                assert whole.startswith(text.strip().rstrip("\N{REPLACEMENT CHARACTER}"))
        others = [c for part in parts for c in part["choices"] if not c["finish_reason"]]
        assert not any("meta_info" in choice for choice in others)


def test_completions_show_meta_info_on_request(server: Server, model: str) -> None:
    def ask(**more: Any) -> httpx.Response:
        return server.post("/v1/completions", **completion(model, None, **more))

    *_, last = parts_of(ask(return_meta_info=True, stream=True).text)
    for answer in (ask(return_meta_info=True).json(), last):
        assert answer["choices"][0]["meta_info"]["spec_smc_num_particles"] == 4
    assert "meta_info" not in ask().json()["choices"][0]
    assert ask(return_meta_info="x").status_code == 400


@pytest.mark.parametrize("mode", ["smc", "exact"])
def test_structured_output_as_chat_clients_ask_for_it(server: Server, mode: str) -> None:
    """A schema for the answer, whole and streamed."""
    own = {"model": "default", "messages": MESSAGES, "max_tokens": 300, "temperature": 0.7}
    own |= {"seed": 3, "custom_params": {"smc": {"mode": mode}}}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    asked = {**own, "response_format": schema}
    (whole,) = server.post("/v1/chat/completions", **asked).json()["choices"]
    text = whole["message"]["content"]
    assert whole["finish_reason"] == "stop" and is_person(text)
    parts = parts_of(server.post("/v1/chat/completions", **asked, stream=True).text)
    assert "".join(map(STREAMED["/v1/chat/completions"], parts)) == text


def test_log_and_server_info_tell_how_smc_does(server: Server) -> None:
    server.post("/generate", text=PROMPT, sampling_params={"max_new_tokens": 60})
    info = server.get("/server_info").json()
    assert info["speculative_smc_num_particles"] == 4
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1
    assert "ess / particles:" in server.log.read_text()
