"""The fixed-lag commit: oldest tokens drawn by weight, particles that have them kept and split."""

import math
from types import SimpleNamespace
from typing import Any

import torch

from sglang_smc.smc.prefixes import count_nodes, narrow

INF = math.inf
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
    size = len(uniforms)
    width = max(map(len, tails)) + 2
    padded = [[BEFORE, *tail, *[7] * (width - 1 - len(tail))] for tail in tails]
    present = other.get("present", [True] * len(tails))
    found = narrow(
        torch.tensor(log_weights, dtype=torch.float64).expand(size, -1),
        torch.tensor(padded).expand(size, -1, -1),
        torch.tensor([len(tail) for tail in tails]).expand(size, -1),
        torch.full((size,), count),
        torch.tensor(present).expand(size, -1),
        uniforms,
        torch.full((size,), other.get("heaviest", False)),
    )
    return SimpleNamespace(**dict(zip(FIELDS, found, strict=True)))


def test_free_places_are_filled_by_splitting_the_heaviest() -> None:
    tails = [[1, 2], [1, 3], [4, 2], [4, 4], [5, 1]]
    logs = [math.log(weight) for weight in (2.0, 5.0, 1.0, 1.0, 2.0)]
    found = of_group(tails, logs, 1, [0.0])
    # In two parts the heavier is still heavier than the other, and in three no more.
    assert found.ancestors.tolist() == [[0, 1, 1, 1, 0]]
    expected = torch.tensor([1.0, *[5.0 / 3] * 3, 1.0], dtype=torch.float64) * 11 / 7
    assert torch.allclose(found.log_weights.exp(), expected)


def test_rounding_of_equal_weights_chooses_no_copy() -> None:
    """Red where a seeded text changes with the batch that its weights were computed in."""
    tails = [[1, 2], [1, 3], [4, 2], [1, 4]]
    equal = of_group(tails, [-0.2] * 4, 1, [0.0])
    for index in range(4):
        rounded = [-0.2 + 1e-6 * (place == index) for place in range(4)]
        assert of_group(tails, rounded, 1, [0.0]).ancestors.tolist() == equal.ancestors.tolist()
        found = of_group(tails, rounded, 1, [0.9], heaviest=True)
        assert found.ancestors.tolist() == equal.ancestors.tolist()


def test_a_tail_that_has_ended_is_shared_by_its_own_kind_alone() -> None:
    """A shorter text is no beginning of a longer one: it is over."""
    for uniform, ancestors in ((0.1, [0, 0, 2]), (0.5, [1, 1, 1])):
        found = of_group([[1], [1, 2, 3], [1]], [0.0] * 3, 2, [uniform])
        assert found.ancestors.tolist() == [ancestors]


def test_whatever_the_uniform_the_dead_and_the_absent_are_not_drawn() -> None:
    """Nor any but the heaviest where that is asked for."""
    uniforms = [0.0, 0.5, math.nextafter(1.0, 0.0)]
    present = [True, True, False, True]
    found = of_group([[1], [2], [3]], [-1.0, 3.0, -INF], 1, uniforms, heaviest=True)
    assert found.ancestors.tolist() == [[1, 1, 1]] * 3
    found = of_group([[1], [2], [], [3]], [-INF, 0.0, -INF, -INF], 1, uniforms, present=present)
    assert found.ancestors.tolist() == [[1, 1, 2, 1]] * 3
    assert (found.log_weights[:, 2] == -INF).all()


def test_a_group_whose_particles_have_all_died_is_left_dead() -> None:
    found = of_group([[1], [2]], [-INF, -INF], 1, [0.3])
    assert found.log_weights.tolist() == [[-INF, -INF]]
    assert found.log_mean.tolist() == [-INF]


def test_nodes_of_one_text_count_once() -> None:
    """Red where chains that have parted are one again by a later token, or ended rows count."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 3, (200, 5, 4), generator=generator)
    before = torch.randint(0, 2, (200, 5), generator=generator)
    goes_on = (tokens < 2).cumprod(2).bool()  # behind a 2 no row is read
    live = torch.cat([torch.ones_like(before, dtype=torch.bool).unsqueeze(2), goes_on], dim=2)
    found = count_nodes(tokens, live, before.unsqueeze(2) == before.unsqueeze(1))
    texts = torch.cat([before.unsqueeze(2), tokens], dim=2).tolist()
    for group, chains in enumerate(texts):
        rows = zip(chains, live[group].sum(1).tolist(), strict=True)
        distinct = {tuple(chain[: row + 1]) for chain, count in rows for row in range(count)}
        assert found[group] == len(distinct)
