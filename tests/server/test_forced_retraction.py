"""SGLang's own switch takes the KV of running requests every third step, a round in flight."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_server import HANGS, Server, running_server
from spelling import GRAMMARS, IS_LEGAL
from tiny_models import smc_arguments

from server.kinds import CHOICES, EDITS, LOGPROBS, MODES, asked, constrained, edited
from server.target import Target
from server.test_target import assert_greedy, assert_scored
from sglang_smc.options.server import CPU_OVERLAP_ENV

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

RETRACTING = {
    CPU_OVERLAP_ENV: "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "3",
}
COLD: dict[str, Any] = {"temperature": 0.0}
MANY = 50


@pytest.fixture(scope="module")
def forced(spelling: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = smc_arguments(
        *spelling,
        num_particles=4,
        num_steps=4,
        max_lag=32,
        context_length=512,
        max_total_tokens=20_000,
        enable_custom_logit_processor=True,
        enable_priority_scheduling=True,
    )
    with running_server(tmp_path_factory.mktemp("forced"), RETRACTING, **arguments) as running:
        yield running


def last_of(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    """The last chunk of a stream."""
    with server.stream(**request) as chunks:
        return list(chunks)[-1]


def test_retractions_at_each_third_step_change_no_answer(forced: Server, target: Target) -> None:
    """Greedy texts and log-probabilities are the target's, constrained ones legal, stops obeyed."""
    requests = {f"choice {i}": asked(one, LOGPROBS, **COLD) for i, one in enumerate(CHOICES)}
    for name, mode in zip(EDITS, itertools.cycle(MODES), strict=False):
        requests[name] = edited(name, {"mode": mode}, **COLD) | LOGPROBS
    legal = {
        (kind, mode): constrained(kind, {"mode": mode}, **({} if mode == "smc" else COLD))
        for kind in GRAMMARS
        for mode in MODES
    }
    stopped = [asked({"mode": mode}, stop=["e"], max_new_tokens=60) for mode in MODES]
    everything = [*requests.values(), *legal.values(), *stopped]
    for index, request in enumerate(everything):
        request["priority"] = index % 3
    with ThreadPoolExecutor(len(requests)) as pool:
        streams = [pool.submit(last_of, forced, one) for one in requests.values()]
        answers = forced.generate(everything)
        ends = [stream.result(HANGS) for stream in streams]
    for (name, request), answer, end in zip(requests.items(), answers, ends, strict=False):
        assert_greedy(target, name, request, answer["output_ids"])
        assert end["output_ids"] == answer["output_ids"], name
        if "return_logprob" in request:
            assert_scored(target, request, answer)
            assert_scored(target, request, end)
    texts = [answer["text"] for answer in answers[len(requests) :]]
    for (kind, _), text in zip(legal, texts, strict=False):
        assert IS_LEGAL[kind](text), (kind, text)
    assert not any("e" in text for text in texts[len(legal) :])
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > MANY
    assert forced.get("/flush_cache", params={"timeout": HANGS}).status_code == 200
