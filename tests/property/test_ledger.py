"""No slot is lost, shared by mistake or read with the wrong KV, whatever requests come and go.

They differ in N, in K and in how long their tails may get; a round's tensors are cut to what the
largest needs. A ledger that took a neighbour's size for a group's own would hand out slots in use.
The checks themselves live in `pool_model.PoolModel`; these tests supply the programs of ten kinds
of server, each step of which is checked. A program ends once each situation has come three times,
but not within 600 steps; with --nightly it goes on, 65,000 steps in all.
"""

import random

import pytest
from pool_model import CONFIGS, PoolModel

from sglang_smc.options.request import Budget, budgets
from sglang_smc.options.server import SMCConfig


def some_budgets(config: SMCConfig, adapts: bool) -> tuple[Budget | None, ...]:
    """What rounds may be on: any budget of a server that adapts."""
    top = Budget(config.num_particles, config.num_steps)
    return (None, *budgets(top)) if adapts else (None,)


@pytest.mark.parametrize(
    ("name", "overlap", "adapts"),
    [
        (name, overlap, overlap != (i % 2 == 0))
        for i, name in enumerate(CONFIGS)
        for overlap in (False, True)
    ],
)
def test_long_programs(
    name: str, overlap: bool, adapts: bool, request: pytest.FixtureRequest
) -> None:
    rng, config = random.Random(name), CONFIGS[name]
    model = PoolModel(config, overlap=overlap, budgets=some_budgets(config, adapts))
    every_kind = config.num_particles > 1 and config.max_lag > 1
    longest = 9000 if adapts else 4000  # more situations to meet
    least = longest if request.config.getoption("--nightly") else 600

    def seen_all() -> bool:
        situations = {name for name in model.seen if adapts or "particles" not in name}
        often = min((model.seen[name] for name in situations), default=0) > 2
        return len(situations) == (11 if adapts else 9) and often

    while model.operations < least or (
        every_kind and model.operations < longest and not seen_all()
    ):
        model.act(rng)
    assert seen_all() or not every_kind, model.seen
    for request in list(model.requests.values()):
        model.abort(request, rng)
    assert set(model.free) == model.all_slots
