"""What requests asked for, as tables: their own rules, their own ends."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from table_entries import entry

from sglang_smc.state import settings
from sglang_smc.state.settings import RequestTable, stop_tokens

VOCAB = 6


def test_a_row_that_is_used_again_forgets_its_former_request() -> None:
    table = RequestTable(3, VOCAB, "cpu")
    table.write([entry(1, stop_tokens=frozenset({0, 3, 5}), ignore_eos=True, top_k=1)])
    table.write([entry(1, stop_tokens=frozenset({4})), entry(2, seed=2**63 - 1)])
    found = table.gather(torch.tensor([1, 2]))
    assert found.stop_mask[0].nonzero().flatten().tolist() == [4]
    assert found.may_stop.tolist() == [True, True]
    assert found.top_k.tolist() == [1 << 30] * 2
    assert found.seeds.tolist() == [101, 2**63 - 1]


@pytest.mark.parametrize(
    ("of_request", "of_model", "of_tokenizer", "expected"),
    [
        (None, None, None, set()),
        (None, {1, 2}, None, {1, 2}),
        (None, None, (3, None), {3}),
        (None, None, (None, {4}), {4}),
        ([5], {1}, (3, {4}), {1, 3, 4, 5}),
        ([-1, 6, 5], {99}, (6, {-7}), {5}),  # ids outside the vocabulary
        ([0], None, None, {0}),  # 0 is a token like any other
    ],
)
def test_stop_tokens_come_from_request_model_and_tokenizer(
    of_request: Any, of_model: Any, of_tokenizer: tuple | None, expected: set[int]
) -> None:
    names = "eos_token_id", "additional_stop_token_ids"
    own = of_tokenizer and SimpleNamespace(**dict(zip(names, of_tokenizer, strict=True)))
    assert stop_tokens(of_request, of_model, own, VOCAB) == frozenset(expected)


def test_kinds_are_those_of_the_requests() -> None:
    def kinds(*asked: dict[str, Any]) -> tuple[bool, bool]:
        neutral = {"top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}
        params = [SimpleNamespace(**{**neutral, **one}) for one in ({}, *asked)]
        reqs: Any = [SimpleNamespace(sampling_params=p, vocab_size=VOCAB) for p in params]
        return any(map(settings.uses_filters, reqs)), any(map(settings.is_greedy, reqs))

    assert kinds() == (False, False)
    assert kinds({"top_k": 1, "top_p": 0.5}) == (False, True)
    for filters in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert kinds(filters) == (True, False)
