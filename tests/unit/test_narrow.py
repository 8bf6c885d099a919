"""The fixed-lag commit: oldest tokens drawn by weight, particles that have them kept and split."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.smc.prefixes import common_tail, narrow

INF = math.inf
quick = settings(max_examples=150)
BEFORE = 9  # the token before all tails
FIELDS = "ancestors", "log_weights", "log_mean", "drops"


def of_group(
    tails: list[list[int]],
    log_weights: list[float],
    count: int,
    of_uniforms: list[float],
    **other: Any,
) -> Any:
    """One group, narrowed once for each of the uniforms ``[S]``."""
    uniforms = torch.tensor(of_uniforms, dtype=torch.float64)
    size, width = len(uniforms), max(map(len, tails)) + 2
    padded = [[BEFORE, *tail, *[7] * (width - 1 - len(tail))] for tail in tails]
    present = other.get("present", [True] * len(tails))
    found = narrow(
        torch.tensor(log_weights, dtype=torch.float64).expand(size, -1),
        torch.tensor(other.get("texts", padded)).expand(size, -1, -1),
        torch.tensor([len(tail) for tail in tails]).expand(size, -1),
        torch.full((size,), count),
        torch.tensor(present).expand(size, -1),
        uniforms,
        torch.full((size,), other.get("heaviest", False)),
    )
    return SimpleNamespace(**dict(zip(FIELDS, found, strict=True)))


def test_prefixes_are_drawn_by_weight_and_each_particle_keeps_its_own_in_expectation() -> None:
    """Over evenly spread uniforms, so to one of them: what makes it proper."""
    tails, shares = [[1, 2], [1, 3], [4, 2], [5, 5], [1, 2]], [0.1, 0.2, 0.6, 0.0, 0.1]
    uniforms = [(place + 0.5) / 1000 for place in range(1000)]
    logs = [math.log(share) + 5 if share else -INF for share in shares]
    found = of_group(tails, logs, 1, uniforms)
    first = torch.tensor(tails)[found.ancestors[:, 0], 0]
    assert torch.bincount(first, minlength=6).tolist() == [0, 400, 0, 0, 600, 0]
    for particle, share in enumerate(shares):
        mine = found.ancestors == particle
        carried = torch.where(mine, (found.log_weights - 5).exp(), 0.0).sum(1)
        assert carried.mean() == pytest.approx(share, abs=2 / 1000)


def test_free_places_are_filled_by_splitting_the_heaviest() -> None:
    tails = [[1, 2], [1, 3], [4, 2], [4, 4], [5, 1]]
    logs = [math.log(weight) for weight in (1.0, 5.0, 1.0, 1.0, 2.0)]
    found = of_group(tails, logs, 1, [0.0])
    # In four parts the heavier is still heavier than the other.
    assert found.ancestors.tolist() == [[0, 1, 1, 1, 1]]
    expected = torch.tensor([1.0, *[5.0 / 4] * 4], dtype=torch.float64) * 10 / 6
    assert torch.allclose(found.log_weights.exp(), expected)


def test_a_tail_that_has_ended_is_shared_by_its_own_kind_alone() -> None:
    """A shorter text is no beginning of a longer one: it is over."""
    for uniform, ancestors in ((0.1, [0, 0, 2]), (0.5, [1, 1, 1])):
        found = of_group([[1], [1, 2, 3], [1]], [0.0] * 3, 2, [uniform])
        assert found.ancestors.tolist() == [ancestors]


def test_the_token_before_counts_where_particles_differ_in_it() -> None:
    texts = [[8, 1, 2, 0], [9, 1, 3, 0], [8, 1, 4, 0]]
    found = of_group([text[1:3] for text in texts], [0.0] * 3, 1, [0.0], texts=texts)
    assert found.ancestors.tolist() == [[0, 0, 2]]


def test_whatever_the_uniform_the_dead_and_the_absent_are_not_drawn() -> None:
    """Nor any but the heaviest where that is asked for."""
    uniforms, present = [0.0, 0.5, math.nextafter(1.0, 0.0)], [True, True, False, True]
    found = of_group([[1], [2], [3]], [-1.0, 3.0, -INF], 1, uniforms, heaviest=True)
    assert found.ancestors.tolist() == [[1, 1, 1]] * 3
    found = of_group([[1], [2], [], [3]], [-INF, 0.0, -INF, -INF], 1, uniforms, present=present)
    assert found.ancestors.tolist() == [[1, 1, 2, 1]] * 3
    assert (found.log_weights[:, 2] == -INF).all()


def test_a_group_whose_particles_have_all_died_is_left_dead() -> None:
    found = of_group([[1], [2]], [-INF, -INF], 1, [0.3])
    assert found.log_weights.tolist() == [[-INF, -INF]]
    assert found.log_mean.tolist() == [-INF]


@st.composite
def populations(draw: st.DrawFn) -> dict[str, Any]:
    num_particles = draw(st.integers(1, 6))
    lists = st.lists(st.integers(0, 1), max_size=5)
    weights = st.floats(-20, 20) | st.just(-INF)
    return {
        "tails": draw(st.lists(lists, min_size=num_particles, max_size=num_particles)),
        "log_weights": [0.0, *draw(st.lists(weights, min_size=5, max_size=5))][:num_particles],
        "count": draw(st.integers(0, 6)),
        "of_uniforms": [draw(st.floats(0, 1, exclude_max=True))],
    }


@quick
@given(populations())
def test_nothing_else_changes(given: dict[str, Any]) -> None:
    """The total weight stays, who stays stays in place, and what was asked for is shared."""
    found, count = of_group(**given), given["count"]
    before = torch.tensor([given["log_weights"]], dtype=torch.float64)
    assert torch.allclose(found.log_weights.logsumexp(1), before.logsumexp(1))
    assert torch.allclose(found.log_mean, before.logsumexp(1) - math.log(len(given["log_weights"])))
    ancestors = found.ancestors[0].tolist()
    assert found.drops.item() == any(a != n for n, a in enumerate(ancestors))
    assert [ancestors[a] for a in ancestors] == ancestors
    tails = [given["tails"][a] for a in ancestors]
    assert all(tail[:count] == tails[0][:count] for tail in tails)
    if not count:
        assert found.log_weights.tolist() == before.tolist()
    lengths = torch.tensor([[len(tail) for tail in tails]])
    width = max(map(len, tails)) + 1
    texts = torch.tensor([[[BEFORE, *tail, *[7] * (width - len(tail))] for tail in tails]])
    shared = common_tail(texts, lengths, torch.ones_like(lengths, dtype=torch.bool))
    assert shared.item() >= min(count, int(lengths.min()))
