"""What a request runs with on a rung, on the host and on the device alike."""

import itertools

import pytest
import torch

from sglang_smc.memory import arena
from sglang_smc.options.budget import OFF, Rung, joined, narrowed
from sglang_smc.options.request import RequestConfig, request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.state.settings import RequestSpec, RequestTable

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
RUNGS = [None, Rung(8, 6), Rung(4, 3), Rung(2, 6), Rung(1, 3), OFF]


def test_a_rung_bounds_and_never_adds() -> None:
    found = narrowed(ASKED[2], Rung(8, 6))
    assert found == ASKED[2]
    found = narrowed(ASKED[2], Rung(2, 1))
    assert (found.num_particles, found.num_steps, found.mode) == (2, 1, "smc")


@pytest.mark.parametrize("mode", ["smc", "exact", "mixed", "auto"])
def test_who_loses_all_particles_but_one_is_verified(mode: str) -> None:
    asked = RequestConfig(num_particles=4, mode=mode)
    for rung in (OFF, Rung(1, 4)):
        assert narrowed(asked, rung).mode == "exact"
    assert narrowed(asked, Rung(2, 0)).mode == mode


def test_a_power_keeps_its_particles_and_who_has_one_keeps_its_mode() -> None:
    assert narrowed(ASKED[6], OFF).num_particles == 8
    assert narrowed(ASKED[6], OFF).num_steps == 0
    assert narrowed(ASKED[1], OFF).mode == "smc"


@pytest.mark.parametrize("rung", RUNGS)
def test_the_device_comes_to_the_same(rung: Rung | None) -> None:
    table = RequestTable(1 + len(ASKED), 4, "cpu")
    specs = [
        RequestSpec(*(row, 7, 1.0, 4, 1.0, 0.0, 9, 0, False, frozenset()), config=config)
        for row, config in enumerate(ASKED, start=1)
    ]
    table.write(specs)
    found = table.gather(torch.arange(1, 1 + len(ASKED))).within(rung)
    expected = [narrowed(config, rung) for config in ASKED]
    assert found.num_particles.tolist() == [config.num_particles for config in expected]
    assert found.num_steps.tolist() == [config.num_steps for config in expected]
    assert found.weighs.tolist() == [config.weighs for config in expected]
    assert found.evidence_threshold.tolist() == [config.covering for config in expected]


@pytest.mark.parametrize(("before", "now"), itertools.product(RUNGS, RUNGS))
def test_memory_holds_the_tails_so_far_and_the_drafts_to_come(
    before: Rung | None, now: Rung | None
) -> None:
    for asked in ASKED:
        last, new = narrowed(asked, before), narrowed(asked, now)
        in_use = last.num_particles * (arena.lag(last) - 1)
        taken = new.num_particles * (new.num_steps + 1)
        span = joined(last, new)
        assert arena.arena(span, 1000) >= in_use + taken
        assert arena.arena(span, 1000) <= arena.max_arena(SERVER)
        assert arena.tail(span, 1000) >= arena.lag(last) - 1 + new.num_steps + 1
