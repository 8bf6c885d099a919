"""What a request runs with on a budget, on the host and on the device alike."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from table_entries import entry

from sglang_smc.memory import arena
from sglang_smc.options.budget import OFF, Budget, apply_budget, union
from sglang_smc.options.request import RequestConfig, request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.requests.state import RequestState
from sglang_smc.round.batch import RoundInputs
from sglang_smc.state.settings import RequestTable

SERVER = SMCConfig(num_particles=8, num_steps=6)
ASKED = [
    request_config(SERVER, {"smc": chosen})
    for chosen in (
        {},
        {"num_particles": 1},
        {"num_particles": 3, "num_steps": 2},
        {"mode": "exact"},
        {"mode": "mixed", "num_particles": 2},
        {"mode": "auto", "num_particles": 1},
        {"power": 2.0},
    )
]
RUNGS = [None, Budget(8, 6), Budget(4, 3), Budget(2, 6), Budget(1, 3), OFF]


def test_a_rung_bounds_and_never_adds() -> None:
    found = apply_budget(ASKED[2], Budget(8, 6))
    assert found == ASKED[2]
    found = apply_budget(ASKED[2], Budget(2, 1))
    assert (found.num_particles, found.num_steps, found.mode) == (2, 1, "smc")


@pytest.mark.parametrize("mode", ["smc", "exact", "mixed", "auto"])
def test_who_loses_all_particles_but_one_is_verified(mode: str) -> None:
    asked = RequestConfig(num_particles=4, mode=mode)
    for budget in (OFF, Budget(1, 4)):
        assert apply_budget(asked, budget).mode == "exact"
    assert apply_budget(asked, Budget(2, 0)).mode == mode


def test_a_power_keeps_its_particles_and_who_has_one_keeps_its_mode() -> None:
    assert apply_budget(ASKED[6], OFF).num_particles == 8
    assert apply_budget(ASKED[6], OFF).num_steps == 0
    assert apply_budget(ASKED[1], OFF).mode == "smc"


@pytest.mark.parametrize("budget", RUNGS)
def test_the_device_runs_with_what_the_host_has_bounded(budget: Budget | None) -> None:
    table = RequestTable(1 + len(ASKED), 4, "cpu")
    table.write([entry(row, config) for row, config in enumerate(ASKED, start=1)])
    states = [RequestState.of(7, config) for config in ASKED]
    for state in states:
        state.step_to(budget)
    rows = torch.arange(1, 1 + len(ASKED))
    reqs = [SimpleNamespace(smc_state=state) for state in states]
    batch: Any = SimpleNamespace(reqs=reqs, req_pool_indices=rows, seq_lens=rows)
    inputs = RoundInputs.of(batch, "cpu")
    found = table.gather(rows).bounded(*inputs.known[1:])
    expected = [apply_budget(config, budget) for config in ASKED]
    assert found.num_particles.tolist() == [config.num_particles for config in expected]
    assert found.num_steps.tolist() == [config.num_steps for config in expected]
    assert found.weighs.tolist() == [config.weighs for config in expected]
    assert found.evidence_threshold.tolist() == [config.covering for config in expected]


@pytest.mark.parametrize(("before", "now"), itertools.product(RUNGS, RUNGS))
def test_memory_holds_the_tails_so_far_and_the_drafts_to_come(
    before: Budget | None, now: Budget | None
) -> None:
    for asked in ASKED:
        last, new = apply_budget(asked, before), apply_budget(asked, now)
        in_use = last.num_particles * (last.lag - 1)
        taken = new.num_particles * (new.num_steps + 1)
        span = union(last, new)
        assert arena.arena(span, 1000) >= in_use + taken
        assert arena.arena(span, 1000) <= arena.max_arena(SERVER)
        assert arena.tail(span, 1000) >= last.lag - 1 + new.num_steps + 1
