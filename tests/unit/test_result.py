"""The scheduler's books after SMC rounds: the identities that clients check."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from edit_cases import NEUTRAL
from populations import texts_of
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ReqLogprob

from sglang_smc import process
from sglang_smc.options.request import RequestConfig
from sglang_smc.requests.state import RequestState
from sglang_smc.round.result import Outcome, Particles, SMCBatchResult
from sglang_smc.state.counters import Counters
from sglang_smc.state.monitor import Monitor
from sglang_smc.state.population import Population
from sglang_smc.state.tail_logprobs import Emitted, TailLogprobs


class FakeReq:
    """What the books of one request consist of."""

    update_spec_correct_drafts_histogram = Req.update_spec_correct_drafts_histogram

    def __init__(self, *, retracted: bool = False, done: bool = False) -> None:
        self.is_retracted, self.done = retracted, done
        self.spec_verify_ct = self.spec_num_correct_drafts = self.kv_committed_len = 0
        self.spec_correct_drafts_histogram: list[int] = []
        self.output_ids: list[int] = []
        self.stream = False
        self.grammar = self.custom_logit_processor = None
        self.sampling_params = SimpleNamespace(**NEUTRAL)
        self.return_logprob = False
        self.smc_state = RequestState.of(0, RequestConfig())

    def finished(self) -> bool:
        return self.done


def stock_resolve(result: SMCBatchResult, reqs: list[FakeReq]) -> Callable[[], list[list[int]]]:
    """SGLang's accounting in `_resolve_spec_v2_tokens`: of n tokens emitted n - 1 are correct."""

    def resolve() -> list[list[int]]:
        emitted, stride = [], result.speculative_num_draft_tokens
        lengths = result.accept_lens.tolist()
        result.num_correct_drafts = sum(lengths) - len(reqs)
        result.num_correct_drafts_per_req_cpu = [length - 1 for length in lengths]
        for i, req in enumerate(reqs):
            emitted.append(result.next_token_ids.tolist()[i * stride : i * stride + lengths[i]])
            if not (req.is_retracted or req.finished()):
                req.kv_committed_len += lengths[i]
                req.spec_verify_ct += 1
                req.spec_num_correct_drafts += lengths[i] - 1
                req.update_spec_correct_drafts_histogram(lengths[i] - 1)
        return emitted

    return resolve


def resolve(reqs: list[FakeReq], emitted: list[int], kept: list[int]) -> list[list[int]]:
    stride = 12
    result = SMCBatchResult(
        next_token_ids=torch.arange(len(reqs) * stride),
        accept_lens=torch.tensor(emitted),
        speculative_num_draft_tokens=stride,
        correct_drafts=torch.tensor(kept),
        counters=torch.arange(len(reqs)).view(-1, 1) + torch.zeros(1, len(Counters._fields)),
        monitor=Monitor(100),
        failure=torch.zeros(len(reqs), dtype=torch.int64),
    )
    tokens = result.resolve(SimpleNamespace(reqs=reqs), stock_resolve(result, reqs))
    assert result.num_correct_drafts == sum(kept), "the server's accept length reads this"
    assert result.num_correct_drafts_per_req_cpu == kept
    return tokens


@pytest.mark.parametrize(("replayed", "counted"), [(True, 2), (False, 0)])
def test_replayed_rounds_are_counted_and_sglang_s_log_hears_of_them(
    replayed: bool, counted: int
) -> None:
    pair = [FakeReq(), FakeReq()]
    gone = FakeReq(retracted=True)
    reqs, monitor = [*pair, gone], Monitor(100)
    of_groups = torch.zeros(len(reqs), dtype=torch.int64)
    outcome = Outcome(
        tokens=of_groups.unsqueeze(1),
        counts=of_groups,
        new_seq_lens=of_groups,
        last_emitted=of_groups,
        num_correct_drafts=of_groups,
        counters=torch.zeros(len(reqs), len(Counters._fields)),
        failure=of_groups,
        first_tokens=None,
        particles=None,
        logprobs=None,
    )
    result = SMCBatchResult.of(outcome, monitor, replayed)
    assert result.can_run_cuda_graph == replayed, "SGLang logs this"
    result.resolve(SimpleNamespace(reqs=reqs), stock_resolve(result, reqs))
    assert monitor.totals()["replayed_rounds"] == counted
    assert [req.smc_state.num_replayed for req in reqs] == [replayed, replayed, 0]
    assert pair[0].smc_state.meta_info([])["spec_smc_replayed_ct"] == counted / 2


def test_copies_of_an_outcome_s_first_groups_are_its_own() -> None:
    """A graph's next replay writes what it wrote before; particles and log-probabilities, too."""
    whole = population()
    number = torch.arange(6.0).view(2, 3)
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


def assert_identities(req: FakeReq) -> None:
    histogram = req.spec_correct_drafts_histogram
    assert all(count >= 0 for count in histogram)
    assert sum(histogram) == req.spec_verify_ct
    assert sum(i * count for i, count in enumerate(histogram)) == req.spec_num_correct_drafts


def test_histogram_identities_over_rounds_that_emit_nothing_much_or_everything() -> None:
    reqs = [FakeReq(), FakeReq()]
    rounds = [([0, 3], [2, 2]), ([0, 0], [2, 0]), ([9, 1], [1, 0]), ([0, 12], [4, 4])]
    for emitted, kept in rounds:
        resolve(reqs, emitted, kept)
        for req in reqs:
            assert_identities(req)
    assert reqs[0].spec_correct_drafts_histogram == [0, 1, 2, 0, 1]
    assert reqs[1].spec_correct_drafts_histogram == [2, 0, 1, 0, 1]
    assert [req.spec_num_correct_drafts for req in reqs] == [9, 6]


def test_a_first_round_that_emits_nothing() -> None:
    """SGLang would index an empty histogram with -1."""
    req = FakeReq()
    assert resolve([req], [0], [0]) == [[]]
    assert req.spec_correct_drafts_histogram == [1]
    assert req.spec_num_correct_drafts == 0


def test_the_tokens_are_those_that_sglang_resolves() -> None:
    assert resolve([FakeReq(), FakeReq(), FakeReq()], [2, 0, 3], [3, 3, 3]) == [
        [0, 1],
        [],
        [24, 25, 26],
    ]


def test_requests_that_are_gone_keep_their_books() -> None:
    gone = [FakeReq(retracted=True), FakeReq(done=True)]
    for req in gone:
        req.spec_verify_ct, req.spec_num_correct_drafts = 2, 3
        req.spec_correct_drafts_histogram = [0, 1, 1]
        req.smc_state.counters = [7.0]
    live = FakeReq()
    resolve([gone[0], live, gone[1]], [0, 1, 4], [2, 2, 2])
    for req in gone:
        assert req.spec_correct_drafts_histogram == [0, 1, 1]
        assert req.spec_num_correct_drafts == 3
        assert req.smc_state.counters == [7.0]
    assert_identities(live)
    assert live.smc_state.counters == [1.0] * len(Counters._fields), "its own row of the table"


def test_a_request_that_the_books_find_finished_still_counts_its_last_round() -> None:
    """Whether it was live is asked before SGLang's own resolve, which may end it."""
    req = FakeReq()
    result = SMCBatchResult(
        next_token_ids=torch.zeros(4, dtype=torch.int64),
        accept_lens=torch.tensor([4]),
        speculative_num_draft_tokens=4,
        correct_drafts=torch.tensor([3]),
        counters=torch.zeros(1, len(Counters._fields)),
        monitor=Monitor(100),
        failure=torch.zeros(1, dtype=torch.int64),
    )
    stock = stock_resolve(result, [req])

    def finish() -> list[list[int]]:
        tokens = stock()
        req.done = True
        return tokens

    result.resolve(SimpleNamespace(reqs=[req]), finish)
    assert_identities(req)
    assert req.spec_num_correct_drafts == 3


def population(last_emitted: list[list[int]] | None = None) -> Population:
    """Two groups of at most three particles; the first has two, and both of them have ended."""
    return Population(
        texts=texts_of(
            tokens=torch.tensor([[[5, 6, 99], [7, 99, 99], [0, 0, 0]], [[1, 1, 1]] * 3]),
            last_emitted=torch.tensor(last_emitted or [[4, 4, 0], [4, 4, 4]]),
        ),
        lengths=torch.tensor([[2, 1, 0], [3, 3, 3]]),
        ended=torch.tensor([[True, True, True], [True, False, True]]),
        log_weights=torch.tensor([[3.0, 3.0 + math.log(3), -math.inf], [0.0] * 3]).double(),
        num_emitted=torch.tensor([2, 2]),
        log_evidence=torch.zeros(2).double(),
        present=torch.tensor([[True, True, False], [True] * 3]),
        roots=torch.arange(3).expand(2, 3),
        unread=torch.zeros(2, dtype=torch.bool),
        fidelity=torch.zeros(2, 3, 4).double(),
    )


def shown(whole: Population) -> Particles:
    return Particles.of(whole, whole)


def emitted_req(output_ids: list[int]) -> FakeReq:
    req = FakeReq()
    req.output_ids = output_ids
    return req


def test_particles_of_a_finished_group_are_whole_texts_with_normalised_weights() -> None:
    """The emitted text stands before each tail, and nothing that is stale or absent comes along."""
    found = shown(population()).of_group(0, emitted_req([8, 4]))
    assert found is not None
    assert [particle["output_ids"] for particle in found] == [[8, 4, 5, 6], [8, 4, 7]]
    assert [particle["weight"] for particle in found] == pytest.approx([0.25, 0.75])
    assert [particle["log_weight"] for particle in found] == pytest.approx([3.0, 3 + math.log(3)])


def test_particles_of_a_group_that_goes_on_are_not_shown() -> None:
    assert shown(population()).of_group(1, emitted_req([8, 4])) is None


def test_particles_show_their_own_first_token_while_it_is_open() -> None:
    whole = population([[3, 2, 0], [4, 4, 4]])
    req = emitted_req([8, 4])
    req.smc_state.open_token.begin(1)
    found = shown(whole).of_group(0, req)
    assert found is not None
    assert [particle["output_ids"] for particle in found] == [[8, 3, 5, 6], [8, 2, 7]]


def open_rounds(first_tokens: list[int], *reqs: FakeReq) -> None:
    result = SMCBatchResult(
        next_token_ids=torch.zeros(len(reqs), dtype=torch.int64),
        accept_lens=torch.zeros(len(reqs), dtype=torch.int64),
        speculative_num_draft_tokens=1,
        correct_drafts=torch.zeros(len(reqs), dtype=torch.int64),
        counters=torch.zeros(len(reqs), len(Counters._fields)),
        failure=torch.zeros(len(reqs), dtype=torch.int64),
        first_tokens=torch.tensor(first_tokens),
        monitor=Monitor(100),
    )
    result.resolve(SimpleNamespace(reqs=list(reqs)), stock_resolve(result, list(reqs)))


def test_an_open_first_token_is_replaced_once_all_particles_agree() -> None:
    req, plain = emitted_req([8, 4]), emitted_req([8, 4])
    req.smc_state.open_token.begin(1)
    open_rounds([-1, 5], req, plain)
    assert (req.output_ids, req.smc_state.open_token.place) == ([8, 4], 1), "they still differ"
    open_rounds([6, 5], req, plain)
    assert (req.output_ids, req.smc_state.open_token.place) == ([8, 6], None)
    open_rounds([7, 5], req, plain)
    assert req.output_ids == [8, 6], "and then it stays"
    assert plain.output_ids == [8, 4], "a token that was never open is SGLang's"


def test_only_who_asked_is_given_the_particles() -> None:
    """And it gets them with the text as it stood before this round's tokens were emitted."""
    asked, silent = FakeReq(), FakeReq()
    asked.smc_state.config = RequestConfig(return_particles=True)
    asked.output_ids = [8, 4]
    whole = population()
    result = SMCBatchResult(
        next_token_ids=torch.arange(6),
        accept_lens=torch.tensor([1, 1]),
        speculative_num_draft_tokens=3,
        correct_drafts=torch.tensor([1, 1]),
        counters=torch.zeros(2, len(Counters._fields)),
        failure=torch.zeros(2, dtype=torch.int64),
        particles=shown(Population(*(column[[0, 0]] for column in whole[:-2]))),
        monitor=Monitor(100),
    )
    reqs = [asked, silent]
    result.resolve(SimpleNamespace(reqs=reqs), stock_resolve(result, reqs))
    assert asked.smc_state.particles is not None
    assert asked.smc_state.particles[0]["output_ids"] == [8, 4, 5, 6]
    assert silent.smc_state.particles is None


def test_particles_keep_the_first_tokens_that_one_is_drawn_from_in_the_same_round() -> None:
    asked = emitted_req([8, 4])
    asked.smc_state.config = RequestConfig(return_particles=True)
    asked.smc_state.open_token.begin(1)
    whole = population([[3, 2, 0], [4, 4, 4]])
    result = SMCBatchResult(
        next_token_ids=torch.arange(3),
        accept_lens=torch.tensor([1]),
        speculative_num_draft_tokens=3,
        correct_drafts=torch.tensor([1]),
        counters=torch.zeros(1, len(Counters._fields)),
        failure=torch.zeros(1, dtype=torch.int64),
        first_tokens=torch.tensor([2]),
        particles=shown(Population(*(column[:1] for column in whole[:-2]))),
        monitor=Monitor(100),
    )
    result.resolve(SimpleNamespace(reqs=[asked]), stock_resolve(result, [asked]))
    assert list(asked.output_ids[:2]) == [8, 2]
    texts = [particle["output_ids"] for particle in asked.smc_state.particles]
    assert texts == [[8, 3, 5, 6], [8, 2, 7]]


def with_logprobs(
    *reqs: FakeReq, lengths: list[int], first_tokens: list[int] | None
) -> SMCBatchResult:
    """A round of which each token's log-probability is minus its place, 10 a request."""
    number = -torch.arange(10.0).expand(len(reqs), -1) - 10 * torch.arange(len(reqs)).unsqueeze(1)
    top = number.unsqueeze(2).expand(-1, -1, 2)
    tails = TailLogprobs(number, top, top.long(), number.unsqueeze(2))
    return SMCBatchResult(
        failure=torch.zeros(len(reqs), dtype=torch.int64),
        next_token_ids=torch.zeros(10 * len(reqs), dtype=torch.int64),
        accept_lens=torch.tensor(lengths),
        speculative_num_draft_tokens=10,
        correct_drafts=torch.zeros(len(reqs), dtype=torch.int64),
        counters=torch.zeros(len(reqs), len(Counters._fields)),
        first_tokens=None if first_tokens is None else torch.tensor(first_tokens),
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        logprobs=Emitted(tails, torch.tensor([-0.25, -0.5])),
        monitor=Monitor(100),
    )


def asking(num_top: int, ids: list[int] | None, **books: list) -> FakeReq:
    req = emitted_req([8, 4])
    req.return_logprob, req.logprob = (
        True,
        ReqLogprob(top_logprobs_num=num_top, token_ids_logprob=ids, **books),
    )  # type: ignore[attr-defined]
    return req


def test_sglang_finds_each_emitted_tokens_log_probabilities_where_it_looks() -> None:
    """A rectangle of as many tokens for each request, row after row, cut to what each asked for."""
    reqs = [asking(2, None), asking(1, [7])]
    result = with_logprobs(*reqs, lengths=[1, 3], first_tokens=None)
    result.resolve(SimpleNamespace(reqs=reqs), stock_resolve(result, reqs))
    output = result.logits_output
    assert output is not None
    assert output.next_token_logprobs.tolist() == [[0, -1, -2], [-10, -11, -12]]
    found = [[row.tolist() for row in rows] for rows in (output.next_token_top_logprobs_val,)]
    assert found == [[[0, 0], [-1, -1], [-2, -2], [-10], [-11], [-12]]]
    assert [row.tolist() for row in output.next_token_top_logprobs_idx][3:] == [[-10], [-11], [-12]]
    listed = [row.tolist() for row in output.next_token_token_ids_logprobs_val]
    assert listed == [[], [], [], [-10], [-11], [-12]]
    assert output.next_token_token_ids_logprobs_idx == [[], [], [], [7], [7], [7]]


def test_a_round_that_emits_nothing_has_no_log_probabilities() -> None:
    reqs = [asking(2, [7])]
    result = with_logprobs(*reqs, lengths=[0], first_tokens=None)
    result.resolve(SimpleNamespace(reqs=reqs), stock_resolve(result, reqs))
    assert result.logits_output is not None
    assert result.logits_output.next_token_logprobs.tolist() == [[]]


def test_a_settled_first_token_brings_its_own_log_probability() -> None:
    books = {"output_token_logprobs_val": [-9.0, -9.0], "output_token_logprobs_idx": [8, 4]}
    req, quiet = asking(0, None, **books), emitted_req([8, 4])
    quiet.return_logprob = False  # type: ignore[attr-defined]
    for one in (req, quiet):
        one.smc_state.open_token.begin(1)
    result = with_logprobs(req, quiet, lengths=[0, 0], first_tokens=[6, 5])
    result.resolve(SimpleNamespace(reqs=[req, quiet]), stock_resolve(result, [req, quiet]))
    assert req.output_ids == [8, 6]
    assert req.logprob.output_token_logprobs_val == [-9.0, -0.25]  # type: ignore[attr-defined]
    assert req.logprob.output_token_logprobs_idx == [8, 6]  # type: ignore[attr-defined]
    assert quiet.output_ids == [8, 5]


def test_what_a_round_emits_is_compared_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(process, "check_ranks", told.append)
    emitted = resolve([FakeReq(), FakeReq()], [2, 0], [1, 0])
    assert told == [emitted]
