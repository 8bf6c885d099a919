"""Log-probabilities by SGLang's definition, and where they lie until their tokens are emitted."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from populations import population_of
from sglang.srt.layers import logprob_processor
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ReqLogprob

from sglang_smc import upstream
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.population import TailLogprobs
from sglang_smc.state.logprobs import LogprobTable, LogprobWidths, logprob_distribution, score

VOCAB = 11
ROWS = torch.tensor([3, 1])


def stock(logits: torch.Tensor, tokens: torch.Tensor, temperatures: list[float]) -> Any:
    num_groups, num_columns = tokens.shape
    batch = SimpleNamespace(
        seq_lens=[0] * num_groups,
        sampling_info=SimpleNamespace(
            is_all_greedy=False, temperatures=torch.tensor(temperatures).unsqueeze(1)
        ),
        top_logprobs_nums=[3] * num_groups,
        token_ids_logprobs=[[0, 7]] * num_groups,
    )
    output = LogitsProcessorOutput(next_token_logits=logits.flatten(0, 1))
    every = torch.arange(tokens.numel()).view_as(tokens)
    if upstream.IS_NEWER:
        compute = partial(logprob_processor.compute_spec_logprobs, accept_index=every)
        compute(batch, output, tokens.flatten())
    else:
        compute = logprob_processor.compute_spec_v2_logprobs
        compute(batch, output, tokens.flatten(), every, num_columns - 1)
    return output


@pytest.mark.parametrize("original", ["0", "1"])
def test_they_are_those_of_sglangs_workers(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the temperature in them, and without where SGLang's switch leaves it out."""
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", original)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, VOCAB, generator=generator) * 3
    logits[0, 1, 5] = -torch.inf
    tokens = torch.randint(VOCAB, (2, 4), generator=generator)
    tokens[0, 1] = 5
    temperatures = [0.7, 1.3]
    law = logprob_distribution(TokenDistribution, logits, torch.tensor(temperatures))
    rows = torch.arange(8).view(2, 1, 4)
    ids = torch.tensor([[0, 7]] * 2)
    found = score(law, tokens.unsqueeze(1), rows, ids, 3)
    expected = stock(logits, tokens, temperatures)
    torch.testing.assert_close(found.own[:, 0], expected.next_token_logprobs)
    tops = torch.stack(expected.next_token_top_logprobs_val)
    torch.testing.assert_close(found.top.flatten(0, 2), tops)
    assert torch.equal(
        found.top_ids.flatten(0, 2), torch.stack(expected.next_token_top_logprobs_idx)
    )
    listed = torch.stack(expected.next_token_token_ids_logprobs_val)
    torch.testing.assert_close(found.listed.flatten(0, 2), listed)
    assert found.own.isfinite().all(), "no infinity reaches JSON"


def test_tokens_outside_a_grammar_have_no_mass() -> None:
    """As SGLang's sampler sees them behind its mask; where none is left they stay as they are."""
    allowed = torch.zeros(1, 2, VOCAB, dtype=torch.bool)
    allowed[0, 0, [3, 5]] = True
    logits = torch.zeros(1, 2, VOCAB)
    heat = torch.tensor([0.5])
    law = logprob_distribution(TokenDistribution, logits, heat, allowed)
    log_p = law.log_probs().exp()
    assert log_p[0, [3, 5]].tolist() == pytest.approx([0.5, 0.5])
    assert log_p[0].sum().item() == pytest.approx(1.0)
    assert log_p[1].tolist() == pytest.approx([1 / VOCAB] * VOCAB)


def req(**fields: Any) -> Any:
    return SimpleNamespace(
        return_logprob=fields.pop("return_logprob", True),
        sampling_params=SimpleNamespace(max_new_tokens=fields.pop("max_new_tokens", 4)),
        logprob=ReqLogprob(**{"top_logprobs_num": 0, "token_ids_logprob": None, **fields}),
    )


def begin(table: LogprobTable, rows: list[int], *asking: Any) -> Any:
    """Start requests behind tokens 2, 3, ..., of which p is the softmax of 0..V-1."""
    batch: Any = SimpleNamespace(
        reqs=asking,
        req_pool_indices=torch.tensor(rows),
        top_logprobs_nums=[req.logprob.top_logprobs_num for req in asking],
        token_ids_logprobs=[req.logprob.token_ids_logprob for req in asking],
    )
    output = LogitsProcessorOutput(next_token_logits=None)
    log_p = torch.log_softmax(torch.arange(float(VOCAB)), -1).expand(len(rows), -1).clone()
    table.begin(batch, log_p, 2 + torch.arange(len(rows)).unsqueeze(1), output)
    return output


def test_who_scores_or_shows_nothing_may_ask_for_all_and_widens_no_tail() -> None:
    """What it wants is there after prefill; under the overlap schedule it still sees a round."""
    scoring = req(max_new_tokens=0, top_logprobs_num=VOCAB, token_ids_logprob=[2] * 500)
    silent = req(return_logprob=False, top_logprobs_num=9, token_ids_logprob=[1, 2, 3])
    assert LogprobWidths.of([silent]) == LogprobWidths(0, 0, 0)
    assert LogprobWidths.of([scoring, silent]) == LogprobWidths(1, 0, 0)
    table = LogprobTable(5, 3, 3, "cpu")
    output = begin(table, [3, 1], scoring, req())
    listed = [row.tolist() for row in output.next_token_token_ids_logprobs_val]
    assert len(listed[0]) == 500 and listed[1] == [], "at which SGLang's own lists break"
    found = gather(table, LogprobWidths.of([scoring]))
    assert found.top.shape == found.listed.shape == (2, 3, 4, 0)


def gather(table: LogprobTable, widths: LogprobWidths) -> TailLogprobs:
    found = table.gather(ROWS, population_of([[[]] * 3] * 2, width=4), widths).logprobs
    assert found is not None
    return found


def tails(num_top: int, num_listed: int) -> TailLogprobs:
    """Two groups of three particles with four places; all numbers differ."""
    numbers = torch.arange(24.0).view(2, 3, 4)
    top = numbers.unsqueeze(3) + torch.arange(num_top) * 100.0
    listed = numbers.unsqueeze(3) + torch.zeros(num_listed)
    return TailLogprobs(numbers.clone(), top, top.long(), listed)


def test_a_table_widens_for_who_asks_for_more_and_loses_nothing() -> None:
    """A request that is under way when another begins keeps its tails' numbers."""
    table = LogprobTable(5, 3, 3, "cpu")
    expected = tails(4, 2)
    begin(table, [3], req(top_logprobs_num=2))
    table.scatter(ROWS, tails(2, 0))
    begin(table, [4], req(top_logprobs_num=4, token_ids_logprob=[7, 0]))
    begin(table, [2], req())  # it never shrinks
    for column in (expected.top[..., 2:], expected.top_ids[..., 2:], expected.listed):
        column.zero_()
    found = gather(table, LogprobWidths(1, 4, 2))
    assert all(map(torch.equal, found, expected))
