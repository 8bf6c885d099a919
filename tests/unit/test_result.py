"""Requests' seeds, counts and particles after SMC rounds, and what the streamer gets of them."""

from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from populations import outcome_of, population_of
from sglang.srt.managers.schedule_batch import ReqLogprob
from sglang.srt.sampling.sampling_params import SamplingParams
from toy_laws import TARGET, toy
from toy_request import ToyRequest

from sglang_smc import process
from sglang_smc.options.request import Budget, RequestConfig
from sglang_smc.options.server import SMCConfig
from sglang_smc.patches import ingress
from sglang_smc.patches.request_state import reset_for_retract, stream_output, update_finish_state
from sglang_smc.round.logprobs import ReturnedLogprobs
from sglang_smc.round.particles import particles_of, shown_particles
from sglang_smc.round.result import Outcome, SMCBatchResult, count_emitted
from sglang_smc.rules.registry import close_token
from sglang_smc.smc.population import TailLogprobs
from sglang_smc.state.logprobs import Emitted
from sglang_smc.state.metrics import Counters, Monitor
from sglang_smc.state.request import RequestState, RequestStates, as_particle
from sglang_smc.state.stream import publish
from sglang_smc.state.texts import has_open_token, shared_ids

SERVER = SMCConfig(num_particles=4, num_steps=3)


def make_req(
    seed: int | None = None, row: int = 1, smc: dict[str, Any] | None = None, **changes: Any
) -> Any:
    asked = {"sampling_seed": seed, "custom_params": {"smc": smc}}
    req: Any = ToyRequest(row, 10, 20, asked, None)
    vars(req).update({"stream": True, "is_finished": False, **changes})
    req.finished = lambda: req.is_finished
    return req


def seeds(book: RequestStates, *reqs: Any) -> list[int]:
    return [start.seed for start in book.begin(list(reqs))]


def test_the_same_seed_gives_the_same_run_on_any_server_in_any_place() -> None:
    """Other seeds give other runs, and what has one does not shift what has none."""
    first = seeds(RequestStates(SERVER, 1), make_req(7), make_req(), make_req())
    other = seeds(RequestStates(SMCConfig(num_particles=8), 2), make_req(), make_req(7, row=3))
    again = seeds(RequestStates(SERVER, 1), make_req(), make_req(7, row=3), make_req())
    assert first == [again[1], again[0], again[2]]
    assert other[1] == first[0] and other[0] != first[1]
    several = [make_req(seed) for seed in (*range(50), *[None] * 20)]
    assert len(set(seeds(RequestStates(SERVER, 1), *several))) == 70


@pytest.mark.parametrize(
    ("num_samples", "given", "expected"),
    [(3, (0, 100, 0), [0, 100, 0, 1, 101, 1, 2, 102, 2]), (1, (3, None), [3, None])],
)
def test_samples_of_requests_keep_their_own_seeds(
    num_samples: int, given: tuple, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang sends a copy for each sample, which share one `sampling_params`, in a task.

    Before them it sends a request of no tokens, so that all find the prompt cached: it takes none.
    """
    monkeypatch.setattr(ingress, "TokenizedGenerateReqInput", SimpleNamespace)
    manager: Any = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="SMC"))
    seeds: list[int | None] = []

    def send(params: SamplingParams) -> None:
        tokenized = SimpleNamespace(sampling_params=params)
        ingress.send_request(lambda *_: None, manager, tokenized)
        seeds.append(tokenized.sampling_params.sampling_seed)

    asked = [SamplingParams(n=num_samples, sampling_seed=seed) for seed in given]
    tasks = [copy_context() for _ in asked]
    for task, params in zip(tasks, asked, strict=True):
        task.run(send, msgspec.structs.replace(params, max_new_tokens=0))
    for task, params in [*zip(tasks, asked, strict=True)] * num_samples:
        task.run(send, params)
    assert seeds == [*given, *expected]


def published(req: Any) -> dict[str, Any]:
    req.is_finished = True
    publish(req)
    return {name: values[0] for name, values in req.customized_info.items()}


POWERED = {"power": 2.0, "return_particles": True, "num_particles": 2}


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
        assert particles == [as_particle([*text, last], None, weight=0.5, log_weight=0.0)] * 2
    assert "spec_smc_particles" not in published(begun()), "it did not ask"


def test_a_particle_of_weight_0_is_json() -> None:
    ended = torch.ones(1, 2).bool()
    log_weights = torch.tensor([[0.0, -torch.inf]])
    population = population_of([[[], []]], ended=ended, log_weights=log_weights)
    told = particles_of(begun(output_ids=[]), population, 0)
    weights = ((1.0, 0.0), (0.0, None))
    assert told == [as_particle([9], None, weight=w, log_weight=log) for w, log in weights]


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
def test_first_tokens_differ_for_powers_alone(power: float, before: int, is_open: bool) -> None:
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
        assert streamed(req) == []
        close_token(req, 4)
        req.output_ids += new
        assert (req.output_ids, streamed(req)) == ([4, *new], [req])
        assert looked_at(req, len(new)) == [len(new) + 1]
        assert looked_at(req, 2) == [2], "once"
    aborted = begun(smc={"power": 2.0}, output_ids=[], to_finish="abort")
    assert looked_at(aborted, 0) == [0]


def streamed(*reqs: Any) -> list[Any]:
    """Which of the requests a streamer is handed."""
    found: list[Any] = []
    stream_output(lambda _, sent, logprob: found.extend(sent), None, list(reqs), False)
    return found


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
        req.send_token_offset = sent
        req.send_output_token_logprobs_offset = at
        looked_at(req, 1)
        assert req.send_output_token_logprobs_offset == expected


@pytest.mark.parametrize(("limit", "own"), [(0, []), (8, [-5.0])])
def test_scoring_sends_all_of_the_next_token_but_a_sample(limit: int, own: list[float]) -> None:
    """SGLang streams all lists from one offset: red if the others are cut with the sample's own."""
    names = [name for name in ReqLogprob.__dataclass_fields__ if name.startswith("output_")]
    lists: dict[str, Any] = {name: [-5.0] for name in names}
    req = begun(return_logprob=True)
    req.sampling_params.max_new_tokens = limit
    req.logprob = ReqLogprob(top_logprobs_num=1, token_ids_logprob=[3], **lists)
    req.send_token_offset = req.send_output_token_logprobs_offset = 0
    looked_at(req, 1)
    sent: list[Any] = []
    stream_output(lambda _, reqs: sent.extend(reqs), None, [req])  # type: ignore[arg-type]
    assert sent == [req] and req.send_output_token_logprobs_offset == 0
    for name in names:
        expected = own if name.startswith("output_token_logprobs") else [-5.0]
        assert getattr(req.logprob, name) == expected, name


# --- The identities that clients check


STRIDE = 12


def running(*output_ids: int, open_at: int | None = None) -> Any:
    req = make_req(output_ids=[*output_ids])
    req.smc_state = RequestState.of(0, RequestConfig())
    req.smc_state.open_token.begin(open_at)
    return req


def booked(outcome: Outcome, monitor: Monitor | None = None, **others: Any) -> SMCBatchResult:
    budgets = [Budget(1, 1)] * len(outcome.counts)
    return SMCBatchResult.of(outcome, monitor=monitor or Monitor(100), budgets=budgets, **others)


def resolve(
    reqs: list[Any],
    emitted: list[int] | None = None,
    kept: list[int] | None = None,
    *,
    finishes: Any = None,
    result: SMCBatchResult | None = None,
    **fields: Any,
) -> list[list[int]]:
    """Emitted tokens, by SGLang's accounting in `_resolve_spec_v2_tokens`: all but one are correct.

    ``finishes`` ends by what it emits.
    """
    size = len(reqs)
    lengths = emitted or [0] * size
    correct = kept or [0] * size
    given: dict[str, Any] = {
        "tokens": torch.arange(size * STRIDE).view(size, STRIDE),
        "counts": torch.tensor(lengths),
        "num_correct_drafts": torch.tensor(correct),
        "counters": torch.arange(size).view(-1, 1) + torch.zeros(1, len(Counters._fields)),
    }
    given["counters"][:, Counters._fields.index("rounds_ct")] = 1
    found = result or booked(outcome_of(size, **{**given, **fields}))

    def stock() -> list[list[int]]:
        tokens = found.next_token_ids.tolist()
        stride = found.speculative_num_draft_tokens
        found.num_correct_drafts = sum(lengths) - size
        found.num_correct_drafts_per_req_cpu = [length - 1 for length in lengths]
        for req, length in zip(reqs, lengths, strict=True):
            if not (req.is_retracted or req.finished()):
                req.spec_verify_ct += 1
                req.spec_num_correct_drafts += length - 1
                req.update_spec_correct_drafts_histogram(length - 1)
            req.is_finished = req.is_finished or req is finishes
        return [tokens[i * stride : i * stride + length] for i, length in enumerate(lengths)]

    live = [not (req.is_retracted or req.finished()) for req in reqs]
    tokens = found.resolve(SimpleNamespace(reqs=reqs), stock)  # type: ignore[arg-type]
    assert found.num_correct_drafts_per_req_cpu == correct
    for req in (req for req, lives in zip(reqs, live, strict=True) if lives):
        req.output_ids_through_stop = req.output_ids  # all of what is new
        count_emitted(req, found.monitor)
        histogram = req.spec_correct_drafts_histogram
        assert sum(i * count for i, count in enumerate(histogram)) == req.spec_num_correct_drafts
        assert sum(histogram) == req.spec_verify_ct or not req.finished()
    return tokens


def test_histogram_identities_over_rounds_of_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first round, too: SGLang would index an empty histogram with -1. Ranks compare all.

    A round's drafts count once its tokens are emitted, and at the end as far as they are.
    """
    told = []
    monkeypatch.setattr(process.active.ranks, "add", told.append)
    reqs = [running(), running()]
    monitor = Monitor(100)
    rounds = ([0, 3], [2, 2]), ([0, 0], [2, 0]), ([8, 1], [1, 0]), ([3, 12], [4, 10])
    taken = []
    for number, (emitted, kept) in enumerate(rounds):
        result = booked(
            outcome_of(
                2,
                tokens=torch.arange(2 * STRIDE).view(2, STRIDE),
                counts=torch.tensor(emitted),
                num_correct_drafts=torch.tensor(kept),
            ),
            monitor,
        )
        finishes = reqs[0] if number == 3 else None
        tokens = resolve(reqs, emitted, kept, finishes=finishes, result=result)
        taken.append(result.num_correct_drafts)
        firsts = zip((0, STRIDE), emitted, strict=True)
        assert tokens == [list(range(first, first + count)) for first, count in firsts]
        assert told.pop() == tokens
    assert reqs[0].spec_correct_drafts_histogram == [0, 1, 3], "of three tokens one is no draft"
    assert reqs[1].spec_correct_drafts_histogram == [2, 0, 1, *[0] * 7, 1]
    assert taken == [0, 2, 0, 5], "what SGLang's accept rate has is of the rounds before"
    totals = monitor.totals()
    assert (totals["kept_columns"], totals["emitted_tokens"]) == (19, 27)


def test_requests_that_are_gone_keep_books() -> None:
    """Whether one was live is asked before SGLang's own resolve, which may end it."""
    gone = [running(), running()]
    ends = running()
    gone[0].is_retracted = gone[1].is_finished = True
    for req in gone:
        req.spec_verify_ct = 2
        req.spec_num_correct_drafts = 1
        req.spec_correct_drafts_histogram = [1, 1]
        req.smc_state.counters = [7.0]
    resolve([gone[0], ends, gone[1]], [0, 4, 4], [2, 3, 2], finishes=ends)
    for req in gone:
        assert req.spec_correct_drafts_histogram == [1, 1]
        assert req.smc_state.counters == [7.0]
    assert ends.spec_num_correct_drafts == 3
    assert ends.smc_state.counters == [1.0] * len(Counters._fields), "its own row of the table"


@pytest.mark.parametrize("replayed", [True, False])
def test_replayed_rounds_are_counted_and_sglang_s_log_hears_of_them(replayed: bool) -> None:
    reqs = [running(), running(), running()]
    monitor = Monitor(100)
    reqs[2].is_retracted = True
    result = booked(outcome_of(3), monitor, can_run_cuda_graph=replayed)
    assert result.can_run_cuda_graph == replayed, "SGLang logs this"
    resolve(reqs, result=result)
    assert monitor.totals()["replayed_rounds"] == 2 * replayed
    assert [req.smc_state.num_replayed for req in reqs] == [replayed, replayed, 0]
    assert reqs[0].smc_state.meta_info([], None)["spec_smc_replayed_ct"] == replayed


def test_copies_of_an_outcome_s_first_groups_are_its_own() -> None:
    """A graph's next replay writes what it wrote before; particles and log-probabilities, too."""
    number = torch.arange(6.0).view(2, 3)
    weights = torch.full((2, 3), 3.0).double()
    whole = population_of([[[5, 6], [7], []], [[1, 1, 1]] * 3], log_weights=weights)
    tails = TailLogprobs(number, number.unsqueeze(2), number.unsqueeze(2).long(), number[..., None])
    of_groups = torch.arange(2)
    outcome = Outcome(
        *(number, *[of_groups] * 6, None),
        extras={
            "return_particles": shown_particles(whole, whole),
            "return_logprob": Emitted(tails, number[:, 0]),
        },
    )
    first = outcome.first(1)
    assert first.first_tokens is None
    particles = first.extras["return_particles"]
    logprobs = first.extras["return_logprob"]
    number.fill_(9.0), of_groups.fill_(9), whole.log_weights.fill_(9.0)
    assert first.tokens.tolist() == logprobs.tails.own.tolist() == [[0.0, 1.0, 2.0]]
    assert first.counts.tolist() == [0] and particles.log_weights.shape == (1, 3)
    assert particles.log_weights[0, 0] == 3.0


def test_an_open_first_token_is_replaced_once_all_particles_agree() -> None:
    req = running(8, 4, open_at=1)
    plain = running(8, 4)
    for token, text, place in ((-1, [8, 4], 1), (0, [8, 0], None), (7, [8, 0], None)):
        resolve([req, plain], first_tokens=torch.tensor([token, 5]))
        assert (req.output_ids, req.smc_state.open_token.place) == (text, place)
    assert plain.output_ids == [8, 4], "a token that was never open is SGLang's"


@pytest.mark.parametrize("num_particles", [1, 3])
def test_what_verified_proposals_accept_is_counted_as_a_mean(num_particles: int) -> None:
    """All that a draft equal to the target proposes."""
    chosen = ({"proposal": "verified", "num_particles": num_particles},)
    server = {"num_particles": 3, "num_steps": 2, "limit": 20, "eos": -1}
    worker = toy(1, (TARGET, TARGET), **server, chosen=chosen)
    assert worker.play_round(worker.begin([1])).outcome.num_correct_drafts.tolist() == [2]


def test_the_token_that_particles_come_to_share_replaces_the_placeholder_s_log_probability() -> (
    None
):
    """Red where what a request is shown of its first token is of a token that it has not."""
    req = running(9, open_at=0)
    req.return_logprob = True
    shown = {"output_token_logprobs_idx": [9], "output_token_logprobs_val": [-7.0]}
    req.logprob = ReqLogprob(top_logprobs_num=0, token_ids_logprob=None, **shown)
    none = torch.zeros(1, STRIDE, 0)
    tails = TailLogprobs(torch.zeros(1, STRIDE), none, none.long(), none)
    outcome = outcome_of(
        1,
        tokens=torch.arange(STRIDE).view(1, -1),
        counts=torch.tensor([2]),
        first_tokens=torch.tensor([4]),
        extras={"return_logprob": Emitted(tails, torch.tensor([-0.5]))},
    )
    asked: Any = ReturnedLogprobs(None)  # type: ignore[arg-type]
    result = booked(outcome, extras=[asked])
    resolve([req], [2], [0], result=result)
    assert req.output_ids == [4]
    assert req.logprob.output_token_logprobs_idx == [4]
    assert req.logprob.output_token_logprobs_val == [-0.5]
    assert result.logits_output is not None
    assert result.logits_output.next_token_logprobs.shape == (1, 2), "of the tokens it emits"
