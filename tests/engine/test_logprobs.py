"""Log-probabilities of returned tokens are the target's, as stock SGLang defines them.

At temperature 0 all that comes back is what the same server returns without SMC. Elsewhere each
number is held against a scoring of the returned text: a request that generates nothing. SGLang's
own switch retracts every few steps throughout.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

VOCAB_SIZE, EOS, LISTED = 64, 1, [3, 9, 60]
NUM_REQUESTS = 30
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "exact"},
    {"num_particles": 1},
    {"num_particles": 1, "mode": "exact", "num_steps": 1},
    {"power": 2.0},
    {"mode": "mixed"},
    {"resample_at": "token", "ess_threshold": 1.0},
)
# What a request asks for beside its tokens' own log-probabilities; None for nothing at all.
ASKED: tuple[dict[str, Any] | None, ...] = (
    {},
    {"top_logprobs_num": 5},
    {"token_ids_logprob": LISTED, "top_logprobs_num": 2},
    None,
    {"token_ids_logprob": LISTED[:1]},
)
KINDS = ("token", "top", "token_ids")
NAMES = tuple(f"{side}_{kind}_logprobs" for side in ("input", "output") for kind in KINDS)


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    model = {"vocab_size": VOCAB_SIZE, "scale": 0.3}
    return tiny(seed=1, **model), tiny(seed=2, **model)


@pytest.fixture(scope="module")
def stock(engine: Callable[..., Any], pair: tuple[str, str]) -> dict[int, dict[str, Any]]:
    """Greedy answers without SMC, by request."""
    # Its overlap schedule counts each token one step late for penalties.
    running = engine(model_path=pair[0], disable_overlap_schedule=True)
    # One after another: SGLang's own scheduler dies of some mixtures.
    return {i: running.generate(**request(i, greedy=True, start=0)) for i in range(NUM_REQUESTS)}


@pytest.fixture(scope="module")
def running(
    engine: Callable[..., Any],
    pair: tuple[str, str],
    stock: dict[int, dict[str, Any]],
    schedule: str,
) -> Any:
    """After stock SGLang, which forgets `min_new_tokens` where it retracts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "5")
        return engine(**smc_arguments(*pair, num_particles=4, num_steps=3, max_lag=12))


def request(index: int, *, greedy: bool = False, start: int = -1) -> dict[str, Any]:
    """One of many kinds; `index` chooses. Log-probabilities of its prompt are from ``start``."""
    params: dict[str, Any] = {
        "max_new_tokens": 1 + (index * 7) % 33,
        "temperature": 0.0 if greedy else (0.7, 1.0, 1.5)[index % 3],
        "sampling_seed": index,
        "ignore_eos": index % 2 == 0,
        "custom_params": {"smc": CHOICES[index % len(CHOICES)]},  # of which stock knows nothing
    }
    if index % 4 == 0:
        params["top_p"] = 0.8
    if index % 4 == 1:
        params["stop"] = ["t9 ", "t17 t"]
    if greedy and index % 3 == 0:  # where they act, they show
        # Never both: without its overlap schedule SGLang applies the two in any order.
        penalty = "frequency_penalty" if index % 2 else "repetition_penalty"
        params |= {penalty: 1.3, "logit_bias": {"7": 1.5}}
    if index % 6 == 5:
        early = min(6, params["max_new_tokens"])
        params |= {"min_new_tokens": early, "stop_token_ids": list(range(30, 50))}
    prompt = [3 + (index * 5 + i) % 60 for i in range(2 + index % 9)]
    asked = ASKED[index % len(ASKED)]
    fields = (
        {"return_logprob": True, "logprob_start_len": start, **asked} if asked is not None else {}
    )
    return {"input_ids": prompt, "sampling_params": params, **fields}


def generate(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to requests of unlike fields, in one batch."""

    async def everything() -> list[dict[str, Any]]:
        answers = (engine.async_generate(**one) for one in requests)
        return await asyncio.wait_for(asyncio.gather(*answers), timeout=300)

    return asyncio.get_event_loop().run_until_complete(everything())


def assert_same(found: Any, expected: Any) -> None:
    """Nested lists of log-probability, token and text; numbers up to rounding."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=2e-4)
    else:
        assert found == expected


def test_greedy_answers_carry_what_stock_sglang_returns(
    stock: dict[int, dict[str, Any]], running: Any, schedule: str
) -> None:
    """All that comes back: numbers, tokens, texts, lengths, of input and output."""
    # Where a request is retracted before its prefill is taken, SGLang gives its prompt's
    # log-probabilities to the next one; in turn there is no such moment.
    start = 0 if schedule == "in turn" else -1
    names = NAMES if start == 0 else NAMES[len(KINDS) :]
    answers = generate(running, [request(i, greedy=True, start=start) for i in range(NUM_REQUESTS)])
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    reasons = set()
    for i, answer in enumerate(answers):
        expected = stock[i]
        assert answer["output_ids"] == expected["output_ids"]
        info, wanted = answer["meta_info"], expected["meta_info"]
        reasons.add(info["finish_reason"]["type"])
        assert {name for name in NAMES if name in info} == {n for n in NAMES if n in wanted}
        for name in names:
            assert_same(info.get(name), wanted.get(name))
        length = "output_token_logprobs_length"
        assert info.get(length) == wanted.get(length)
    assert reasons == {"stop", "length"}


def test_sampled_answers_carry_what_the_target_says_of_them(running: Any) -> None:
    requests = [request(i) for i in range(NUM_REQUESTS)]
    answers = generate(running, requests)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    assert reasons == {"stop", "length"}
    check(running, requests, answers)


def test_streams_carry_them_chunk_by_chunk(running: Any) -> None:
    requests = [request(i) for i in (1, 2, 4, 6, 7, 11, 12, 14)]

    async def one(given: dict[str, Any]) -> list[dict[str, Any]]:
        return [chunk async for chunk in await running.async_generate(**given, stream=True)]

    async def everything() -> list[list[dict[str, Any]]]:
        return await asyncio.wait_for(asyncio.gather(*map(one, requests)), timeout=300)

    streams = asyncio.get_event_loop().run_until_complete(everything())
    for chunks in streams:
        shown = [chunk["meta_info"]["output_token_logprobs"] for chunk in chunks]
        assert [len(few) for few in shown] == [len(chunk["output_ids"]) for chunk in chunks]
        for few, more in itertools.pairwise(shown):
            assert more[: len(few)] == few
    assert max(map(len, streams)) > 2
    check(running, requests, [chunks[-1] for chunks in streams])


def test_prompts_are_scored_with_and_without_generation(running: Any) -> None:
    """What `logprob_start_len` returns does not depend on what follows the prompt."""
    prompt = [5, 9, 33, 20, 41, 8]
    asked = {"return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 3}
    scored, generated = (
        running.generate(input_ids=prompt, sampling_params={"max_new_tokens": size}, **asked)[
            "meta_info"
        ]
        for size in (0, 7)
    )
    assert len(scored["input_token_logprobs"]) == 4
    for name in NAMES[:2]:
        assert_same(generated[name], scored[name])


def test_more_than_a_tail_can_hold_is_refused(running: Any) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": VOCAB_SIZE + 1}
    with pytest.raises(ValueError, match=r"top_logprobs_num is 65; allowed: .* 0 to 64"):
        running.generate(input_ids=[3, 4], sampling_params={"max_new_tokens": 2}, **asked)


def check(engine: Any, requests: list[dict], answers: list[dict]) -> None:
    """Each answer against a scoring of its text."""
    asking = [i for i, given in enumerate(requests) if "return_logprob" in given]
    scorings = [scoring(requests[i], answers[i]) for i in asking]
    scored = dict(zip(asking, generate(engine, scorings), strict=True))
    for i, (given, answer) in enumerate(zip(requests, answers, strict=True)):
        if i in scored:
            check_one(given, answer, scored[i])
        else:
            assert not any(name in answer["meta_info"] for name in NAMES)


def scoring(given: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """A request for all log-probabilities in the places of an answer's tokens."""
    return {
        "input_ids": [*given["input_ids"], *answer["output_ids"]],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(given["input_ids"]) - 1,
        "top_logprobs_num": VOCAB_SIZE,
    }


def law(given: dict[str, Any], scored: dict[str, Any]) -> torch.Tensor:
    """The target's log-probabilities of all tokens in each place of the output, ``[L, V]``.

    At the request's temperature, and without ends where it is too early for them.
    """
    places = scored["meta_info"]["input_top_logprobs"][1:]
    raw = torch.full((len(places), VOCAB_SIZE), float("nan"))
    for place, entries in enumerate(places):
        for value, token, _ in entries:
            raw[place, token] = value
    assert not raw.isnan().any()
    params = given["sampling_params"]
    early = params.get("min_new_tokens", 0)
    if early:
        raw[:early, [EOS, *params["stop_token_ids"]]] = -torch.inf
    return torch.log_softmax(raw / params["temperature"], -1).clamp_min(-3.4e38)


def check_one(given: dict[str, Any], answer: dict[str, Any], scored: dict[str, Any]) -> None:
    info, tokens, expected = answer["meta_info"], answer["output_ids"], law(given, scored)
    assert len(expected) == len(tokens) == info["output_token_logprobs_length"]
    own = [expected[place, token].item() for place, token in enumerate(tokens)]
    assert [token for _, token, _ in info["output_token_logprobs"]] == tokens
    assert_same([value for value, *_ in info["output_token_logprobs"]], own)
    num_top, listed = given.get("top_logprobs_num", 0), given.get("token_ids_logprob")
    if num_top:
        top = expected.topk(num_top)
        shown = info["output_top_logprobs"]
        assert_same([[value for value, *_ in few] for few in shown], top.values.tolist())
        assert [[token for _, token, _ in few] for few in shown] == top.indices.tolist()
    if listed:
        shown = info["output_token_ids_logprobs"]
        assert_same([[value for value, *_ in few] for few in shown], expected[:, listed].tolist())
        assert [[token for _, token, _ in few] for few in shown] == [listed] * len(tokens)
