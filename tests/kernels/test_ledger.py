"""Kernels of the ledger against its own methods, on the states that programs of rounds lead to.

`pool_programs` plays the rounds: requests of any N and K that come, end, abort and are retracted.
Each call goes to a kernel as well, on copies, and all of the table must then agree: what belongs to
nobody's arena, too.
"""

import random
from typing import Any

import pytest
import torch
from drawn import copied
from pool_programs import CONFIGS, PoolProgram

from sglang_smc.kernels import lineage
from sglang_smc.ops import TORCH
from sglang_smc.smc.ledger import Arenas, Ledger
from sglang_smc.smc.ops import Ops


class Compared(Ledger):
    """Does as its base does, and checks that the kernels do, too."""

    device: str
    kernels: type[Ledger]

    def __init__(self, *tables: torch.Tensor, **sizes: int) -> None:
        super().__init__(*tables, **sizes)
        self._sizes = sizes

    def reserve(self, *arguments: Any) -> Any:
        return self._compare("reserve", *arguments)

    def descend(self, *arguments: Any, **more: Any) -> None:
        self._compare("descend", *arguments, **more)

    def commit(self, *arguments: Any, **more: Any) -> None:
        self._compare("commit", *arguments, **more)

    def _compare(self, name: str, *arguments: Any, **more: Any) -> Any:
        copies = copied([self.table, self.tails], self.device)
        other = self.kernels(*copies, **self._sizes)
        there = copied([arguments, more], self.device)
        found = getattr(other, name)(*there[0], **there[1])
        expected = getattr(super(), name)(*arguments, **more)
        for table, one in zip(copies, (self.table, self.tails), strict=True):
            assert torch.equal(table.cpu(), one)
        assert (other.rank == other.free_rank).all(), "marks were left behind"
        for one, other in zip(found or (), expected or (), strict=True):
            assert torch.equal(one.cpu(), other)
        return expected


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "emits every round"])
def test_programs(name: str, device: str, kernels: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compared, "device", device, raising=False)
    monkeypatch.setattr(Compared, "kernels", kernels.ledger, raising=False)
    # Small enough for tails and arenas of several blocks.
    monkeypatch.setattr(lineage, "_TAIL_BLOCK", 4)
    monkeypatch.setattr(lineage, "_ARENA_BLOCK", 16)
    rng = random.Random(name)
    ops = TORCH._replace(ledger=Compared, kind="triton")  # particles share no slots
    program = PoolProgram(CONFIGS[name], rng, num_rows=8, ops=ops)
    for _ in range(28):
        program.act()
    if program.config.num_particles > 1:
        situations = "nothing common", "some have ended", "something common, something not"
        assert min(program.seen[what] for what in situations) > 0


def test_a_group_without_an_arena_is_left_alone(device: str) -> None:
    """A captured graph plays with more groups than there are: these name SGLang's padding row."""
    table = torch.arange(3 * 12, dtype=torch.int32, device=device).view(3, 12)
    tails = torch.arange(36, 36 + 6 * 16, dtype=torch.int32, device=device).view(6, 16)
    ledger = Ledger(table, tails, num_particles=2, max_tail=5, num_slots=200)
    before = table.clone(), tails.clone()
    none = torch.zeros(2, dtype=torch.int64, device=device)
    lengths = torch.full((2, 2), 4, device=device)
    arenas = Arenas(none, none, none)
    lineage.commit(ledger, arenas, lengths, none + 3, max_tail=5, max_arena=9)
    assert torch.equal(table, before[0]) and torch.equal(tails, before[1])
    assert (ledger.rank == ledger.free_rank).all()
