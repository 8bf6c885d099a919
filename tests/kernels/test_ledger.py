"""Kernels of the ledger against its own methods, on the states that programs of rounds lead to.

`pool_model` plays the rounds: requests of any N and K that come, end, abort and are retracted. Each
call goes to a kernel as well, on copies, and all of the table must then agree: what belongs to
nobody's arena, too.
"""

import random
from collections.abc import Callable
from typing import Any

import pool_model
import pytest
import torch
from pool_model import PoolModel

from sglang_smc.kernels import lineage
from sglang_smc.memory.ledger import Ledger
from sglang_smc.options.server import SMCConfig

CONFIGS = {
    "usual": SMCConfig(num_particles=4, num_steps=3, max_lag=8),
    "long tails": SMCConfig(num_particles=3, num_steps=2, max_lag=30),
    "one particle": SMCConfig(num_particles=1, num_steps=4, max_lag=5),
    "one step": SMCConfig(num_particles=8, num_steps=1, max_lag=3),
}


class Compared(Ledger):
    """Does as its base does, and checks that the kernels do, too."""

    device = "cpu"

    def reserve(self, rows: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return self._compare(super().reserve, lineage.reserve, rows, arguments)

    def descend(self, rows: torch.Tensor, **arguments: Any) -> None:
        def descend(table: torch.Tensor, tails: torch.Tensor, *others: Any, **named: Any) -> None:
            lineage.descend(tails, *others, **named)

        self._compare(super().descend, descend, rows, arguments)

    def commit(self, rows: torch.Tensor, **arguments: Any) -> None:
        rank = torch.full_like(self.rank, self._free_rank, device=self.device)

        def commit(table: torch.Tensor, tails: torch.Tensor, *others: Any, **named: Any) -> None:
            lineage.commit(table, tails, rank, self._free_rank, *others, **named)

        self._compare(super().commit, commit, rows, arguments)
        assert (rank == self._free_rank).all(), "marks were left behind"

    def _compare(
        self,
        method: Callable[..., Any],
        kernel: Callable[..., Any],
        rows: torch.Tensor,
        arguments: dict[str, Any],
    ) -> Any:
        tables = [table.to(self.device, copy=True) for table in (self.table, self.tails)]
        moved = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        found = kernel(*tables, self._num_particles, rows.to(self.device), **moved)
        expected = method(rows, **arguments)
        for table, one in zip(tables, (self.table, self.tails), strict=True):
            assert torch.equal(table.cpu(), one)
        if expected is not None:
            assert torch.equal(found.cpu(), expected)
        return expected


@pytest.fixture
def model_of(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[SMCConfig], PoolModel]:
    monkeypatch.setattr(Compared, "device", device)
    monkeypatch.setattr(pool_model, "Ledger", Compared)
    # Small enough for tails and arenas of several blocks.
    monkeypatch.setattr(lineage, "_TAIL_BLOCK", 4)
    monkeypatch.setattr(lineage, "_ARENA_BLOCK", 16)
    return lambda config: PoolModel(config, num_rows=3, longest=30)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_programs(name: str, model_of: Callable[[SMCConfig], PoolModel]) -> None:
    rng = random.Random(name)
    model = model_of(CONFIGS[name])
    while model.operations < 400:
        running = list(model.requests.values())
        choice = rng.random()
        if model.free_rows and (choice < 0.3 or not running):
            model.start(rng)
        elif choice < 0.35:
            model.abort(rng.choice(running), rng)
        elif choice < 0.4:
            model.retract(rng.choice(running), rng)
        else:
            model.play_round(rng.sample(running, rng.randint(1, len(running))), rng)
    if model.config.num_particles > 1:
        assert min(model.seen[what] for what in ("nothing common", "some have ended")) > 0
        assert model.seen["something common, something not"] > 0


def test_a_group_without_an_arena_is_left_alone(device: str) -> None:
    """A captured graph plays with more groups than there are: these name SGLang's padding row."""
    table = torch.arange(3 * 12, dtype=torch.int32, device=device).view(3, 12)
    tails = torch.arange(36, 36 + 6 * 16, dtype=torch.int32, device=device).view(6, 16)
    rank = torch.full((200,), 7, dtype=torch.int32, device=device)
    before = table.clone(), tails.clone()
    none = torch.zeros(2, dtype=torch.int64, device=device)
    lineage.commit(
        table,
        tails,
        rank,
        7,
        2,
        none,
        committed=none,
        allocated=none,
        lengths=torch.full((2, 2), 4, device=device),
        counts=none + 3,
        max_tail=5,
        max_arena=9,
    )
    assert torch.equal(table, before[0]) and torch.equal(tails, before[1])
    assert (rank == 7).all()
