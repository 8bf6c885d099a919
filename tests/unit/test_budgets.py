"""Which N and K are chosen at which load, and what a request runs with on them."""

import itertools
import json
import math
import random
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from table_entries import entry

from sglang_smc.ops import TORCH
from sglang_smc.options.policy import (
    COSTS_ENV,
    PRIOR_INFORMATION,
    SCALE,
    WINDOW_INFORMATION,
    Acceptance,
    Branching,
    Costs,
    Curve,
    Dial,
    Policy,
    RoundCosts,
    distinct_nodes,
)
from sglang_smc.options.request import (
    OFF,
    Budget,
    RequestConfig,
    apply_budget,
    budgets,
    request_config,
    unmeasured,
)
from sglang_smc.options.server import SMCConfig
from sglang_smc.options.unmeasured import completed
from sglang_smc.round import costs
from sglang_smc.round.batch import RoundInputs, RoundShape, Tables
from sglang_smc.round.costs import Allowance, costs_of_launched
from sglang_smc.state.request import RequestState
from sglang_smc.state.settings import RequestTable

TOP = Budget(8, 8)
PATIENT = 8  # rounds for which a budget stays at least
ONE = Curve(((1, 1.0),))
BATCHES = [1, 2, 3, 4, 6, 8, 11, 16, 24, 32, 48, 64, 100, 128, 256, 512]


def roofline(free: int, draft: float = 0.1) -> Costs:
    """Passes of up to ``free`` tokens are bound by memory; beyond that, time follows tokens."""
    points = [(size, 0.01 * max(1, size / free)) for size in (1, free, 2 * free, 64 * free)]
    return Costs(Curve.of((n, draft * s) for n, s in points), Curve.of(points))


def stairs(free: int) -> Costs:
    """Beyond ``free`` tokens a pass takes longer, but not the longer the more there are."""
    curve = Curve(((free, 0.01), (free + 1, 0.03), (1000 * free, 0.03)))
    return Costs(curve, curve)


def rounds(policy: Policy, batch_size: int, number: int) -> list[Budget]:
    """The budgets in force in so many rounds."""
    seen = []
    for _ in range(number):
        seen.append(policy.budget)
        policy.choose(batch_size, TOP)
    return seen


def test_budgets_halve_both_and_ends_without_drafts() -> None:
    assert budgets(Budget(6, 2)) == (*((n, k) for n in (6, 3, 1) for k in (2, 1)), OFF)
    assert budgets(Budget(1, 1)) == ((1, 1), OFF)


@pytest.mark.parametrize(
    ("free", "draft", "batch_size", "widest", "best"),
    [
        # Passes that memory bounds are free for all particles and steps.
        (4096, 0.01, 32, TOP, TOP),
        (100_000, 0.1, 16, TOP, TOP),
        # Past the ridge each token is paid for, and in the end the target decodes alone.
        (256, 0.1, 1, TOP, TOP),
        (256, 0.1, 100, TOP, Budget(1, 1)),
        (256, 0.1, 512, TOP, OFF),
        # Requests of two particles fit where those of eight would not.
        (256, 0.1, 16, TOP, Budget(2, 4)),
        (256, 0.1, 16, Budget(2, 4), TOP),
    ],
)
def test_the_best_budget(
    free: int, draft: float, batch_size: int, widest: Budget, best: Budget
) -> None:
    assert Policy(TOP, roofline(free=free, draft=draft)).best(batch_size, widest) == best


@settings(max_examples=15)
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


def matches(row: float) -> Costs:
    """N-gram matches on a CPU: each further token of a pass adds that share; a draft is free."""
    return Costs(Curve(((1, 1e-9),)), Curve(((1, 1.0), (1001, 1.0 + 1000 * row))))


def race(
    policy: Policy, batch_size: int, chance: float, number: int, num_unread: int = 0
) -> tuple[float, list[Budget]]:
    """Rounds that keep each token with that chance: their speed over plain decoding's, and sizes.

    As under the overlap schedule, results of a round come after the choice of the next one.
    """
    rng = random.Random(0)
    late = []
    seen = []
    tokens = seconds = 0.0
    for _ in range(number):
        now = policy.budget
        draws = [[rng.random() < chance for _ in range(now.num_steps)] for _ in range(batch_size)]
        kept = [[*drawn, False].index(False) for drawn in draws]
        tokens = tokens + sum(kept) + batch_size
        seconds = seconds + cost(policy, batch_size, now)
        policy.choose(batch_size, TOP, num_unread=num_unread)
        for budget, num_kept in late:
            policy.learn(budget, num_kept)
        policy.end_round()
        late = [(now, num_kept) for num_kept in kept]
        seen.append(now)
    return tokens / seconds * cost(policy, batch_size, OFF) / batch_size, seen


def cost(policy: Policy, batch_size: int, budget: Budget) -> float:
    return policy.costs.round(batch_size, budget, TOP)


@pytest.mark.parametrize("row", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_useless_drafts_cost_ever_less_and_are_tried_again(batch_size: int, row: float) -> None:
    """Though more particles do not help here, which the policy expects."""
    policy = Policy(TOP, matches(row))
    speed, _ = race(policy, batch_size, 0.04, 400)
    assert speed > 0.95, "while nothing is known"
    speed, seen = race(policy, batch_size, 0.04, 12_000)
    assert 0.993 < speed < 1.0, "trials are rarer once some have lost"
    tried = max({*seen} - {OFF}, key=partial(cost, policy, batch_size))
    assert tried.num_steps == 1 and seen.count(OFF) > 7500
    more = cost(policy, batch_size, tried) / cost(policy, batch_size, OFF) - 1
    _, seen = race(policy, batch_size, 0.95, int(8 * PATIENT * more / 0.01) + 13 * PATIENT)
    assert seen[-1].num_steps >= 4 or batch_size * row > 0.5, "the text is predictable again"
    assert seen[-1] != OFF


def test_a_guess_alone_does_not_keep_drafts_off() -> None:
    """A round of one draft token never pays here, and of eight does, if all are kept."""
    costs = RoundCosts({of: Curve(((1, 3.0 + 0.3 * of[1]),)) for of in budgets(Budget(1, 8))[:-1]})
    costs.rounds[OFF] = Curve(((1, 1.0),))
    policy = Policy(Budget(1, 8), costs)
    assert policy.budget == OFF
    _, seen = race(policy, 1, 0.99, 5 * PATIENT)
    assert seen[-1] == Budget(1, 8)


def long_drafts_alone_pay() -> Policy:
    """A policy of a block head that was measured on a CPU: one drafted token costs two rounds."""
    seconds = {Budget(1, 8): 3.5, Budget(1, 4): 2.8, Budget(1, 2): 2.4, Budget(1, 1): 2.2, OFF: 1.0}
    return Policy(Budget(1, 8), RoundCosts({of: Curve(((1, t),)) for of, t in seconds.items()}))


def test_a_warm_up_does_not_turn_drafts_off() -> None:
    """Red where the first few texts are judged, which a server asks itself."""
    policy = long_drafts_alone_pay()
    assert policy.budget == Budget(1, 8)
    race(policy, 1, 0.0, PATIENT + 1)
    _, seen = race(policy, 1, 0.9, 5 * PATIENT)
    assert set(seen) == {Budget(1, 8)}


def test_trials_are_of_drafts_that_can_pay() -> None:
    """Red where the cheapest are tried: even a token that is kept costs more than it yields."""
    policy = long_drafts_alone_pay()
    speed, seen = race(policy, 1, 0.1, 12_000)
    assert set(seen) == {Budget(1, 8), OFF} and 0.98 < speed < 1.0
    _, seen = race(policy, 1, 0.95, int(8 * PATIENT * 2.5 / 0.01) + PATIENT)
    assert seen[-1] == Budget(1, 8)
    hopeless = Policy(Budget(1, 1), RoundCosts({Budget(1, 1): Curve(((1, 2.1),)), OFF: ONE}))
    _, seen = race(hopeless, 1, 0.99, 100)
    assert set(seen) == {OFF}


def test_trials_save_for_the_texts_that_a_draft_has_yet_to_read() -> None:
    """Red where a trial of long texts costs more than its share."""
    waits = []
    for num_unread in (0, 12_800):
        policy = long_drafts_alone_pay()
        race(policy, 1, 0.1, 5 * PATIENT)
        assert policy.budget == OFF
        _, seen = race(policy, 1, 0.1, 20_000, num_unread)
        waits.append(next(index for index, budget in enumerate(seen) if budget != OFF))
    # Passes over 64 tokens cost 1.3 / 7 rounds; 200 of them come on top of 8 rounds, each of 2.5.
    assert waits[1] / waits[0] == pytest.approx(1 + 200 * 1.3 / 7 / 8 / 2.5, rel=0.05)


def test_no_particles_are_taken_that_plain_decoding_beats() -> None:
    """Though near ties go to the most particles."""
    seconds = {Budget(2, 1): 1.85, Budget(1, 1): 3.0, OFF: 1.0}  # for 1.84, 1.8 and 1 tokens
    costs = RoundCosts({of: Curve(((1, each),)) for of, each in seconds.items()})
    assert Policy(Budget(2, 1), costs).best(1, TOP) == OFF


def test_a_policy_says_why() -> None:
    """By what is expected now: 1.8 tokens in 1.1 times the time, and then 1."""
    policy = Policy(Budget(1, 1), matches(0.1))
    policy.choose(1, TOP)
    assert policy.reason.startswith("rows a request 2, running 1: N = 1, K = 1 decodes 1.64 times")
    race(policy, 4, 0.0, 200)
    said = r"rows a request [12], running 4: N = 1, K = 1 (would )?decodes? 0\.[67]"
    assert re.match(said, policy.reason)


def test_a_budget_is_left_for_a_clear_gain_only_and_not_at_once() -> None:
    policy = Policy(TOP, roofline(free=256))
    seen = rounds(policy, 64, PATIENT) + rounds(policy, 120, 40)
    assert seen[:2] == [TOP, Budget(1, 4)], "at once where the load has doubled"
    assert set(seen[1 : 2 * PATIENT]) == {Budget(1, 4)} and seen[-1] == Budget(1, 1)
    assert len(list(itertools.groupby(seen))) == 3, "one change for each, and it stays"


def test_loads_that_alternate_near_a_boundary_do_not_flap() -> None:
    policy = Policy(TOP, roofline(free=256))
    bests = itertools.pairwise((n, policy.best(n, TOP)) for n in range(5, 512))  # 4 to 5: 12 %
    boundary = next(n for (_, before), (n, best) in bests if best != before)
    seen = [rounds(policy, boundary - index % 2, PATIENT)[-1] for index in range(100)]
    assert len(list(itertools.groupby(seen))) <= 3


def test_particles_come_back_when_the_load_has_gone_and_there_is_memory() -> None:
    policy = Policy(TOP, roofline(free=256))
    policy.learn(Budget(1, 1), 1)
    rounds(policy, 512, 20)
    for _ in range(20):
        policy.choose(1, TOP, fits=lambda budget: budget == OFF)
    assert policy.budget == OFF
    rounds(policy, 1, 20)
    assert policy.budget == TOP


def test_a_round_costs_its_passes() -> None:
    """A measured round is whole, whoever plays."""
    curves = Curve.of([(1, 1.0), (101, 101.0)]), Curve.of([(1, 10.0)])
    costs = Costs(*curves, overhead=0.5)
    assert costs.round(3, Budget(2, 4), TOP) == 12 + 3 * 6 + 10 + 0.5
    assert costs.round(3, TOP, Budget(2, 4)) == costs.round(3, Budget(2, 4), TOP)
    assert costs.round(3, OFF, TOP) == 10 + 0.5, "the draft reads nothing"
    recorded = RoundCosts({TOP: Curve(((1, 2.0), (3, 4.0))), OFF: Curve(((1, 1.0),))})
    assert [recorded.round(2, of, Budget(1, 1)) for of in (TOP, OFF)] == [3.0, 1.0]


def test_a_curve_never_falls_and_goes_on_beyond_its_last_point() -> None:
    curve = Curve.of([(1, 2.0), (2, 1.0), (4, 4.0), (8, 8.0)])
    assert [curve.at(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [1, 1, 2.5, 4, 6, 8, 16]


def test_what_is_kept_is_learned_and_carried_over_to_other_steps() -> None:
    kept = Acceptance()
    assert kept.tokens(Budget(1, 2)) == pytest.approx(1 + 0.8 + 0.64), "until something is known"
    for _ in range(400):
        kept.add(Budget(4, 4), 1)  # 1 of 2 tokens tried
    assert kept.tokens(Budget(4, 8)) == pytest.approx(2.0, abs=0.05)
    chances = [kept.tokens(Budget(n, 1)) - 1 for n in (1, 2, 4, 8)]
    expected = [1 - 0.5 / 0.8**doublings for doublings in (2, 1, 0, -1)]
    assert chances == pytest.approx(expected, abs=0.03), "other N are guessed from it"
    for _ in range(400):
        kept.add(Budget(1, 4), 4)
    assert kept.tokens(Budget(1, 1)) == pytest.approx(2.0, abs=0.02), "until they are counted"


def test_nodes_are_learned_and_carried_over_to_other_sizes() -> None:
    """The prior's are those of real text, within what a chance of its own for each N would give."""
    nodes = Branching()
    real = {(2, 8): 13.5, (4, 8): 20, (8, 8): 34, (4, 17): 52, (8, 17): 93, (8, 4): 12.8}
    for of, counted in real.items():
        assert nodes.nodes(Budget(*of)) == pytest.approx(counted, rel=0.3)
    assert nodes.nodes(Budget(1, 8)) == 9
    for _ in range(300):
        nodes.add(Budget(4, 4), 5 + 3 * 2)
        nodes.fade()
    assert nodes.nodes(Budget(4, 4)) == pytest.approx(11, abs=0.2)
    agree = next(s / 1000 for s in range(1000) if distinct_nodes(Budget(4, 4), s / 1000) < 11)
    assert nodes.nodes(Budget(8, 2)) == pytest.approx(distinct_nodes(Budget(8, 2), agree), rel=0.05)


def test_particles_that_differ_cost_more_where_nodes_do() -> None:
    """The same rounds keep the same tokens; the trees of one have all nodes apart."""
    curve = Curve(((1, 1.0),))
    dear = Curve(((1, 3.0),))
    rounds = {of: dear if of.num_particles > 1 else curve for of in budgets(Budget(8, 4))}
    few = {
        Budget(n, k): ((k + 1.0, curve), (n * k + 1.0, dear))
        for n, k in map(tuple, rounds)
        if n > 1
    }
    best = []
    for num_nodes in (5, 33):
        policy = Policy(Budget(8, 4), RoundCosts(rounds, nodes=few))
        for _ in range(100):
            policy.learn(Budget(8, 4), 3, num_nodes)
            policy.end_round()
        best.append(policy.best(1, Budget(8, 4)).num_particles)
    assert best == [8, 1]


def test_rounds_that_fit_are_measured_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests with last tokens and slots of their own, which leave the tables as they were."""
    played: list[tuple[Budget, int]] = []
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    clock.thread_time = clock.perf_counter
    monkeypatch.setattr(costs, "time", clock)
    config = SMCConfig(mode="exact")
    table = torch.zeros(21, 600, dtype=torch.int32)
    sizes = {"num_slots": 6000, "vocab_size": 100, "device": "cpu"}
    tables = Tables.of(config, TORCH, table, **sizes)

    def play(inputs: RoundInputs, shape: RoundShape) -> Any:
        budget = Budget(shape.num_particles, shape.num_steps)
        keys = int(inputs.committed[0])
        rows = inputs.rows
        if 0 not in rows:  # requests
            played.append((budget, len(rows)))
            arenas = table[rows, 1 : int(inputs.known[0, 0])]
            assert arenas.unique().numel() == arenas.numel() and (arenas > 0).all()
            _, ended, _ = tables.particles.gather_single(rows)
            _, _, last_two, _ = tables.particles.gather(rows, budget.num_particles, 1)
            assert not ended.any() and len(last_two[:, 0, 1].unique()) == len(rows)
            draft = tables.requests.gather(rows).draft_temperature
            distinct = 1 if (draft < 1).all() else budget.num_particles
            clock.now += 0.02 if budget == OFF else 0.001 * len(rows) * distinct  # OFF is disturbed
            nodes = torch.full((len(rows),), 1 + distinct * budget.num_steps)
            return SimpleNamespace(num_nodes=nodes if budget.num_particles > 1 else None)
        slots = table[rows, :keys]
        assert slots.unique().numel() == slots.numel() or keys == 1, "no two requests share a slot"
        tokens = slots.numel() if keys > 1 else 0
        clock.now += 0.001 * len(rows) + 1e-6 * (shape.num_steps + 1) * tokens

    found = costs_of_launched(play, config, 20, tables, Allowance())
    points = {budget: [size for size, _ in curve.points] for budget, curve in found.rounds.items()}
    assert points[Budget(8, 8)] == [1, 4, 7] and points[OFF] == [1, 4, 16, 20]
    measured = [of for of in found.nodes if of.num_steps in (1, 8)]
    assert len(played) >= 8 * sum(len(points[of]) for of in measured)
    assert found.round(16, OFF, TOP) == pytest.approx(0.016)
    assert found.reading == pytest.approx({of: 1e-6 * (of.num_steps + 1) for of in found.rounds})
    assert not table.any() and tables.particles.gather_single(torch.arange(21))[1].all()
    assert set(found.nodes) == {of for of in found.rounds if of.num_particles > 1}
    nodes = [count for count, _ in found.nodes[Budget(8, 8)]]
    assert nodes == [9.0, 65.0], "of equal and of distinct chains"
    by_nodes = [found.round(4, Budget(8, 8), TOP, num_nodes=count) for count in (9, 37, 65)]
    assert by_nodes == pytest.approx([0.004, 0.018, 0.032])
    assert found.round(4, Budget(8, 8), TOP) == pytest.approx(0.032), (
        "the most, where none is known"
    )


def test_measuring_ends_in_time_and_leaves_no_round_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a large model: one of 8 x 16 would take 14 s, and all of them an hour."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    clock.thread_time = clock.perf_counter
    monkeypatch.setattr(costs, "time", clock)
    config = SMCConfig(mode="exact", num_particles=8, num_steps=16)
    table = torch.zeros(33, 600, dtype=torch.int32)
    sizes = {"num_slots": 6000, "vocab_size": 100, "device": "cpu"}
    tables = Tables.of(config, TORCH, table, **sizes)

    def seconds(budget: Budget, size: int) -> float:
        return 0.1 * size * budget.num_particles * (budget.num_steps + 1)

    def play(inputs: RoundInputs, shape: RoundShape) -> Any:
        budget = Budget(shape.num_particles, shape.num_steps)
        clock.now += seconds(budget, len(inputs.rows))
        return SimpleNamespace(num_nodes=None)

    found = costs_of_launched(play, config, 32, tables, Allowance(4.0))
    assert clock.now < 5
    top = Budget(8, 16)
    assert set(found.rounds) == set(budgets(top))
    for of in budgets(top):
        for size in (1, 8, 32):
            assert found.round(size, of, top) == pytest.approx(seconds(of, size), rel=0.01)


def test_rounds_that_were_not_measured_cost_what_as_many_rows_do() -> None:
    top = Budget(4, 4)

    def seconds(budget: Budget, size: int) -> float:
        rows = size * budget.num_particles
        return 1.0 + 0.5 * budget.num_steps * rows + 0.25 * rows * (budget.num_steps + 1)

    ends = [OFF, *(Budget(n, k) for n in (1, 2, 4) for k in (1, 4))]
    rounds = {of: Curve(tuple((size, seconds(of, size)) for size in (1, 4, 16))) for of in ends}
    del rounds[Budget(4, 4)]
    rounds[Budget(2, 4)] = Curve(rounds[Budget(2, 4)].points[:1])
    nodes = {Budget(2, k): ((k + 1.0, rounds[Budget(2, k)]),) for k in (1, 4)}
    reading = {of: 1.0 + of.num_steps for of in rounds}
    found = completed(RoundCosts(rounds, reading, nodes), budgets(top))
    for of in budgets(top):
        for size in (1, 8):
            assert found.round(size, of, top) == pytest.approx(seconds(of, size), rel=0.01)
    assert found.reading == {of: 1.0 + of.num_steps for of in budgets(top)}
    ((count, _),) = found.nodes[Budget(2, 2)]
    assert count == pytest.approx(3.0)
    # Red where trees that were measured of one request take as long of any number.
    for of in (Budget(2, 2), Budget(2, 4)):
        alike = found.round(8, of, top, num_nodes=of.num_steps + 1.0)
        assert alike == pytest.approx(seconds(of, 8), rel=0.01)
    # And where noise has few requests take as long as more do.
    noisy = Budget(4, 1)
    rounds[noisy] = Curve(tuple((size, seconds(noisy, 4)) for size in (1, 4)))
    found = completed(RoundCosts(rounds, reading, nodes), budgets(top))
    assert found.round(16, noisy, top) == pytest.approx(seconds(noisy, 16), rel=0.01)


def test_sizes_stay_where_costs_are_not_known() -> None:
    policy = Policy(Budget(8, 16), None, fixed=unmeasured(Budget(8, 16)))
    assert policy.budget == Budget(8, 8), "of a server that does not adapt"
    for size in (1, 64):
        policy.choose(size, Budget(8, 16))
        policy.learn(Budget(8, 8), 0)
        policy.end_round()
        assert policy.budget == Budget(8, 8) and not policy.pays_apart(1, size, OFF)
    assert unmeasured(Budget(1, 4)) == Budget(1, 4)


def test_large_requests_get_a_round_of_their_own_where_that_is_faster() -> None:
    rounds = {of: Curve(((1, 1.0), (2, 2.0))) for of in budgets(Budget(2, 2))}
    rounds |= {OFF: Curve(((1, 0.5), (64, 0.5)))}
    policy = Policy(Budget(2, 2), RoundCosts(rounds))
    assert policy.pays_apart(1, 8, OFF) and not policy.pays_apart(8, 0, OFF)
    assert not policy.pays_apart(1, 8, Budget(2, 1)), "its rounds cost as much for each request"


def test_trials_are_judged_by_rounds_on_their_budget_alone() -> None:
    """Red where requests that keep N and K decide whether a cheap trial pays."""
    rounds = {Budget(2, 2): 8.0, Budget(2, 1): 6.0, Budget(1, 2): 4.0, Budget(1, 1): 1.85, OFF: 1.0}
    costs_of_rounds = RoundCosts({of: Curve(((1, cost),)) for of, cost in rounds.items()})
    policy = Policy(Budget(2, 2), costs_of_rounds)
    policy.choose(1, Budget(2, 2))
    assert policy.budget == Budget(1, 1), "the first trial"
    for _ in range(3 * PATIENT):
        policy.learn(Budget(2, 2), 2)
        policy.learn(Budget(1, 1), 0)
        policy.end_round()
        policy.choose(1, Budget(2, 2))
    assert policy.budget == OFF


def test_drafts_pay_again_where_the_sequences_are_long() -> None:
    """A draft doubles a round; half of them are kept; reading takes no longer for it."""
    rounds = {Budget(1, 1): Curve(((1, 2.0),)), OFF: Curve(((1, 1.0),))}
    policy = Policy(Budget(1, 1), RoundCosts(rounds, dict.fromkeys(rounds, 0.01)))
    for _ in range(200):
        policy.learn(Budget(1, 1), 1)
        policy.learn(Budget(1, 1), 0)
        policy.end_round()
    for length, expected in ((0, OFF), (90, OFF), (500, Budget(1, 1)), (0, OFF)):
        for _ in range(16):
            policy.choose(4, Budget(1, 1), length=length)
        assert policy.budget == expected
    parts = Costs(Curve(((1, 1.0),)), Curve(((1, 1.0),)), reading=0.01)
    assert parts.round(2, OFF, TOP, 50) == parts.round(2, OFF, TOP) + 1.0


def test_costs_are_read_from_json() -> None:
    text = json.dumps({"draft": [[1, 0.1]], "target": [[4, 0.3], [1, 0.2]], "reading": 1e-6})
    assert Costs.parse(text) == Costs(Curve(((1, 0.1),)), Curve(((1, 0.2), (4, 0.3))), 0.0, 1e-6)


@pytest.mark.parametrize(
    "text", ["", "7", '{"draft": [[1, 1]]}', '{"draft": [], "target": [[1, 1]]}', '{"x": 1}']
)
def test_bad_costs_name_the_variable_and_its_form(text: str) -> None:
    with pytest.raises(ValueError, match=f"{COSTS_ENV} is .*allowed: .*draft.*unset it"):
        Costs.parse(text)


# --- What a request runs with

SERVER = SMCConfig(num_particles=8, num_steps=6, adaptive="on")
ASKED = [
    request_config(SERVER, {"smc": chosen})
    for chosen in (
        {},
        {"num_particles": 1},
        {"num_particles": 3, "num_steps": 2},
        {"mode": "exact"},
        {"mode": "exact", "draft_temperature": 0.2},
        {"mode": "auto", "num_particles": 2},
        {"mode": "auto", "num_particles": 1},
        {"power": 2.0},
    )
]
RUNGS = [None, Budget(8, 6), Budget(4, 3), Budget(2, 6), Budget(1, 3), OFF]


@pytest.mark.parametrize(
    ("asked", "budget", "num_particles", "num_steps", "mode"),
    [
        # A budget bounds, and never adds.
        (ASKED[2], Budget(8, 6), 3, 2, "smc"),
        (ASKED[2], Budget(2, 1), 2, 1, "smc"),
        # A request that loses all particles but one is verified; one that had one keeps its mode.
        *(
            (RequestConfig(num_particles=4, mode=mode), budget, 1, budget.num_steps, "exact")
            for mode in ("smc", "exact", "auto")
            for budget in (OFF, Budget(1, 4))
        ),
        (RequestConfig(num_particles=4, mode="auto"), Budget(2, 0), 2, 0, "auto"),
        (ASKED[1], OFF, 1, 0, "smc"),
        # A power of p cannot be verified, and keeps its particles.
        *((ASKED[-1], budget, 8, budget.num_steps, "smc") for budget in (OFF, Budget(1, 2))),
    ],
)
def test_what_a_request_runs_with(
    asked: RequestConfig, budget: Budget, num_particles: int, num_steps: int, mode: str
) -> None:
    found = apply_budget(replace(asked, adaptive="on"), budget)
    assert (found.num_particles, found.num_steps, found.mode) == (num_particles, num_steps, mode)


@pytest.mark.parametrize(
    ("own", "keeps"),
    [
        ({"mode": "exact", "adaptive": "auto"}, False),
        ({"mode": "exact", "adaptive": "auto", "seeded": True}, True),
        ({"mode": "smc", "adaptive": "auto"}, True),
        ({"mode": "smc", "adaptive": "on"}, False),
        ({"mode": "smc", "adaptive": "on", "seeded": True}, True),
        ({"mode": "auto", "adaptive": "on", "greedy": True}, False),
    ],
)
def test_whom_a_budget_bounds(own: dict[str, Any], keeps: bool) -> None:
    """Red where a seed's text, or mode smc's fidelity, would depend on the load unasked."""
    asked = RequestConfig(num_particles=4, num_steps=4, **own)
    assert asked.keeps_sizes is keeps
    assert (apply_budget(asked, OFF) == asked) is keeps


@pytest.mark.parametrize("budget", RUNGS)
def test_the_device_runs_with_what_the_host_has_bounded(budget: Budget | None) -> None:
    table = RequestTable(1 + len(ASKED), 4, "cpu")
    begun = [entry(row, config, temperature=0.3) for row, config in enumerate(ASKED, start=1)]
    table.write([start._replace(least_temperature=0.8) for start in begun])
    states = [RequestState.of(7, config) for config in ASKED]
    for state in states:
        state.step_to(budget)
    rows = torch.arange(1, 1 + len(ASKED))
    reqs = [SimpleNamespace(smc_state=state) for state in states]
    batch: Any = SimpleNamespace(reqs=reqs, req_pool_indices=rows, seq_lens=rows)
    inputs = RoundInputs.of(batch, "cpu")
    found = (as_asked := table.gather(rows)).bounded(*inputs.known[1:])
    expected = [apply_budget(config, budget) for config in ASKED]
    for name in ("num_particles", "num_steps", "weighs"):
        assert getattr(found, name).tolist() == [getattr(config, name) for config in expected]
    thresholds = [config.effective_evidence_threshold for config in expected]
    assert found.evidence_threshold.tolist() == thresholds
    least = [0.8 * (1 - 1 / of.num_particles) if of.is_exact else 0.0 for of in expected]
    drafts = [
        of.draft_temperature or max(0.3 / of.drafted_power, at)
        for of, at in zip(expected, least, strict=True)
    ]
    assert found.draft_temperature.tolist() == pytest.approx(drafts)
    assert budget or as_asked.draft_temperature.tolist() == pytest.approx(drafts)


# --- The dial: thresholds that follow the tilt that is asked for

INFORMATION = 3.0  # of an answer, as those of the shipped pair have


def answer(rng: random.Random, threshold: float, scale: float = 0.7) -> tuple[float, ...]:
    """Of a server whose tilt is ``scale / (1 + threshold)``: c, numerator, information."""
    noise = rng.gauss(0.0, math.sqrt(INFORMATION))
    return threshold, scale / (1.0 + threshold) * INFORMATION + noise, INFORMATION


@pytest.mark.parametrize(
    ("tilt", "scales"), [(0.05, [0.7]), (0.15, [0.7]), (0.4, [1.5, 0.7]), (0.7, [1.5, 0.7])]
)
def test_answers_come_to_have_the_tilt_that_is_asked_for(tilt: float, scales: list[float]) -> None:
    """To four standard errors of what is remembered: another scale of before is forgotten."""
    dial = Dial()
    rng = random.Random(0)
    for scale in scales:
        for _ in range(10_000):
            dial.learn(*answer(rng, dial.threshold(tilt), scale))
        gives = scale / (1.0 + dial.threshold(tilt))
        assert gives == pytest.approx(tilt, rel=4 / (scale * math.sqrt(WINDOW_INFORMATION)))


def test_answers_that_cannot_lean_teach_nothing() -> None:
    """By their noise alone a server of much exact traffic would walk away from what it knows."""
    dial = Dial()
    rng = random.Random(2)
    for _ in range(5_000):
        dial.learn(*answer(rng, math.inf))
    state = RequestState.of(0, RequestConfig(mode="auto"))
    state.begin(Budget(1, 4), [])
    state.step_to(None)
    assert state.answer().evidence_threshold == math.inf, "a round was verified"
    assert dial.scale == SCALE
    for _ in range(5_000):
        dial.learn(*answer(rng, 1e6, SCALE))
    assert dial.scale == pytest.approx(SCALE, abs=1e-3)


def test_the_first_guess_weighs_what_it_says_and_no_scale_is_below_zero() -> None:
    """No tilt is exact, whatever is known; more than the scale keeps whole blocks."""
    dial = Dial()
    assert [dial.threshold(tilt) for tilt in (0.0, SCALE, 9.0)] == [math.inf, 0.0, 0.0]
    assert dial.threshold(SCALE / 3) == pytest.approx(2.0)
    dial.learn(0.0, 2 * SCALE * PRIOR_INFORMATION, PRIOR_INFORMATION)
    assert dial.scale == pytest.approx(1.5 * SCALE)
    dial.learn(0.0, -1000.0, 500.0)
    assert dial.scale == dial.threshold(0.1) == 0.0
    assert dial.threshold(0.0) == math.inf


def threshold(server: SMCConfig | None = None, **chosen: object) -> float:
    asked = request_config(server or SMCConfig(), {"smc": chosen})
    return Dial().with_threshold(asked).effective_evidence_threshold


def test_a_request_keeps_the_threshold_that_its_tilt_came_to() -> None:
    assert threshold(tilt=SCALE / 3) == pytest.approx(2.0)
    assert threshold(tilt=0) == math.inf
    assert threshold(mode="auto") == 2.0
    assert threshold(SMCConfig(mode="auto", tilt=SCALE / 5)) == pytest.approx(4.0)
    assert threshold(SMCConfig(mode="auto", tilt=0.1), evidence_threshold=0.5) == 0.5
