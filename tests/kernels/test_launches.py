"""How many launches a captured round has beside its models' own, played on values.

On a GPU each takes some two microseconds, in a graph too, however little it does: 250 of them are
5 % of a round of 10 ms. `test_fake_cuda` counts at a server's sizes, and names them.
"""

import pytest
from launch_counts import count

from sglang_smc.ops.interface import Ops
from sglang_smc.options.server import SMCConfig

MOST = {"smc": 188, "exact": 252, "mixed": 252}  # at N = K = 8
VERIFYING = ("exact", "mixed")
MOST_OF_VERIFICATION = 105
MOST_OF_A_COLUMN = 8  # four kernels, and the path's log-probabilities under p and under q


@pytest.mark.parametrize(
    "mode", ["smc", *(pytest.param(mode, marks=pytest.mark.thorough) for mode in VERIFYING)]
)
def test_a_round_has_few_launches(
    mode: str, monkeypatch: pytest.MonkeyPatch, device: str, kernels: Ops
) -> None:
    if device != "cpu":
        pytest.skip("kernels are counted in Triton's interpreter")
    found = count(SMCConfig(num_particles=8, num_steps=8, mode=mode), monkeypatch, kernels)
    print(found)
    assert 100 < found["all"] <= MOST[mode]
    if mode in VERIFYING:
        assert found["verification"] <= MOST_OF_VERIFICATION
        assert found["walk"] <= 1 + 8 * MOST_OF_A_COLUMN
