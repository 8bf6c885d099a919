"""OpenAI's and Anthropic's own clients, and `sglang-smc watch`."""

from typing import Any

import anthropic
import openai
import pytest
from http_server import Server
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion
from routed import MESSAGES
from routed import PROMPT as TEXT

from server.kinds import PLAIN, PROMPT
from sglang_smc_tools import watch


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=server.key, max_retries=0)


def ask(client: openai.OpenAI, **arguments: object) -> ChatCompletion:
    asked: dict[str, Any] = {"model": "default", "messages": MESSAGES, "max_tokens": 40}
    return client.chat.completions.create(**asked | {"seed": 11, "temperature": 1.0} | arguments)


def texts_of(answer: ChatCompletion) -> list[str]:
    return [choice.message.content or "" for choice in answer.choices]


def test_openai_seeds_samples_and_chooses(client: openai.OpenAI) -> None:
    samples = {"n": 3, "max_tokens": 8}
    first = texts_of(ask(client, **samples))
    assert len(set(first)) == 3
    assert texts_of(ask(client, **samples)) == first != texts_of(ask(client, **samples, seed=6))
    smc = {"mode": "exact", "num_particles": 2}
    extra = {"custom_params": {"smc": smc}, "return_meta_info": True}
    info = ask(client, extra_body=extra).choices[0].model_extra["meta_info"]  # type: ignore[index]
    assert (info["spec_smc_mode"], info["spec_smc_num_particles"]) == ("exact", 2)
    with pytest.raises(openai.BadRequestError, match="num_particle"):
        ask(client, extra_body={"custom_params": {"smc": {"num_particle": 2}}})


@pytest.mark.parametrize("mode", ["smc", "exact", "auto"])
def test_openai_streams_texts_usage_and_log_probabilities(client: openai.OpenAI, mode: str) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 4}
    smc = {"mode": mode} | ({"tilt": 0} if mode == "auto" else {})
    asked["extra_body"] = {"custom_params": {"smc": smc}}
    whole = ask(client, **asked)
    places = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert places
    for place in places:
        likeliest = [other.logprob for other in place.top_logprobs]
        assert len(likeliest) == 4 and likeliest == sorted(likeliest, reverse=True)
        assert place.logprob <= likeliest[0]
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks: Any = list(ask(client, **asked, **usage))
    assert chunks[-1].usage == whole.usage
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert ["".join(choice.delta.content or "" for choice in choices)] == texts_of(whole)
    streamed = [place for c in choices if c.logprobs for place in c.logprobs.content]
    assert [place.token for place in streamed] == [place.token for place in places]
    values = [place.logprob for place in places]
    assert [place.logprob for place in streamed] == pytest.approx(values, abs=2e-4)


@pytest.mark.parametrize("smc", [{}, {"mode": "exact"}, {"mode": "auto", "num_steps": 2}, PLAIN])
def test_openai_counts_draft_tokens(client: openai.OpenAI, smc: dict[str, Any]) -> None:
    """Of all samples; red if a route, a stream or a sample is left out, or K is the server's."""
    shown = {"extra_body": {"custom_params": {"smc": smc}, "return_meta_info": True}}
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    prompt: dict[str, Any] = {"model": "default", "prompt": TEXT, "max_tokens": 40, "seed": 11}
    plain = {"extra_body": {"custom_params": {"smc": smc}}}
    whole: list[Any] = [
        ask(client, n=2, **shown),
        client.completions.create(**prompt, n=2, **shown),
    ]
    chunks: list[Any] = [
        list(ask(client, n=2, **plain, **streamed)),
        list(client.completions.create(**prompt, n=2, **plain, **streamed)),
    ]
    for answer, parts in zip(whole, chunks, strict=True):
        infos = [choice.model_extra["meta_info"] for choice in answer.choices]
        accepted, rejected = draft_tokens(answer.usage)
        assert accepted == sum(info.get("spec_num_correct_drafts", 0) for info in infos)
        rounds = sum(info["spec_smc_rounds_ct"] for info in infos)
        assert accepted + rejected == rounds * smc.get("num_steps", 4)
        assert draft_tokens(parts[-1].usage) == (accepted, rejected)


def draft_tokens(usage: CompletionUsage) -> tuple[int, int]:
    """Those of the answers, and those that were proposed in vain."""
    details = usage.completion_tokens_details
    assert details is not None
    accepted = details.accepted_prediction_tokens
    rejected = details.rejected_prediction_tokens
    assert accepted is not None and rejected is not None
    assert accepted >= 0 and rejected >= 0
    return accepted, rejected


def test_anthropic_whole_and_streamed(server: Server, model: str) -> None:
    client = anthropic.Anthropic(
        base_url=server.url, auth_token=server.key, api_key=None, max_retries=0
    )
    greedy = {"temperature": 0.0}  # later releases of the client have no argument for it
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 24, "extra_body": greedy}
    whole = client.messages.create(model=f"{model}:two", **asked).content[0].text
    with client.messages.stream(model=f"{model}:two", **asked) as stream:
        assert "".join(stream.text_stream) == whole
    with pytest.raises(anthropic.BadRequestError, match="'two'"):
        client.messages.create(model=f"{model}:exat", **asked)


def test_watch_shows_a_line_for_the_server_and_for_each_request(server: Server) -> None:
    """Red if a request is told under another name, counts another's rounds, or stays there."""
    assert server.key
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.7}
    custom = {"smc": {"mode": "exact", "num_particles": 3}}
    asked = {"input_ids": PROMPT, "rid": "watched-one"}
    before = watch.snapshot(server.url, server.key)
    with server.stream(**asked, sampling_params={**sampling, "custom_params": custom}) as chunks:
        while next(chunks)["meta_info"]["completion_tokens"] < 40:
            pass
        server.pause("in_place")
        now = watch.snapshot(server.url, server.key)
        server.resume()
        list(chunks)
    shown = watch.rates(before[0], now[0])
    assert (shown["mode"], shown["N"], shown["K"]) == ("smc", 4, 4)
    (one,) = [request for request in now[0].smc["running"] if request["rid"] == "watched-one"]
    assert one["output_tokens"] >= 40 and one["rounds"] > 5
    assert one["output_tokens"] == pytest.approx(one["tokens_per_pass"] * one["rounds"])
    assert (one["mode"], one["num_particles"], one["num_steps"]) == ("exact", 3, 4)
    assert one["ess_ratio"] is None and one["resample_rate"] == 0, "it verifies"
    lines = watch.lines_of(before, now)
    assert lines[2] == watch.REQUEST_HEADER and any("watched-one" in line for line in lines)
    before = watch.snapshot(server.url, server.key)
    server.post("/generate", input_ids=PROMPT, sampling_params=sampling)
    shown = watch.rates(before[0], watch.snapshot(server.url, server.key)[0])
    assert 1 < shown["tokens/pass"] <= 5
    assert 0.25 <= shown["ESS / N"] <= 1
    assert 0.5 < shown["KV free"] <= 1
