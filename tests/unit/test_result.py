"""The scheduler's books after SMC rounds: the identities that clients check."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from populations import population_of
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ReqLogprob
from toy_grammar import maker
from toy_laws import languages
from toy_request import ToyRequest
from toy_worker import ToyWorker

from sglang_smc import process
from sglang_smc.options.request import RequestConfig
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.result import Outcome, Particles, SMCBatchResult
from sglang_smc.state.metrics import Counters, Monitor
from sglang_smc.state.population import Emitted, Population, TailLogprobs
from sglang_smc.state.request import RequestState


class BookedRequest(ToyRequest):
    update_spec_correct_drafts_histogram = Req.update_spec_correct_drafts_histogram

    def __init__(
        self, output_ids: list[int] | None = None, open_at: int | None = None, **smc: Any
    ) -> None:
        super().__init__(0, 99, 20, {}, None)
        self.is_retracted = self.done = False
        self.spec_verify_ct = self.spec_num_correct_drafts = self.kv_committed_len = 0
        self.spec_correct_drafts_histogram: list[int] = []
        self.output_ids = output_ids or []
        self.smc_state = RequestState.of(0, RequestConfig(**smc))
        self.smc_state.open_token.begin(open_at)

    def finished(self) -> bool:
        return self.done


STRIDE = 12


def resolve(
    reqs: list[BookedRequest],
    emitted: list[int] | None = None,
    kept: list[int] | None = None,
    *,
    finishes: BookedRequest | None = None,
    result: SMCBatchResult | None = None,
    **fields: Any,
) -> tuple[SMCBatchResult, list[list[int]]]:
    """Through SGLang's accounting in `_resolve_spec_v2_tokens`: all but one of a round are correct.

    ``finishes`` ends by what it emits.
    """
    size = len(reqs)
    lengths, correct = emitted or [0] * size, kept or [0] * size
    given: dict[str, Any] = {
        "next_token_ids": torch.arange(size * STRIDE),
        "accept_lens": torch.tensor(lengths),
        "speculative_num_draft_tokens": STRIDE,
        "correct_drafts": torch.tensor(correct),
        "counters": torch.arange(size).view(-1, 1) + torch.zeros(1, len(Counters._fields)),
        "failure": torch.zeros(size, dtype=torch.int64),
        "monitor": Monitor(100),
    }
    found = result or SMCBatchResult(**{**given, **fields})

    def stock() -> list[list[int]]:
        tokens, stride = found.next_token_ids.tolist(), found.speculative_num_draft_tokens
        found.num_correct_drafts = sum(lengths) - size
        found.num_correct_drafts_per_req_cpu = [length - 1 for length in lengths]
        for req, length in zip(reqs, lengths, strict=True):
            if not (req.is_retracted or req.finished()):
                req.kv_committed_len += length
                req.spec_verify_ct += 1
                req.spec_num_correct_drafts += length - 1
                req.update_spec_correct_drafts_histogram(length - 1)
            req.done = req.done or req is finishes
        return [tokens[i * stride : i * stride + length] for i, length in enumerate(lengths)]

    tokens = found.resolve(SimpleNamespace(reqs=reqs), stock)  # type: ignore[arg-type]
    assert found.num_correct_drafts == sum(correct), "the server's accept length reads this"
    assert found.num_correct_drafts_per_req_cpu == correct
    for req in reqs:
        histogram = req.spec_correct_drafts_histogram
        assert all(count >= 0 for count in histogram) and sum(histogram) == req.spec_verify_ct
        assert sum(i * count for i, count in enumerate(histogram)) == req.spec_num_correct_drafts
    return found, tokens


def test_histogram_identities_over_rounds_that_emit_nothing_much_or_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first round may emit nothing: SGLang would index an empty histogram with -1.

    What a round emits is compared between ranks.
    """
    told = []
    monkeypatch.setattr(process, "check_ranks", told.append)
    reqs = [BookedRequest(), BookedRequest()]
    rounds = ([0, 3], [2, 2]), ([0, 0], [2, 0]), ([9, 1], [1, 0]), ([0, 12], [4, 4])
    for emitted, kept in rounds:
        _, tokens = resolve(reqs, emitted, kept)
        firsts = zip((0, STRIDE), emitted, strict=True)
        assert tokens == [list(range(first, first + count)) for first, count in firsts]
        assert told.pop() == tokens
    assert [req.spec_correct_drafts_histogram for req in reqs] == [[0, 1, 2, 0, 1], [2, 0, 1, 0, 1]]
    assert [req.spec_num_correct_drafts for req in reqs] == [9, 6]


def test_requests_that_are_gone_keep_their_books_and_those_that_end_count_their_last_round() -> (
    None
):
    """Whether one was live is asked before SGLang's own resolve, which may end it."""
    gone, ends = [BookedRequest(), BookedRequest()], BookedRequest()
    gone[0].is_retracted = gone[1].done = True
    for req in gone:
        req.spec_verify_ct, req.spec_num_correct_drafts = 2, 1
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
    reqs, monitor = [BookedRequest(), BookedRequest(), BookedRequest()], Monitor(100)
    reqs[2].is_retracted = True
    zeros = torch.zeros(3, dtype=torch.int64)
    counters = torch.zeros(3, len(Counters._fields))
    outcome = Outcome(zeros.unsqueeze(1), *[zeros] * 4, counters, zeros, None, None, None)
    result = SMCBatchResult.of(outcome, monitor, replayed)
    assert result.can_run_cuda_graph == replayed, "SGLang logs this"
    resolve(reqs, result=result)
    assert monitor.totals()["replayed_rounds"] == 2 * replayed
    assert [req.smc_state.num_replayed for req in reqs] == [replayed, replayed, 0]
    assert reqs[0].smc_state.meta_info([])["spec_smc_replayed_ct"] == replayed


def population(last_emitted: list[list[int]] | None = None) -> Population:
    """Two groups of at most three particles; the first has two, and both of them have ended."""
    return population_of(
        [[[5, 6], [7], []], [[1, 1, 1]] * 3],
        last_emitted or [[4, 4, 0], [4, 4, 4]],
        stale=99,
        ended=torch.tensor([[True, True, True], [True, False, True]]),
        log_weights=torch.tensor([[3.0, 3.0 + math.log(3), -math.inf], [0.0] * 3]).double(),
        present=torch.tensor([[True, True, False], [True] * 3]),
    )


def test_copies_of_an_outcome_s_first_groups_are_its_own() -> None:
    """A graph's next replay writes what it wrote before; particles and log-probabilities, too."""
    whole, number = population(), torch.arange(6.0).view(2, 3)
    tails = TailLogprobs(number, number.unsqueeze(2), number.unsqueeze(2).long(), number[..., None])
    of_groups = torch.arange(2)
    outcome = Outcome(
        *(number, *[of_groups] * 6, None),
        particles=Particles.of(whole, whole),
        logprobs=Emitted(tails, number[:, 0]),
    )
    first = outcome.first(1)
    assert first.first_tokens is None
    assert first.particles is not None and first.logprobs is not None
    number.fill_(9.0), of_groups.fill_(9), whole.log_weights.fill_(9.0)
    assert first.tokens.tolist() == first.logprobs.tails.own.tolist() == [[0.0, 1.0, 2.0]]
    assert first.counts.tolist() == [0] and first.particles.log_weights.shape == (1, 3)
    assert first.particles.log_weights[0, 0] == 3.0


def test_particles_of_a_finished_group_are_whole_texts_with_normalised_weights() -> None:
    """The emitted text stands before each tail, and nothing that is stale or absent comes along."""
    whole, req = population(), BookedRequest([8, 4])
    found = Particles.of(whole, whole).of_group(0, req) or []  # type: ignore[arg-type]
    assert [particle["output_ids"] for particle in found] == [[8, 4, 5, 6], [8, 4, 7]]
    assert [particle["weight"] for particle in found] == pytest.approx([0.25, 0.75])
    assert [particle["log_weight"] for particle in found] == pytest.approx([3.0, 3 + math.log(3)])
    assert Particles.of(whole, whole).of_group(1, req) is None, "it goes on"  # type: ignore[arg-type]


def test_only_who_asked_is_given_the_particles() -> None:
    """With the text as it stood before this round, and with first tokens that one is drawn from."""
    reqs = [BookedRequest([8, 4], open_at=at, return_particles=True) for at in (None, 1)]
    reqs.insert(1, BookedRequest())
    whole = population([[3, 2, 0], [4, 4, 4]])
    three = Population(*(column[[0, 0, 0]] for column in whole[:-2]))
    shown, first = Particles.of(three, three), torch.tensor([2, 2, 2])
    resolve(reqs, [1, 1, 1], [1, 1, 1], particles=shown, first_tokens=first)
    told = [[one["output_ids"] for one in req.smc_state.particles or ()] for req in reqs]
    assert told == [[[8, 4, 5, 6], [8, 4, 7]], [], [[8, 3, 5, 6], [8, 2, 7]]]
    assert reqs[2].output_ids[:2] == [8, 2]


def test_an_open_first_token_is_replaced_once_all_particles_agree() -> None:
    req, plain = BookedRequest([8, 4], open_at=1), BookedRequest([8, 4])
    for token, text, place in ((-1, [8, 4], 1), (0, [8, 0], None), (7, [8, 0], None)):
        resolve([req, plain], first_tokens=torch.tensor([token, 5]))
        assert (req.output_ids, req.smc_state.open_token.place) == (text, place)
    assert plain.output_ids == [8, 4], "a token that was never open is SGLang's"


def asking(num_top: int, ids: list[int] | None, **books: Any) -> BookedRequest:
    req = BookedRequest([8, 4], open_at=1 if books else None)
    req.return_logprob = True
    req.logprob = ReqLogprob(top_logprobs_num=num_top, token_ids_logprob=ids, **books)
    return req


def logprobs_of(size: int) -> dict[str, Any]:
    """Return a round of which each log-probability is minus its token's place, 10 a request."""
    number = -torch.arange(10.0).expand(size, -1) - 10 * torch.arange(size).unsqueeze(1)
    top = number.unsqueeze(2).expand(-1, -1, 2)
    tails = TailLogprobs(number, top, top.long(), number.unsqueeze(2))
    output = LogitsProcessorOutput(next_token_logits=None)
    return {"logits_output": output, "logprobs": Emitted(tails, torch.tensor([-0.25, -0.5]))}


def test_sglang_finds_each_emitted_tokens_log_probabilities_where_it_looks() -> None:
    """A rectangle of as many tokens for each request, row after row, cut to what each asked for."""
    result, _ = resolve([asking(2, None), asking(1, [7])], [1, 3], **logprobs_of(2))
    output: Any = result.logits_output
    assert output.next_token_logprobs.tolist() == [[0, -1, -2], [-10, -11, -12]]
    values, ids = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
    assert [row.tolist() for row in values] == [[0, 0], [-1, -1], [-2, -2], [-10], [-11], [-12]]
    assert [row.tolist() for row in ids][3:] == [[-10], [-11], [-12]]
    listed = [row.tolist() for row in output.next_token_token_ids_logprobs_val]
    assert listed == [[], [], [], [-10], [-11], [-12]]
    assert output.next_token_token_ids_logprobs_idx == [[], [], [], [7], [7], [7]]
    silent: Any = resolve([asking(2, [7])], **logprobs_of(1))[0].logits_output
    assert silent.next_token_logprobs.tolist() == [[]], "of a round without tokens"
    books = {"output_token_logprobs_val": [-9.0, -9.0], "output_token_logprobs_idx": [8, 4]}
    req, quiet = asking(0, None, **books), BookedRequest([8, 4], open_at=1)
    resolve([req, quiet], first_tokens=torch.tensor([6, 5]), **logprobs_of(2))
    assert req.output_ids == req.logprob.output_token_logprobs_idx == [8, 6]
    assert req.logprob.output_token_logprobs_val == [-9.0, -0.25], "a settled token brings its own"
    assert quiet.output_ids == [8, 5]


def test_a_request_whose_particles_all_weigh_zero_ends_with_an_error() -> None:
    """It emits nothing more; the requests beside it go on."""
    stuck, other = BookedRequest(), BookedRequest()
    stuck.grammar = maker("ab")()
    result, live = SMCBatchResult(accept_lens=torch.tensor([2, 2])), [True, True]
    result._end_stuck([stuck, other], live, [[-math.inf], [0.0]])  # type: ignore[list-item]
    assert result.accept_lens.tolist() == [0, 2] and live == [False, True]
    assert stuck.to_finish.status_code == 400 and other.to_finish is None


@pytest.mark.parametrize("num_particles", [1, 3])
def test_what_verified_proposals_accept_is_counted_as_a_mean(num_particles: int) -> None:
    """All that a draft equal to the target proposes."""
    target, _ = languages()
    config = SMCConfig(num_particles=3, num_steps=2)
    chosen = ({"proposal": "verified", "num_particles": num_particles},)
    given: dict[str, Any] = {"num_requests": 1, "max_new_tokens": 20, "eos": -1, "chosen": chosen}
    worker = ToyWorker(config, target, target, **given)
    assert worker.play_round(worker.begin([1])).correct_drafts.tolist() == [2]
