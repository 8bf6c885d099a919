"""What attention over a shared prefix and tails gathers; its values are in `kernels/`."""

import pytest
import torch
from particle_cases import make_case, plan_of

from sglang_smc.models import softmax
from sglang_smc.models.softmax import Softmax, attend, attend_anywhere


@pytest.mark.parametrize(
    ("committed", "ahead", "how", "expected"),
    [
        ([50], [[0] * 4], {}, 50 + 4 * 2),
        ([50, 8], [[0] * 4, [3] * 4], {"window": 20}, 2 * 21 + 2 * 4 * 5),
        ([1], [[0] * 4], {"first_key": 1}, 1 + 4 * 2),  # one takes the place of none
    ],
)
def test_keys_are_gathered_once_and_where_some_query_sees_them(
    committed: list[int], ahead: list, how: dict[str, int], expected: int
) -> None:
    assert len(plan_of(make_case(committed, ahead, num_columns=2, **how)).slots) == expected


def test_what_sees_no_key_weighs_nothing() -> None:
    query, keys = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4)
    mask = torch.zeros(1, 1, 2, 3)
    mask[0, 0, 1] = torch.finfo(torch.float32).min
    for attention in (attend, attend_anywhere):
        nothing = attention(query, keys, keys, mask, Softmax(1.0))
        seen = attention(query, keys, 2 * keys, torch.zeros(1, 1, 1, 3), Softmax(1.0))
        merged = softmax.join(nothing, seen, Softmax(1.0))
        assert torch.equal(merged[0, 0, 1], seen.output[0, 0, 1]), attention
        assert torch.allclose(merged[0, 0, 0], torch.full((4,), 1.5)), attention
