"""Custom processors read each row's own text, and fail for themselves alone."""

from array import array
from typing import Any

import pytest
import torch
from edit_cases import begin_rules, make_req, rules_of
from populations import population_of
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from sglang_smc.requests.processors import Processors

VOCAB = 6


class Recorder(CustomLogitProcessor):
    """Adds one to the token of a text's length, and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[Any] | None = None
    ) -> torch.Tensor:
        assert custom_param_list is not None
        for row, params in zip(logits, custom_param_list, strict=True):
            text = None if params is None else list(params["__req__"].output_ids)
            self.seen.append(text)
            row[len(text or [])] += 1
        return logits


def with_processor(output_ids: list[int], processor: Any, **custom_params: Any) -> Any:
    req = make_req(output_ids, custom_params=custom_params)
    req.origin_input_ids = array("q", [7, 8])
    req.custom_logit_processor = "loaded"
    if processor is not None:
        req.smc_state.kept[Processors] = processor
    return req


def apply(
    reqs: list[Any],
    last_emitted: list[list[int]],
    tails: list,
    chains: list,
    first: int = 0,
    **fields: Any,
) -> torch.Tensor:
    of_round = rules_of(reqs, population_of(tails, last_emitted, **fields), VOCAB)
    drafted = torch.tensor(chains, dtype=torch.int64)
    num_columns = 1 if first else drafted.shape[2] + 1
    logits = torch.zeros(*drafted.shape[:2], num_columns, VOCAB)
    return of_round.apply(logits, drafted, first)[0]


def test_each_row_is_shown_what_it_follows() -> None:
    recorder = Recorder()
    reqs = [make_req([1]), with_processor([1, 2], recorder)]
    found = apply(reqs, [[1, 1], [2, 2]], [[[], []], [[3], []]], [[[0], [0]], [[4], [5]]])
    assert recorder.seen == [[1, 2, 3], [1, 2, 3, 4], [1, 2], [1, 2, 5]]
    assert found[1].argmax(2).tolist() == [[3, 4], [2, 3]]
    assert not found[0].any(), "a neighbour without a processor"


def test_each_particle_is_shown_its_own_text() -> None:
    """What has been drafted, too; its own first token while that is open; not once it has ended."""
    recorder = Recorder()
    req = with_processor([1], recorder)
    apply([req], [[1, 1]], [[[], [2]]], [[[3, 4], [5, 0]]], first=2)
    apply([req], [[1, 1]], [[[2], [3]]], [[[], []]], ended=torch.tensor([[True, False]]))
    opened = with_processor([1, 0], recorder)
    opened.smc_state.open_token.begin(1)
    apply([opened], [[4, 5]], [[[], []]], [[[], []]])
    begin_rules([make_req([]), with_processor([1, 2], recorder)], torch.zeros(2, VOCAB))
    shown = [[1, 3, 4], [1, 2, 5, 0], [1, 3], [1, 4], [1, 5], [1, 2]]
    assert recorder.seen == shown
    req.sampling_params.custom_params = None
    apply([req], [[1]], [[[]]], [[[]]])
    assert recorder.seen == [*shown, None], "without parameters as in SGLang"


def test_sglang_s_own_processors_read_prompt_and_output_as_they_do_there() -> None:
    """Bigrams of prompt 7 8 and of 1 2 1: what follows a 1 may be no 2, and after 1 2 no 1."""
    req = with_processor(
        [1, 2], DeepseekOCRNoRepeatNGramLogitProcessor(), ngram_size=2, window_size=9, smc={}
    )
    found = apply([req], [[2]], [[[1]]], [[[2]]])[0, 0]
    assert (found == -torch.inf).nonzero().tolist() == [[0, 2], [1, 1]]
    disallowed = with_processor([1], DisallowedTokensLogitsProcessor(), token_ids=[3, 5])
    found = apply([disallowed], [[1]], [[[]]], [[[]]])[0, 0, 0]
    assert found.isinf().nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("loaded", [True, False])
def test_a_processor_that_fails_ends_its_own_request_alone(loaded: bool) -> None:
    broken = with_processor([1], DisallowedTokensLogitsProcessor() if loaded else None)
    broken.custom_logit_processor = '{"callable": "00"}'
    recorder = Recorder()
    reqs = [broken, with_processor([1], recorder)]
    found = begin_rules(reqs, torch.zeros(2, VOCAB))
    assert isinstance(broken.to_finish, FINISH_ABORT)
    assert "custom logit processor raised" in broken.to_finish.message
    assert broken.to_finish.status_code == 400
    assert reqs[1].to_finish is None
    assert found.tolist() == [[0] * VOCAB, [0, 1, 0, 0, 0, 0]]
    apply(reqs, [[1], [1]], [[[]], [[]]], [[[]], [[]]])
    assert len(recorder.seen) == 2
