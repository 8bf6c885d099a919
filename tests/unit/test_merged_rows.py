"""Rows of one KV slot are run once: which are run, and whose result each row has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from particle_cases import PLAIN, SCALING, make_case, plan_of

from sglang_smc.models.chains import merge_rows
from sglang_smc.models.softmax import Softmax, shared_prefix_attention


@st.composite
def passes(draw: st.DrawFn) -> torch.Tensor:
    """Slots ``[G, N, C]`` of a trie: particles of a group share slots up to where they part."""
    num_groups, num_particles, num_columns = (draw(st.integers(1, 3)) for _ in range(3))
    slots = torch.zeros(num_groups, num_particles, num_columns, dtype=torch.int64)
    slot = iter(range(1, 1000))
    for group in slots:
        for n, row in enumerate(group):
            parent = draw(st.integers(0, n))
            shared = draw(st.integers(0, num_columns)) if parent < n else 0
            row[:shared] = group[parent, :shared]
            for column in range(shared, num_columns):
                row[column] = next(slot) if draw(st.booleans()) or column else 0
    return slots


@settings(max_examples=100)
@given(passes(), st.booleans())
def test_each_slot_is_run_once_and_rows_have_its_result(slots: torch.Tensor, last: bool) -> None:
    flat = slots.flatten()
    num_columns = slots.shape[2]
    found = merge_rows(slots, last=last)
    rows = torch.arange(len(flat))
    used = rows[(flat > 0) | (rows % num_columns == num_columns - 1) | (not last)]
    first = (flat.unsqueeze(1) == flat).int().argmax(1)
    wanted = used[(flat[used] == 0) | (first[used] == used)]
    if found is None:
        assert torch.equal(wanted, rows)
        return
    assert torch.equal(found.kept, wanted)
    kept = found.kept[found.results[used]]
    assert ((kept == used) | ((flat[kept] == flat[used]) & (flat[used] > 0))).all()
    # Sequences are the kept rows of each particle, in order.
    owners = found.kept // num_columns
    assert torch.equal(found.particles.repeat_interleave(found.lengths), owners)
    ends = found.lengths.cumsum(0) - 1
    of_last = found.results.view(-1, num_columns)[:, -1]
    assert torch.equal(ends[found.sequences], of_last), "where SGLang computes logits"


# --- What attention over a shared prefix and tails gathers; its values are in `kernels/`


@pytest.mark.parametrize(
    ("committed", "ahead", "how", "expected"),
    [
        ([50], [[0] * 4], {}, 50 + 4 * 2),
        ([50, 8], [[0] * 4, [3] * 4], {"window": 20}, 2 * 21 + 2 * 4 * 5),
        ([1], [[0] * 4], {"first_key": 1}, 1 + 4 * 2),  # one takes the place of none
    ],
)
def test_keys_that_some_query_sees_are_gathered_once(
    committed: list[int], ahead: list, how: dict[str, int], expected: int
) -> None:
    assert len(plan_of(make_case(committed, ahead, num_columns=2, **how)).slots) == expected


@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("softmax", [PLAIN, Softmax(SCALING, cap=5.0)])
def test_siblings_read_their_prompt_once(
    num_particles: int, first_key: int, softmax: Softmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests 1 to 3 of one prompt, with texts of their own behind it, between two others."""
    monkeypatch.setattr("sglang_smc.models.softmax._LONG", 64)
    committed = [90, 100, 101, 130, 80]
    ahead = [[1] * num_particles] * 5
    case = make_case(committed, ahead, num_columns=2, first_key=first_key, softmax=softmax)
    before = len(plan_of(case).slots)
    _, one, *others, _ = case.rows.tolist()
    for row, length in zip(others, (99, 95), strict=True):
        case.req_to_token[row, :length] = case.req_to_token[one, :length]
    plan = plan_of(case)
    runs = [(one.first, one.last, len(one.slots) + first_key) for one in plan.siblings]
    assert runs == [(0, 1, 89), (1, 4, 95), (4, 5, 79)]
    assert len(plan.slots) < before - 2 * 95
    case.assert_close(shared_prefix_attention(case.query, case.keys, case.values, plan, softmax))


@pytest.mark.parametrize("window", [None, 20])
def test_rows_of_one_text_ask_a_prefix_once(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_smc.models.softmax._LONG", 20)
    case = make_case([50, 30], [[0] * 3] * 2, num_columns=3, window=window)
    slots = torch.arange(1, 19).view(2, 3, 3)
    slots[0, 1, :2], slots[0, 2, :1], slots[1, 1] = slots[0, 0, :2], slots[0, 0, :1], slots[1, 0]
    merged = merge_rows(slots, last=False)
    assert merged is not None
    query = case.query.flatten(0, 2)[merged.kept][merged.results].view_as(case.query)
    case, plan = case._replace(query=query), plan_of(case, merged)
    assert plan.distinct is not None and plan.distinct[0].shape == (2, 6)
    case.assert_close(shared_prefix_attention(query, case.keys, case.values, plan, case.softmax))
