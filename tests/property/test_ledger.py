"""No slot is lost, shared by mistake or read with the wrong KV, whatever requests come and go.

They differ in N, in K and in how long their tails may get; a round's tensors are cut to what the
largest needs. A ledger that took a neighbour's size for a group's own would hand out slots in use.
Programs of ten kinds of server play the package's own rounds; `pool_programs` checks each step.
"""

import random

import pytest
from pool_programs import CONFIGS, PoolProgram

from sglang_smc.ops.interface import TORCH
from sglang_smc.options.request import OFF, Budget, budgets
from sglang_smc.options.server import SMCConfig


def some_budgets(config: SMCConfig, adapts: bool, overlap: bool) -> tuple[Budget | None, ...]:
    """What rounds may be on: any budget of a server that adapts.

    Results that come late are heard in time where no drafts are wanted for some rounds, as by
    `Policy`, and not for one, as here.
    """
    top = Budget(config.num_particles, config.num_steps)
    found = [budget for budget in budgets(top) if not (overlap and budget == OFF)]
    return (None, *found) if adapts else (None,)


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
    # On a CPU particles of equal texts share slots, on a GPU each writes its own.
    ops = TORCH._replace(kind="triton" if overlap else "torch")
    options = {"overlap": overlap, "budgets": some_budgets(config, adapts, overlap), "ops": ops}
    program = PoolProgram(config, rng, num_rows=24, **options)
    for _ in range(400 if request.config.getoption("--nightly") else 100):
        program.act()
    if config.num_particles > 1 and config.max_lag > 1:
        assert len(program.seen) == 8
        often = {what for what, count in program.seen.items() if count > 2}
        assert often == {what for what in program.seen if adapts or "particles" not in what}
