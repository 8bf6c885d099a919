"""Attention over a shared prefix and tails, against softmax attention one query at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from particle_cases import SCALING, Case, make_case, plan_of

from sglang_smc.models import softmax
from sglang_smc.models.softmax import Softmax, attend, attend_anywhere, shared_prefix_attention


def run(case: Case) -> torch.Tensor:
    return shared_prefix_attention(case.query, case.keys, case.values, plan_of(case), case.softmax)


@st.composite
def cases(draw: Any) -> Case:
    size, num_particles = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    ahead = st.lists(
        st.none() | st.integers(-1, 12), min_size=num_particles, max_size=num_particles
    )
    sinks = torch.linspace(-1, 2, kv_heads * group) if draw(st.booleans()) else None
    cap, value_scale = draw(st.sampled_from([0.0, 2.0])), draw(st.sampled_from([1.0, 0.5]))
    num_columns = draw(st.sampled_from([1, 2, 9]))
    columns = st.lists(st.integers(1, num_columns), min_size=size, max_size=size)
    sees_block = draw(st.booleans())
    window = None if sees_block else draw(st.none() | st.integers(1, 80))
    return make_case(
        draw(st.lists(st.integers(1, 70), min_size=size, max_size=size)),
        draw(st.lists(ahead, min_size=size, max_size=size)),
        num_columns=num_columns,
        open_columns=draw(columns),
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=16,
        softmax=Softmax(SCALING, cap, sinks, value_scale),
        window=window,
        sees_block=sees_block,
        first_key=draw(st.sampled_from([0, 1, 5])),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_particles_see_their_prefix_and_their_own_tail(case: Case) -> None:
    """By torch's CPU kernel, and by the formula that other devices use."""
    case.assert_close(run(case))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "attend", attend_anywhere)
        case.assert_close(run(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype: torch.dtype) -> None:
    case = make_case([40, 3], [[-1, 0, 5], [9, None, 2]], num_columns=5, dtype=dtype)
    output = run(case)
    assert output.dtype == dtype
    case.assert_close(output)


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
