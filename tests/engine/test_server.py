"""The HTTP server as a client sees it: stock routes, streaming, refusals, and the log."""

import json
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from http_server import Server, running_server
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target, draft = (tiny(vocab_size=64, scale=0.3, seed=seed) for seed in (1, 2))
    settings = {"num_particles": 4, "num_steps": 3, "max_lag": 32, "decode_log_interval": 5}
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, **smc_arguments(target, draft, **settings)) as running:
        yield running


def test_openai_client_streams_and_seeds(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    arguments = {
        "model": "default",
        "prompt": "t3 t4 t5",
        "max_tokens": 40,
        "seed": 7,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**arguments).choices[0].text
    chunks = [c.choices[0].text for c in client.completions.create(**arguments, stream=True)]
    assert sum(1 for text in chunks if text) > 3
    assert "".join(chunks) == whole


def test_parallel_samples_through_openai(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    answer = client.completions.create(
        model="default", prompt="t3", max_tokens=12, n=3, seed=1, extra_body={"ignore_eos": True}
    )
    assert len({choice.text for choice in answer.choices}) == 3


@pytest.mark.parametrize(
    "field",
    [
        {"logprobs": 129},
        {"return_hidden_states": True},
        {"custom_params": {"smc": 1}},
        {"custom_params": {"smc": {"modus": "exact"}}},
        {"custom_params": {"smc": {"num_particles": 5}}},
    ],
)
def test_refusals_are_http_400_and_name_the_field(server: Server, field: dict) -> None:
    answer = server.post("/v1/completions", model="m", prompt="t3", max_tokens=4, **field)
    assert answer.status_code == 400
    name = next(iter(field))
    assert {"logprobs": "top_logprobs_num"}.get(name, name) in answer.text
    assert server.post("/v1/completions", model="m", prompt="t3", max_tokens=4).status_code == 200


def test_openai_client_chooses_for_its_request(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")

    def ask(**smc: object) -> str:
        extra = {"ignore_eos": True, "custom_params": {"smc": smc}}
        answer = client.completions.create(
            model="default", prompt="t3 t4", max_tokens=30, seed=3, extra_body=extra
        )
        return answer.choices[0].text

    texts = [ask(), ask(mode="exact"), ask(num_particles=1, evidence_threshold=0)]
    assert len(set(texts)) == 3
    assert ask(mode="exact") == texts[1]


def test_native_route_reports_meta_info_while_streaming(server: Server) -> None:
    body = {
        "input_ids": [3, 4, 5],
        "sampling_params": {"max_new_tokens": 30, "ignore_eos": True},
        "stream": True,
    }
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=120) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *early, last = [json.loads(line)["meta_info"] for line in lines]
    assert last["spec_smc_rounds_ct"] == last["spec_verify_ct"]
    assert isinstance(last["spec_smc_log_evidence"], float)
    assert not any(name.startswith("spec_smc_") for info in early for name in info)


def test_a_client_that_leaves_takes_nothing_with_it(server: Server) -> None:
    body = {
        "input_ids": [3, 4],
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
        "stream": True,
    }
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=120) as stream:
        next(stream.iter_lines())
    answer = server.post("/generate", input_ids=[5], sampling_params={"max_new_tokens": 4})
    assert answer.status_code == 200


def test_log_and_server_info_tell_how_smc_does(server: Server) -> None:
    server.post(
        "/generate", input_ids=[3], sampling_params={"max_new_tokens": 60, "ignore_eos": True}
    )
    info = httpx.get(server.url + "/server_info", timeout=30).json()
    assert info["speculative_smc_num_particles"] == 4
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1
    assert "ess / particles:" in server.log.read_text()
