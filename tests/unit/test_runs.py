"""Seeds of requests, what outlives a retraction, and what the streamer gets."""

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqLogprob
from sglang.srt.sampling.sampling_params import SamplingParams
from toy_request import ToyRequest

from sglang_smc.options.server import SMCConfig
from sglang_smc.patches import ingress
from sglang_smc.patches.request_state import reset_for_retract, update_finish_state
from sglang_smc.rules.registry import close_token
from sglang_smc.state.metrics import Counters, zero_counters
from sglang_smc.state.request import (
    RequestStates,
    as_particle,
    find_state,
    has_open_token,
    publish,
    shared_ids,
)

SERVER = SMCConfig(num_particles=4, num_steps=3)


def make_req(
    seed: int | None = None, row: int = 1, smc: dict[str, Any] | None = None, **changes: Any
) -> Any:
    asked = {
        **{"sampling_seed": seed, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        **{"min_new_tokens": 2, "ignore_eos": False, "stop_token_ids": [4]},
        "custom_params": {"smc": smc} if smc else None,
    }
    req: Any = ToyRequest(row, 10, 20, asked, None)
    vars(req).update({"eos_token_ids": {1}, "stream": True, "is_finished": False, **changes})
    req.finished = lambda: req.is_finished
    return req


def seeds(book: RequestStates, *reqs: Any) -> list[int]:
    return [start.entry.seed for start in book.begin(list(reqs))]


def test_the_same_seed_gives_the_same_run_on_any_server_in_any_place() -> None:
    """Other seeds give other runs, and what has one does not shift what has none."""
    first = seeds(RequestStates(SERVER, 1), make_req(7), make_req(), make_req())
    other = seeds(RequestStates(SMCConfig(num_particles=8), 2), make_req(), make_req(7, row=3))
    again = seeds(RequestStates(SERVER, 1), make_req(), make_req(7, row=3), make_req())
    assert first == [again[1], again[0], again[2]]
    assert other[1] == first[0] and other[0] != first[1]
    several = [make_req(seed) for seed in (*range(50), *[None] * 20)]
    assert len(set(seeds(RequestStates(SERVER, 1), *several))) == 70


@pytest.mark.parametrize("seed", [7, None])
def test_a_retracted_request_draws_new_numbers_but_the_same_each_time(seed: int | None) -> None:
    """The old ones led to the tails that were lost: drawn again they would bias the text."""
    lives = []
    for book in (RequestStates(SERVER, 1), RequestStates(SERVER, 1)):
        req = make_req(seed)
        lives.append([seeds(book, req) for req.retraction_count in range(3)])
    assert lives[0] == lives[1]
    assert len({seed for (seed,) in lives[0]}) == 3


@pytest.mark.parametrize(
    ("num_samples", "given", "expected"),
    [(3, (0, 100, 0), [[0, 1, 2], [100, 101, 102], [0, 1, 2]]), (1, (3, None), [[3], [None]])],
)
def test_samples_of_requests_that_are_sent_at_once_keep_their_own_seeds(
    num_samples: int, given: tuple, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang sends a copy for each sample, which share one `sampling_params`.

    Before them it sends a request of no tokens, so that all find the prompt cached: it takes none.
    """
    monkeypatch.setattr(ingress, "TokenizedGenerateReqInput", SimpleNamespace)
    manager: Any = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="SMC"))

    async def sent(seed: int | None) -> list[int | None]:
        seeds: list[int | None] = []

        def send(request: Any) -> None:
            ingress.send_request(
                lambda _, one: seeds.append(one.sampling_params.sampling_seed), manager, request
            )

        params = SamplingParams(n=num_samples, sampling_seed=seed)
        ahead = copy.copy(params)
        ahead.max_new_tokens = 0
        send(SimpleNamespace(sampling_params=ahead))
        assert seeds.pop() == seed
        for _ in range(num_samples):
            send(SimpleNamespace(sampling_params=params))
            await asyncio.sleep(0)  # others are sent in between
        return seeds

    async def crowd() -> list[list[int | None]]:
        return await asyncio.gather(*map(sent, given))

    assert asyncio.run(crowd()) == expected


def test_what_was_counted_outlives_a_retraction() -> None:
    book, req = RequestStates(SERVER, 1), make_req(7, smc={"num_particles": 2})
    assert book.begin([req])[0].counters == zero_counters(2), "of its own particles"
    req.smc_state.counters = [float(i) for i in range(len(Counters._fields))]
    req.output_ids, req.retraction_count = [5, 6, 7], 1
    start = book.begin([req])[0]
    assert start.counters == req.smc_state.counters
    assert (start.num_emitted, start.entry.stop_tokens) == (3, {1, 4})


def test_published_totals_are_whole_in_every_slice() -> None:
    """The streamer slices from the last sent token on; a plain list of one would be empty there.

    Only finished requests of SMC publish.
    """
    stranger, running, req = make_req(is_finished=True), begun(), begun(is_finished=True)
    assert find_state(stranger) is None
    for other in (stranger, running):
        publish(other)
        assert "customized_info" not in other.__dict__
    req.smc_state.counters[0] = 3.0
    publish(req)
    values = req.customized_info["spec_smc_rounds_ct"]
    slices = values[0:1], values[17:], values[5:9], values[:], [values[0]], [values[-1]]
    assert list(slices) == [[3]] * 6 and len(values) == 1
    assert all(name.startswith("spec_smc_") for name in req.customized_info)


def published(req: Any) -> dict[str, Any]:
    req.is_finished = True
    publish(req)
    return {name: values[0] for name, values in req.customized_info.items()}


POWERED = {"power": 2.0, "return_particles": True, "num_particles": 2}


def test_what_the_first_token_weighs_is_in_the_answer_and_counted_once() -> None:
    """After a round the device's total holds it: added again it would stand there twice.

    A plain target weighs nothing, and its sums are not read: it would wait at every prefill.
    """
    ends_at_once, goes_on = begun(smc=POWERED), begun(smc=POWERED)
    for req in (ends_at_once, goes_on):
        req.smc_state.open_token.begin(None)
    book = RequestStates(SERVER, 1)
    book.note_first([ends_at_once, goes_on], torch.tensor([-0.25, -0.5]).double())
    goes_on.smc_state.take([*zero_counters(2)[:-1], -0.75], replayed=False)
    assert published(ends_at_once)["spec_smc_log_evidence"] == -0.25
    assert published(goes_on)["spec_smc_log_evidence"] == -0.75
    plain = begun()
    book.note_first([plain], None)  # type: ignore[arg-type]
    assert published(plain)["spec_smc_log_evidence"] == 0.0


def test_an_answer_that_ends_with_a_prefill_s_token_has_equal_particles() -> None:
    """Behind a retraction, too; not one that was cut off on the way or while its token is open."""
    for smc, text in (({**POWERED, "power": 1.0}, [9, 8]), (POWERED, [])):
        req = begun(smc=smc, output_ids=list(text))
        *_, last = req.output_ids
        if smc is POWERED:
            assert published(req)["spec_smc_particles"] is None, "all need not share that token"
            req.smc_state.open_token.begin(None)
        req.output_ids.pop()
        assert published(req)["spec_smc_particles"] is None
        req.output_ids.append(last)
        particles = published(req)["spec_smc_particles"]
        assert particles == [as_particle([*text, last], 0.5, 0.0)] * 2
    assert "spec_smc_particles" not in published(begun()), "it did not ask"


def looked_at(req: Any, num_new: int) -> list[int]:
    """For how many new tokens SGLang looks for an end; nothing where it does not look."""
    seen: list[int] = []
    update_finish_state(lambda _, count: seen.append(count), req, num_new)
    return seen


def begun(**changes: Any) -> Any:
    """A request as prefill leaves it: its particles begun, one token put out."""
    req = make_req(**changes)
    RequestStates(SERVER, 1).begin([req])
    req.output_ids.append(9)
    return req


@pytest.mark.parametrize(
    ("power", "before", "is_open"),
    [(1.0, 1, False), (2.0, 1, True), (0.5, 1, True), (2.0, 18, True), (2.0, 19, False)],
)
def test_first_tokens_differ_for_a_power_of_p_alone(
    power: float, before: int, is_open: bool
) -> None:
    """Nor are those open behind which nothing comes: their law is all that there is of the text."""
    req = begun(smc={"power": power}, output_ids=[5] * before)
    assert has_open_token(req) == is_open
    assert shared_ids(req) == [5] * before + ([] if is_open else [9])


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_streamed_nor_taken_for_an_end_until_the_token_is_settled(stream: bool) -> None:
    """Then it is looked at, once, along with what the round emits; so is an abort before."""
    for new in ([1, 2], []):
        req = begun(smc={"power": 2.0}, output_ids=[], stream=stream)
        assert looked_at(req, 1) == looked_at(req, 0) == looked_at(req, 0) == []
        assert not req.stream
        close_token(req, 4, None)
        req.output_ids += new
        assert (req.output_ids, req.stream) == ([4, *new], stream)
        assert looked_at(req, len(new)) == [len(new) + 1]
        assert looked_at(req, 2) == [2], "once"
    aborted = begun(smc={"power": 2.0}, output_ids=[], to_finish="abort")
    assert looked_at(aborted, 0) == [0]


def test_a_retraction_takes_back_a_token_that_is_open_and_no_other() -> None:
    """Prefill would read it as text, though no particle need have it."""
    found = []
    for power in (2.0, 1.0):
        req = begun(smc={"power": power}, output_ids=[5, 6])
        looked_at(req, 1)
        names = [name for name in ReqLogprob.__dataclass_fields__ if name.startswith("output_")]
        lists: dict[str, Any] = {name: [-5.0, -6.0, -9.0] for name in names}
        req.return_logprob = True
        req.logprob = ReqLogprob(top_logprobs_num=0, token_ids_logprob=None, **lists)
        reset_for_retract(lambda req: found.append(list(req.output_ids)), req)
        (kept,) = {tuple(getattr(req.logprob, name)) for name in names}
        found.append(kept)
        assert req.stream
    assert found == [[5, 6], (-5.0, -6.0), [5, 6, 9], (-5.0, -6.0, -9.0)]


def test_a_stream_without_tokens_sends_no_log_probability() -> None:
    """SGLang counts one as sent with a request that was retracted before its first token."""
    for sent, at, expected in ((0, 1, 0), (3, 3, 3)):
        req = begun(output_ids=[5, 6], return_logprob=True)
        req.send_token_offset, req.send_output_token_logprobs_offset = sent, at
        looked_at(req, 1)
        assert req.send_output_token_logprobs_offset == expected
