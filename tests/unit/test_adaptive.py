"""Which budget is chosen at which load, for machines of known costs."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.options.budget import OFF, Budget, budgets
from sglang_smc.options.policy import COSTS_ENV, Costs, Curve, Kept, Policy, RoundCosts

TOP = Budget(8, 8)
PATIENT = 8  # rounds for which a budget stays at least
BATCHES = [1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64, 100, 128, 256, 512]


def roofline(free: int, pass_seconds: float = 0.01, draft: float = 0.1) -> Costs:
    """Passes of up to ``free`` tokens are bound by memory; beyond that, time follows tokens."""
    sizes = (1, free, 2 * free, 64 * free)
    points = [(size, pass_seconds * max(1, size / free)) for size in sizes]
    return Costs(Curve.of((n, draft * s) for n, s in points), Curve.of(points))


def stairs(free: int) -> Costs:
    """Beyond ``free`` tokens a pass takes longer, but not the longer the more there are."""
    curve = Curve(((free, 0.01), (free + 1, 0.03), (1000 * free, 0.03)))
    return Costs(curve, curve)


def rounds(policy: Policy, batch_size: int, number: int, kept: float | None = None) -> list[Budget]:
    """The budgets in force in so many rounds, of which each keeps that share of its drafts."""
    seen = []
    for _ in range(number):
        seen.append(policy.budget)
        if kept is not None:
            for _ in range(batch_size):
                policy.learn(policy.budget, round(kept * policy.budget.num_steps))
            policy.end_round()
        policy.choose(batch_size, TOP)
    return seen


def test_budgets_halve_both_and_ends_without_drafts() -> None:
    assert budgets(Budget(6, 2)) == (*((n, k) for n in (6, 3, 1) for k in (2, 1)), OFF)
    assert budgets(Budget(1, 1)) == ((1, 1), OFF)


def test_memory_bound_passes_are_free_for_all_particles_and_steps() -> None:
    policy = Policy(TOP, roofline(free=4096, draft=0.01))
    assert policy.best(1, TOP) == TOP
    assert policy.best(32, TOP) == TOP


def test_compute_bound_passes_pay_for_every_token() -> None:
    """Past the ridge speculation only adds work, and the target decodes alone."""
    policy = Policy(TOP, roofline(free=256))
    assert policy.best(1, TOP) == TOP
    assert policy.best(512, TOP) == OFF
    assert 0 < policy.best(100, TOP).num_particles * policy.best(100, TOP).num_steps < 16


def test_of_equally_fast_budgets_the_most_particles_are_kept() -> None:
    policy = Policy(TOP, roofline(free=100_000))
    assert policy.best(16, TOP).num_particles == 8, "they cost nothing"


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.one_of(
        st.builds(roofline, st.integers(1, 2000), draft=st.floats(0.001, 2.0)),
        st.builds(stairs, st.integers(1, 2000)),
    ),
    st.lists(st.floats(0, 1), min_size=2, max_size=2),
    st.sampled_from([Budget(8, 8), Budget(5, 3), Budget(1, 4), Budget(16, 1)]),
)
def test_more_requests_never_get_more_work(costs: Costs, kept: list[float], widest: Budget) -> None:
    """Though it may pay: passes of some sizes cost what larger ones do."""
    policy = Policy(Budget(16, 8), costs)
    for budget, share in zip((Budget(8, 8), Budget(1, 8)), kept, strict=True):
        policy.learn(budget, round(8 * share))
    chosen = [policy.best(size, widest).within(widest) for size in BATCHES]
    work = [budget.num_particles * budget.num_steps for budget in chosen]
    assert all(later <= earlier for earlier, later in itertools.pairwise(work))


def test_drafts_that_are_not_kept_are_not_made() -> None:
    good, bad = (Policy(TOP, roofline(free=4096, draft=0.3)) for _ in range(2))
    rounds(good, 4, 60, kept=1.0)
    rounds(bad, 4, 60, kept=0.0)
    assert good.budget == TOP
    assert bad.budget.num_steps <= 1


def test_who_does_not_speculate_forgets_why_and_tries_again() -> None:
    """Where a second token costs something: else one draft costs what reading along does."""
    policy = Policy(TOP, roofline(free=256, draft=0.3))
    assert policy.best(180, TOP) == Budget(1, 1)
    seen = rounds(policy, 180, 60, kept=0.0)
    assert seen[-1] == OFF
    later = rounds(policy, 180, 1000, kept=0.0)
    assert any(budget.num_steps for budget in later)
    assert later.count(OFF) > 700, "and finds again that it does not pay"


def test_a_budget_is_left_for_a_clear_gain_only_and_not_at_once() -> None:
    policy = Policy(TOP, roofline(free=256))
    seen = rounds(policy, 512, 40)
    assert seen[:PATIENT] == [TOP] * PATIENT and seen[-1] == OFF
    assert len(list(itertools.groupby(seen))) == 2, "one change, and it stays"


def test_loads_that_alternate_near_a_boundary_do_not_flap() -> None:
    policy = Policy(TOP, roofline(free=256))
    boundary = next(n for n in range(2, 512) if policy.best(n, TOP) != policy.best(1, TOP))
    seen = [rounds(policy, boundary - index % 2, PATIENT)[-1] for index in range(100)]
    assert len(list(itertools.groupby(seen))) <= 3


def test_particles_come_back_when_the_load_has_gone() -> None:
    policy = Policy(TOP, roofline(free=256))
    rounds(policy, 512, 20)
    assert policy.budget == OFF
    rounds(policy, 1, 20)
    assert policy.budget == TOP


def test_a_budget_without_memory_is_not_taken() -> None:
    policy = Policy(TOP, roofline(free=256))
    rounds(policy, 512, 20)
    for _ in range(20):
        policy.choose(1, TOP, fits=lambda budget: budget == OFF)
    assert policy.budget == OFF


def test_sizes_that_nobody_asked_for_cost_nothing() -> None:
    """Requests of two particles fit where those of eight would not."""
    policy = Policy(TOP, roofline(free=256))
    assert policy.best(16, TOP).num_particles < 8
    assert policy.best(16, Budget(2, 4)).num_steps >= 4


def test_a_round_costs_its_passes() -> None:
    costs = Costs(Curve.of([(1, 1.0), (101, 101.0)]), Curve.of([(1, 10.0)]), overhead=0.5)
    assert costs.round(3, Budget(2, 4), TOP) == 12 + 3 * 6 + 10 + 0.5
    assert costs.round(3, TOP, Budget(2, 4)) == costs.round(3, Budget(2, 4), TOP)
    assert costs.round(3, OFF, TOP) == 6 + 10 + 0.5, "the draft reads along"


def test_a_recorded_round_costs_what_its_budget_does_whoever_plays() -> None:
    costs = RoundCosts({TOP: Curve(((1, 2.0), (3, 4.0))), OFF: Curve(((1, 1.0),))})
    assert costs.round(2, TOP, Budget(1, 1)) == 3.0
    assert costs.round(2, OFF, TOP) == 1.0


def test_a_curve_never_falls_and_goes_on_beyond_its_last_point() -> None:
    curve = Curve.of([(1, 2.0), (2, 1.0), (4, 4.0), (8, 8.0)])
    assert [curve.at(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [1, 1, 2.5, 4, 6, 8, 16]


def test_what_is_kept_is_learned_and_carried_over_to_other_steps() -> None:
    kept = Kept()
    assert kept.tokens(Budget(4, 2)) == pytest.approx(1 + 0.8 + 0.64), "until something is known"
    for _ in range(400):
        kept.add(Budget(4, 4), 1)  # 1 of 2 tokens tried
    assert kept.tokens(Budget(4, 8)) == pytest.approx(2.0, abs=0.05)
    assert kept.tokens(Budget(8, 1)) == pytest.approx(1.5, abs=0.02), "as its like"
    assert kept.tokens(Budget(1, 1)) == pytest.approx(1.8), "which is verified, and unlike"


def test_costs_are_read_from_json() -> None:
    text = json.dumps({"draft": [[1, 0.1]], "target": [[4, 0.3], [1, 0.2]]})
    assert Costs.parse(text) == Costs(Curve(((1, 0.1),)), Curve(((1, 0.2), (4, 0.3))), 0.0)


@pytest.mark.parametrize(
    "text", ["", "7", '{"draft": [[1, 1]]}', '{"draft": [], "target": [[1, 1]]}', '{"x": 1}']
)
def test_bad_costs_name_the_variable_and_its_form(text: str) -> None:
    with pytest.raises(ValueError, match=f"{COSTS_ENV} is .*allowed: .*draft.*unset it"):
        Costs.parse(text)
