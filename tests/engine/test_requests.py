"""What a request says is honoured, and the scheduler's machinery works, through a real engine."""

import asyncio
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

EOS = 1
WIDE = {"vocab_size": 64, "scale": 0.3}
NUM_STEPS = 3


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(seed=1, **WIDE), tiny(seed=2, **WIDE)


@pytest.fixture
def running(engine: Callable[..., Any], pair: tuple[str, str]) -> Any:
    """One SMC engine for all tests that need nothing special."""
    return engine(**smc_arguments(*pair, num_particles=4, num_steps=NUM_STEPS, max_lag=32))


def prompts(number: int, longest: int = 60) -> list[list[int]]:
    draw = random.Random(number)
    return [
        [draw.randrange(2, 64) for _ in range(draw.randrange(1, longest))] for _ in range(number)
    ]


def generate(engine: Any, inputs: list[list[int]], params: Any) -> list[dict[str, Any]]:
    return engine.generate(input_ids=inputs, sampling_params=params)


def test_length_limit_in_every_column(running: Any) -> None:
    limits = list(range(1, 3 * (NUM_STEPS + 1) + 2))
    params = [{"max_new_tokens": limit, "ignore_eos": True} for limit in limits]
    answers = generate(running, prompts(len(limits)), params)
    assert [len(answer["output_ids"]) for answer in answers] == limits
    assert all(a["meta_info"]["finish_reason"]["type"] == "length" for a in answers)


def test_nothing_follows_an_end_in_any_column(running: Any) -> None:
    stops = [5, 9, 13, 21, 33, 41, 55, 60]
    answers = generate(
        running, prompts(64), {"max_new_tokens": 40, "stop_token_ids": stops, "temperature": 1.5}
    )
    columns = set()
    for answer in answers:
        *before, last = answer["output_ids"]
        assert not set(before) & {*stops, EOS}
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert last in {*stops, EOS}
            columns.add(len(before) % (NUM_STEPS + 1))
        else:
            assert len(before) == 39
    assert columns == set(range(NUM_STEPS + 1))  # the prefill's, a bonus, each drafted one


@pytest.mark.parametrize(
    ("stop", "pattern"),
    [({"stop": ["t7 ", "3 t2"]}, r"t7 |3 t2"), ({"stop_regex": r"t4\d t5\d"}, r"t4\d t5\d")],
)
def test_stop_strings_and_patterns_end_the_text(running: Any, stop: dict, pattern: str) -> None:
    # SGLang matches against the text with special tokens in it.
    params = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 1.5, **stop}
    shown = {"no_stop_trim": True, "skip_special_tokens": False}
    answers = generate(running, prompts(48), {**params, **shown})
    by_reason: dict[str, list[str]] = {"stop": [], "length": []}
    for answer in answers:
        by_reason[answer["meta_info"]["finish_reason"]["type"]].append(answer["text"])
    assert len(by_reason["stop"]) > 5
    for text in by_reason["stop"]:
        assert re.search(pattern, text)
        assert not re.search(pattern, text.rsplit(" ", 1)[0])  # only the last token completes it
    assert not any(re.search(pattern, text) for text in by_reason["length"])


def test_min_new_tokens_delays_every_end(running: Any) -> None:
    stops = list(range(2, 40))
    answers = generate(
        running,
        prompts(24),
        {"max_new_tokens": 30, "min_new_tokens": 9, "stop_token_ids": stops},
    )
    for answer in answers:
        assert not set(answer["output_ids"][:9]) & {*stops, EOS}
    assert min(len(answer["output_ids"]) for answer in answers) <= 12


def test_a_seed_gives_one_text_alone_and_in_a_batch(running: Any) -> None:
    inputs = prompts(16)
    params = [
        {"max_new_tokens": 24, "sampling_seed": 100 + i, "temperature": 0.5 + 0.1 * i}
        for i in range(16)
    ]
    together = [a["output_ids"] for a in generate(running, inputs, params)]
    alone = [
        generate(running, [prompt], param)[0]["output_ids"]
        for prompt, param in zip(inputs, params, strict=True)
    ]
    assert together == alone
    assert len({tuple(ids) for ids in together}) > 12  # several may end with their first token


def test_parallel_samples_are_independent_and_reproducible(running: Any) -> None:
    params = {"n": 4, "max_new_tokens": 16, "sampling_seed": 5, "ignore_eos": True}
    first, second = (
        [a["output_ids"] for a in running.generate(input_ids=[[3, 4]], sampling_params=params)]
        for _ in range(2)
    )
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4


def test_unseeded_requests_differ(running: Any) -> None:
    answers = generate(running, [[3, 4]] * 8, {"max_new_tokens": 16, "ignore_eos": True})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 8


def test_meta_info_says_what_happened(running: Any) -> None:
    answers = generate(running, prompts(12), {"max_new_tokens": 30, "ignore_eos": True})
    for info in (answer["meta_info"] for answer in answers):
        assert info["spec_smc_num_particles"] == 4
        assert info["spec_smc_rounds_ct"] == info["spec_verify_ct"] > 0
        assert 0 <= info["spec_smc_resample_ct"] <= info["spec_smc_rounds_ct"]
        assert 1.0 <= info["spec_smc_ess_mean"] <= 4.0
        assert info["spec_accept_length"] == info["completion_tokens"] / info["spec_verify_ct"]
        histogram = info["spec_correct_drafts_histogram"]
        assert sum(histogram) == info["spec_verify_ct"]
        assert (
            sum(i * count for i, count in enumerate(histogram)) == info["spec_num_correct_drafts"]
        )
        assert info["spec_accept_rate"] <= 1.0


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_meta_info_of_the_shortest_answers(running: Any, max_new_tokens: int) -> None:
    answer = generate(running, [[7, 8, 9]], {"max_new_tokens": max_new_tokens, "ignore_eos": True})
    info = answer[0]["meta_info"]
    assert len(answer[0]["output_ids"]) == max_new_tokens
    assert info["spec_smc_rounds_ct"] == max_new_tokens - 1
    assert info["spec_smc_num_particles"] == 4


def test_scoring_passes_through(running: Any) -> None:
    answer = running.generate(
        input_ids=[[3, 4, 5, 6]],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )[0]
    logprobs = answer["meta_info"]["input_token_logprobs"]
    assert len(logprobs) == 4
    assert all(value < 0 for value, *_ in logprobs[1:])


@pytest.mark.parametrize(
    ("params", "fields", "named"),
    [
        ({"custom_params": {"smc": {"particles": 2}}}, {}, "custom_params"),
        ({}, {"return_hidden_states": True}, "return_hidden_states"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    running: Any, params: dict, fields: dict, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        running.generate(input_ids=[[3, 4]], sampling_params=params, **fields)
    assert generate(running, [[3, 4]], {"max_new_tokens": 4})  # and nothing else is lost


def test_same_prefix_is_cached_prompt_and_text(running: Any) -> None:
    prompt = [63, 62, 61, 63, 62, 61, 63, 62, 61, 63]
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
    first = generate(running, [prompt], params)[0]
    assert first["meta_info"]["cached_tokens"] <= 2  # what other tests happen to share
    again = generate(running, [prompt], params)[0]
    assert again["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert again["output_ids"] == first["output_ids"]
    # A second turn: the answer is in the cache too, but for the token that never had KV and the
    # one that the draft may not have read.
    turn = generate(running, [[*prompt, *first["output_ids"], 20, 21]], params)[0]
    assert turn["meta_info"]["cached_tokens"] == len(prompt) + len(first["output_ids"]) - 2


def test_streaming_yields_chunks_of_the_final_text(running: Any) -> None:
    async def consume() -> list[dict[str, Any]]:
        stream = await running.async_generate(
            input_ids=[5, 6, 7],
            sampling_params={"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 1},
            stream=True,
        )
        return [chunk async for chunk in stream]

    chunks = asyncio.get_event_loop().run_until_complete(consume())
    texts = [chunk["text"] for chunk in chunks]
    assert len(set(texts)) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    whole = generate(
        running, [[5, 6, 7]], {"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 1}
    )[0]
    assert texts[-1] == whole["text"]


def test_text_up_to_the_end_of_the_context(
    engine: Callable[..., Any], tiny: Callable[..., str]
) -> None:
    """Drafts that would stand beyond the model's last position change nothing before it."""
    models = [tiny(seed=seed, max_positions=48, **WIDE) for seed in (1, 2)]
    limits = {"context_length": 48, "max_lag": 16, "num_steps": NUM_STEPS}
    running = engine(**smc_arguments(*models, num_particles=4, **limits))
    lengths = range(30, 42)
    inputs = [[2 + i % 60 for i in range(length)] for length in lengths]

    def ask(engine: Any, end: int) -> list[list[int]]:
        limits = [
            {"max_new_tokens": end - length, "ignore_eos": True, "temperature": 0}
            for length in lengths
        ]
        return [answer["output_ids"] for answer in generate(engine, inputs, limits)]

    found = ask(running, 48)
    # SGLang leaves the last two positions of a context free.
    assert [len(ids) for ids in found] == [46 - length for length in lengths]
    assert found == ask(engine(model_path=tiny(seed=1, **WIDE)), 46)


def test_greedy_is_the_targets_own_text(engine: Callable[..., Any], pair: tuple[str, str]) -> None:
    inputs = prompts(100)
    limits = [{"temperature": 0, "max_new_tokens": 5 + i % 36} for i in range(100)]
    plain = [a["output_ids"] for a in generate(engine(model_path=pair[0]), inputs, limits)]
    for settings in ({"resample_at": "block"}, {"resample_at": "token"}, {"mode": "exact"}):
        running = engine(**smc_arguments(*pair, num_particles=3, **settings))
        assert [a["output_ids"] for a in generate(running, inputs, limits)] == plain
