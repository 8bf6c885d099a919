"""How many launches a round has beside its models' own where it verifies.

`test_launches` counts rounds that weigh, and says why.
"""

import pytest
from launch_counts import count

from sglang_smc.ops.interface import Ops
from sglang_smc.options.server import SMCConfig

MOST = 334  # at N = K = 8; a captured round has those besides that greedy requests need
MOST_OF_VERIFICATION = 120
MOST_OF_A_COLUMN = 10  # four kernels, and the path's log-probabilities under p and under q


@pytest.mark.parametrize("mode", ["exact", "mixed"])
def test_a_round_that_verifies_has_few_launches(
    mode: str, monkeypatch: pytest.MonkeyPatch, device: str, kernels: Ops
) -> None:
    if device != "cpu":
        pytest.skip("kernels are counted in Triton's interpreter")
    found = count(SMCConfig(num_particles=8, num_steps=8, mode=mode), monkeypatch, kernels)
    assert 200 < found["all"] <= MOST
    assert found["verification"] <= MOST_OF_VERIFICATION
    assert found["walk"] <= 1 + 8 * MOST_OF_A_COLUMN
