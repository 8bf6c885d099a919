"""Logits that are NaN or infinite, and drafts that never agree: who is hit, and who is not."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from fault_client import FaultServer, request, text_of
from fault_models import DRAFT_INF, DRAFT_NAN, RARE, TARGET_INF, TARGET_NAN, fault_pair
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

TARGET, DRAFT = "The target model's logits", "The draft model's logits"
HOT = 60.0  # the temperature at which rare tokens are drawn
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 2, "num_steps": 1},
    {"mode": "exact"},
    {"mode": "mixed", "num_particles": 3},
    {"power": 2.0},
    {"resample_at": "token", "ess_threshold": 1.0, "resampling_method": "ssp"},
)
# Where a broken token stands in a prompt, and whose logits it breaks; None: of a later one.
PROMPTS = (
    ([5, TARGET_NAN], TARGET),
    ([TARGET_NAN, 5, 6], TARGET),
    ([3] * 30 + [TARGET_NAN] + [4] * 30, TARGET),  # in the second of three chunks
    ([5, 6, TARGET_INF], TARGET),
    ([DRAFT_NAN, 5], DRAFT),
    ([5, DRAFT_INF], DRAFT),
)


def healthy(number: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [
        request(
            [draw.randrange(2, min(RARE)) for _ in range(draw.choice([1, 5, 40]))],
            seed,
            temperature=draw.choice([0.0, 0.7, 1.0]),
            custom_params={"smc": CHOICES[seed % len(CHOICES)]},
        )
        for seed in range(number)
    ]


def test_broken_logits_end_their_request_with_a_sentence_and_no_other(server: FaultServer) -> None:
    """In the first token and later, in every mode, streamed or not, in any company."""
    well = healthy(18)
    expected = server.alone(well)
    sick = [
        (request(prompt, 100 + 10 * i + j, custom_params={"smc": CHOICES[j]}), of)
        for (i, (prompt, of)), j in itertools.product(enumerate(PROMPTS), (0, 2, 4))
    ]
    hot = [
        request([3, 4 + i], 300 + i, tokens=80, temperature=HOT, custom_params={"smc": smc})
        for i, smc in enumerate(CHOICES)
    ]

    async def last_chunk(body: dict[str, Any]) -> dict[str, Any]:
        return [chunk async for chunk in server.stream(body)][-1]

    in_turn = itertools.zip_longest(well, (body for body, _ in sick), hot)
    mixed = [body for some in in_turn for body in some if body]
    answers = server.together(*map(server.ask, mixed))
    found = dict(zip((body["rid"] for body in mixed), answers, strict=True))
    for body, text in zip(well, expected, strict=True):
        assert found[body["rid"]].status_code == 200, found[body["rid"]].text
        assert text_of(found[body["rid"]].json()) == text
    for body, of in sick:
        assert found[body["rid"]].status_code == 500
        assert found[body["rid"]].json()["message"].startswith(of)
    for body in hot:
        assert found[body["rid"]].status_code == 500
        assert found[body["rid"]].json()["message"].startswith((TARGET, DRAFT))
    for chunk in server.together(*(last_chunk(body) for body, _ in sick[::4])):
        assert chunk["meta_info"]["finish_reason"]["status_code"] == 500
        assert chunk["meta_info"]["spec_smc_nan_ct"] == 1
        assert chunk["output_ids"] == []
    server.assert_nothing_is_lost()


def test_a_broken_text_is_not_found_again(server: FaultServer) -> None:
    """What a sick request has read does not go into the radix cache."""
    prompt = [9, 8, 7, 6, 5, 4, 3, 2, TARGET_NAN]
    assert server.server.post("/generate", **request(prompt, 1)).status_code == 500
    healed = server.server.post("/generate", **request([*prompt[:-1], 2], 2)).json()
    assert healed["meta_info"]["cached_tokens"] == 0
    server.assert_nothing_is_lost()


def test_a_draft_that_never_agrees_costs_speed_and_nothing_else(
    engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All weights are zero in every round, so that the target draws each token by itself."""
    pair = fault_pair(tmp_path_factory.mktemp("stubborn"), stubborn=True)
    prompts = [[3, 4, 5 + i] for i in range(6)]
    greedy = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0}
    running = engine(**smc_arguments(*pair, num_particles=4, num_steps=3, max_lag=16))
    texts = []
    for params in (greedy, {**greedy, "temperature": 1.0, "top_k": 4}):
        for mode in ("smc", "exact", "auto"):
            asked = {**params, "custom_params": {"smc": {"mode": mode}}}
            answers = running.generate(input_ids=prompts, sampling_params=asked)
            texts.append([answer["output_ids"] for answer in answers])
            for info in (answer["meta_info"] for answer in answers):
                assert info["finish_reason"]["type"] == "length"
                assert info["spec_smc_rounds_ct"] == 23
                assert info["spec_smc_nan_ct"] == 0
                weighs = mode == "smc" and params is not greedy
                assert info["spec_smc_all_zero_ct"] == (23 if weighs else 0)
    plain = engine(model_path=pair[0]).generate(input_ids=prompts, sampling_params=greedy)
    assert texts[:3] == [[answer["output_ids"] for answer in plain]] * 3
