"""No slot is lost, shared by mistake or read with the wrong KV, whatever requests come and go.

They differ in N, in K and in how long their tails may get; a round's tensors are cut to what the
largest needs. A ledger that took a neighbour's size for a group's own would hand out slots in use.
Programs of ten kinds of server play the package's own rounds; `pool_programs` checks each step.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_programs import CONFIGS, PoolProgram

from sglang_smc.kv.sizes import kv_buffers
from sglang_smc.ops import TORCH
from sglang_smc.options.request import OFF, Budget, budgets
from sglang_smc.options.server import SMCConfig
from sglang_smc.round import handover


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
    rng = random.Random(name)
    config = CONFIGS[name]
    # On a CPU particles of equal texts share slots, on a GPU each writes its own.
    ops = TORCH._replace(kind="triton" if overlap else "torch")
    options = {"overlap": overlap, "budgets": some_budgets(config, adapts, overlap), "ops": ops}
    program = PoolProgram(config, rng, num_rows=24, **options)
    for _ in range(400 if request.config.getoption("--nightly") else 100):
        program.act()
    if config.num_particles > 1 and config.max_lag > 1:
        assert len(program.seen) == 9
        often = {what for what, count in program.seen.items() if count > 2}
        assert often == {what for what in program.seen if adapts or "particles" not in what}


class Pool(SimpleNamespace):
    """KV of two layers: keys and values, or latents that are both."""

    start_layer = 0
    layer_num = 2

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.keys[layer][..., :2] if self.is_latent else self.values[layer]


def drawn_pool(num_slots: int, is_latent: bool) -> Any:
    keys, values = torch.randn(2, 2, num_slots, 2, 4)
    return Pool(keys=keys.bfloat16(), values=values, is_latent=is_latent)


@settings(max_examples=50)
@given(st.sampled_from([1, 2, 4, 16]), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_row_in_the_order_of_pages_keeps_the_kv_of_its_text(
    page: int, num_owned: int, rng: random.Random
) -> None:
    """Slots of the text are others' destinations. No slot of another request changes."""
    owned = rng.sample(range(1, 10), num_owned)
    slots = [number * page + i for number in owned for i in range(page)]
    rng.shuffle(slots)
    num_kept = rng.randrange(len(slots) + 1)
    pools = [drawn_pool(10 * page, is_latent) for is_latent in (False, True)]
    tensors = [tensor for pool in pools for tensor in (pool.keys, pool.values)]
    before = [tensor.clone() for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "_MOST_COPIED", rng.choice([1, 3 * len(slots), 1 << 24]))
        row = torch.tensor(slots, dtype=torch.int32)
        handover.order(row, num_kept, [own for pool in pools for own in kv_buffers(pool)])
    ordered = row.long()
    assert sorted(slots) == ordered.sort().values.tolist()
    numbers = ordered.view(num_owned, page) // page
    places = ordered % page
    assert (numbers == numbers[:, :1]).all()
    assert places.tolist() == [*range(page)] * num_owned
    others = [slot for slot in range(10 * page) if slot not in slots]
    for tensor, was in zip(tensors[:3], before, strict=False):  # latents have no values
        assert torch.equal(tensor[:, ordered[:num_kept]], was[:, slots[:num_kept]])
        assert torch.equal(tensor[:, others], was[:, others])
