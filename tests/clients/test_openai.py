"""openai-python against an SMC server, with a model that solves what it is asked."""

import asyncio

import openai
import pytest
from http_server import Server
from openai.types.chat import ChatCompletion
from pair.task import check, held_out, messages

pytestmark = pytest.mark.engine

# At temperature 0 the target solves these.
SOLVED = (1, 3, 5, 7)
CHOICES = "custom_params"


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, index: int = SOLVED[0], **arguments: object) -> ChatCompletion:
    asked = {"model": "default", "messages": messages(held_out(index)), "max_tokens": 160}
    return client.chat.completions.create(**{**asked, **arguments})  # type: ignore[call-overload]


def text_of(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def prompt_of(index: int) -> str:
    return f"<|user|>{held_out(index).question}<|assistant|>"


@pytest.mark.parametrize("index", SOLVED)
def test_chat_solves_problems_at_temperature_0(client: openai.OpenAI, index: int) -> None:
    answer = ask(client, index, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert check(text_of(answer), held_out(index))
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_temperature_0_is_the_targets_text_on_both_routes_and_in_every_mode(
    client: openai.OpenAI,
) -> None:
    texts = [
        text_of(ask(client, temperature=0, extra_body={CHOICES: {"smc": {"mode": mode}}}))
        for mode in ("smc", "exact", "auto")
    ]
    completion = client.completions.create(
        model="default", prompt=prompt_of(SOLVED[0]), temperature=0, max_tokens=160
    )
    assert {*texts, completion.choices[0].text} == {texts[0]}


def test_streams_join_to_the_whole_of_their_seed(client: openai.OpenAI) -> None:
    drawn = {"temperature": 1.0, "seed": 11}
    whole = text_of(ask(client, **drawn))
    stream = client.chat.completions.create(
        model="default",
        messages=messages(held_out(SOLVED[0])),  # type: ignore[arg-type]
        max_tokens=160,
        stream=True,
        stream_options={"include_usage": True},
        **drawn,  # type: ignore[call-overload]
    )
    chunks = list(stream)
    pieces = [
        c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content
    ]
    assert len(pieces) > 1
    assert "".join(pieces) == whole
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 10


def test_n_answers_differ_and_their_seed_repeats_them(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = ask(client, n=3, temperature=1.0, seed=seed)
        return [choice.message.content or "" for choice in answer.choices]

    first = texts(5)
    assert len(set(first)) == 3
    assert texts(5) == first
    assert texts(6) != first


def test_stop_and_max_tokens_end_answers(client: openai.OpenAI) -> None:
    whole = text_of(ask(client, temperature=0))
    stopped = ask(client, temperature=0, stop=["="])
    assert stopped.choices[0].finish_reason == "stop"
    assert text_of(stopped) == whole[: whole.index("=")]
    short = ask(client, temperature=0, max_tokens=5)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None and short.usage.completion_tokens == 5
    assert whole.startswith(text_of(short))


@pytest.mark.parametrize("mode", ["smc", "exact", "auto"])
def test_log_probabilities_whole_and_streamed(client: openai.OpenAI, mode: str) -> None:
    asked = {
        **{"temperature": 1.0, "seed": 11, "logprobs": True, "top_logprobs": 4},
        "extra_body": {CHOICES: {"smc": {"mode": mode}}},
    }
    whole = ask(client, **asked)
    places = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert places and "".join(place.token for place in places).startswith(text_of(whole))
    for place in places:
        likeliest = [other.logprob for other in place.top_logprobs]
        assert len(likeliest) == 4 and likeliest == sorted(likeliest, reverse=True)
        if place.token in (other.token for other in place.top_logprobs):
            assert place.logprob in likeliest
        else:
            assert place.logprob <= likeliest[-1]
    chunks = [chunk.choices[0] for chunk in ask(client, **asked, stream=True) if chunk.choices]
    streamed = [place for c in chunks if c.logprobs for place in c.logprobs.content]
    assert [place.token for place in streamed] == [place.token for place in places]
    # Now the prompt is cached, and its last pass has another shape.
    values = [place.logprob for place in places]
    assert [place.logprob for place in streamed] == pytest.approx(values, abs=1e-3)


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt=prompt_of(SOLVED[0]), temperature=0, max_tokens=9, logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens and "".join(found.tokens) == answer.choices[0].text
    for value, others in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert value == pytest.approx(max(others.values())), "the likeliest, at temperature 0"


def test_several_prompts_in_one_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt=[prompt_of(i) for i in SOLVED], temperature=0, max_tokens=160
    )
    for index, choice in zip(SOLVED, answer.choices, strict=True):
        assert check(choice.text, held_out(index))


def test_extra_body_chooses_and_meta_info_tells(client: openai.OpenAI) -> None:
    smc = {"mode": "exact", "num_particles": 2}
    answer = ask(client, extra_body={CHOICES: {"smc": smc}, "return_meta_info": True})
    meta_info = answer.choices[0].model_extra["meta_info"]  # type: ignore[index]
    assert meta_info["spec_smc_mode"] == "exact"
    assert meta_info["spec_smc_num_particles"] == 2
    assert meta_info["spec_accept_length"] > 1


def test_a_wrong_key_is_a_bad_request_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="num_particle"):
        ask(client, extra_body={CHOICES: {"smc": {"num_particle": 2}}})


def test_concurrent_async_clients_get_their_own_answers(server: Server) -> None:
    async def everyone() -> list[ChatCompletion]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="default",
                        messages=messages(held_out(index)),  # type: ignore[arg-type]
                        temperature=0,
                        max_tokens=160,
                    )
                    for index in SOLVED
                )
            )

    for index, answer in zip(SOLVED, asyncio.run(everyone()), strict=True):
        assert check(text_of(answer), held_out(index))
