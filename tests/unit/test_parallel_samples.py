"""The n samples of a seeded request run with n seeds, whoever else is sent meanwhile."""

import asyncio
import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_smc.patches import ingress

MANAGER: Any = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="SMC"))


@dataclass
class Request:
    """What the hook reads of a tokenized request."""

    sampling_params: SamplingParams


@pytest.fixture(autouse=True)
def _requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "TokenizedGenerateReqInput", Request)


def send(request: Any, seeds: list[int | None]) -> None:
    """Through the hook, into what SGLang would send to the scheduler."""

    def original(_: Any, sent: Any) -> None:
        seeds.append(sent.sampling_params.sampling_seed)

    ingress.send_request(original, MANAGER, request)


async def send_samples(request: Any, num_samples: int) -> list[int | None]:
    """As SGLang expands a request: a copy for each sample, which share one `sampling_params`."""
    seeds: list[int | None] = []
    for _ in range(num_samples):
        send(copy.copy(request), seeds)
        await asyncio.sleep(0)  # others are sent in between
    return seeds


def test_samples_of_requests_that_are_sent_at_once_keep_their_own_seeds() -> None:
    async def crowd() -> list[list[int | None]]:
        asked = [Request(SamplingParams(n=3, sampling_seed=seed)) for seed in (0, 100, 0)]
        return await asyncio.gather(*(send_samples(request, 3) for request in asked))

    assert asyncio.run(crowd()) == [[0, 1, 2], [100, 101, 102], [0, 1, 2]]


def test_the_prompt_that_is_read_ahead_takes_no_seed() -> None:
    """SGLang sends a request of no tokens first, so that all samples find the prompt cached."""

    async def one() -> list[int | None]:
        ahead: list[int | None] = []
        request = Request(SamplingParams(n=2, sampling_seed=7))
        reading = copy.copy(request)
        reading.sampling_params = copy.copy(request.sampling_params)
        reading.sampling_params.max_new_tokens = 0
        send(reading, ahead)
        return ahead + await send_samples(request, 2)

    assert asyncio.run(one()) == [7, 7, 8]


def test_what_has_no_seed_or_one_sample_is_sent_as_it_is() -> None:
    async def sent(params: SamplingParams) -> list[int | None]:
        return await send_samples(Request(params), 2)

    assert asyncio.run(sent(SamplingParams(n=2))) == [None, None]
    assert asyncio.run(sent(SamplingParams(n=1, sampling_seed=3))) == [3, 3]
