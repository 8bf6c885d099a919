"""Estimate the costs of rounds that were not measured, from those that were.

Without SGLang. Passes over as many rows take as long, whichever requests have them, and a further
drafted token costs what the one before did.
"""

from collections.abc import Iterable, Mapping

from sglang_smc.options.policy import Curve, RoundCosts
from sglang_smc.options.request import OFF, Budget

Nodes = tuple[tuple[float, Curve], ...]
_SIZES = (1.0, 2.0, 4.0, 16.0)
_LINEAR = Curve(((1.0, 1.0), (2.0, 2.0)))


def completed(found: RoundCosts, every: Iterable[Budget]) -> RoundCosts:
    """Return the costs of all budgets, by those of OFF and, for each N, of the least and most K.

    Of these the ones of OFF and of N = K = 1 are there.
    """
    wanted = list(every)
    most = max(budget.num_steps for budget in wanted)
    rounds = {OFF: _longer(found.rounds[OFF], _LINEAR)}
    for steps in sorted({1, most}):
        smaller = OFF if steps == 1 else Budget(1, 1)
        # At worst passes of all columns one after another.
        factor = (steps + 1) / (smaller.num_steps + 1)
        for budget in sorted(of for of in wanted if of.num_steps == steps):  # N ascending
            times = budget.num_particles / smaller.num_particles
            own = found.rounds.get(budget, Curve(()))
            rounds[budget] = _longer(own, rounds[smaller], times, factor)
            smaller = budget
            factor = 1.0
    # Time for few of a tree's sizes is no time for many requests: those grow as other trees' do.
    nodes = {
        of: tuple((count, _longer(curve, rounds[of])) for count, curve in curves)
        for of, curves in found.nodes.items()
    }
    for budget in wanted:
        if budget not in rounds:
            low, high = (Budget(budget.num_particles, steps) for steps in (1, most))
            share = (budget.num_steps - 1) / (most - 1)
            rounds[budget] = _between(rounds[low], rounds[high], share)
            between = _nodes_between(nodes.get(low, ()), nodes.get(high, ()), share)
            nodes |= {budget: between} if between else {}
    reading = _reading(found.reading, wanted, most)
    return RoundCosts({of: rounds[of] for of in wanted}, reading, nodes)


def _reading(
    found: Mapping[Budget, float], wanted: list[Budget], most: int
) -> Mapping[Budget, float]:
    if not found:
        return {}
    least = found[OFF]
    step = (found[Budget(1, most)] - least) / most
    return {of: least + of.num_steps * step for of in wanted}


def _longer(own: Curve, like: Curve, times: float = 1.0, factor: float = 1.0) -> Curve:
    """Return a curve that goes on as another does, where it does not rise itself.

    A curve of one point does not, nor one whose smaller size took as long, by noise.

    Args:
        own: with points or without.
        like: of rounds of fewer rows a request.
        times: rows a request, over those of ``like``.
        factor: seconds over those of ``like`` at as many rows, where ``own`` has none.
    """
    if len(own.points) > 1 and own.points[-1][1] > own.points[-2][1]:
        return own
    last = 0.0
    for size, seconds in own.points:
        last = size
        factor = seconds / like.at(times * size)
    more = ((size, factor * like.at(times * size)) for size in _SIZES if size > last)
    return Curve.of([*own.points, *more])


def _between(low: Curve, high: Curve, share: float) -> Curve:
    sizes = sorted({size for size, _ in (*low.points, *high.points)})
    return Curve.of((size, _mean(low.at(size), high.at(size), share)) for size in sizes)


def _nodes_between(low: Nodes, high: Nodes, share: float) -> Nodes:
    """Return curves by nodes, of trees that are branched alike; none where one was not measured."""
    if len(low) != len(high):
        return ()
    return tuple(
        (_mean(few, many, share), _between(one, other, share))
        for (few, one), (many, other) in zip(low, high, strict=True)
    )


def _mean(low: float, high: float, share: float) -> float:
    return low + share * (high - low)
