"""What must always hold of a pool, its requests and the tables; see `pool_model`."""

from collections import Counter

import torch
from pool_request import Request, Text, Window

from sglang_smc.memory.ledger import Ledger
from sglang_smc.options.server import SMCConfig
from sglang_smc.state.population import Population


class PoolChecks:
    """The checks of `PoolModel`, which owns what they look at."""

    config: SMCConfig
    table: torch.Tensor
    ledger: Ledger
    window: Window
    requests: dict[int, Request]
    free: list[int]
    all_slots: set[int]
    content: dict[int, Text]
    draft_content: dict[int, Text]
    operations: int
    seen: Counter[str]

    def check(self) -> None:
        self.operations += 1
        owned: list[int] = []
        for request in self.requests.values():
            slots = self.table[request.row, : request.allocated].tolist()
            assert slots[: len(request.frozen)] == request.frozen, "committed slots moved"
            request.frozen = slots[: request.committed]
            owned += slots
            if request.has_begun:
                self._check_lineages(request, set(slots))
        assert len(owned) == len(set(owned)), "a slot stands twice"
        assert not set(owned) & set(self.free)
        assert set(owned) | set(self.free) == self.all_slots
        assert not self.table[0].any(), "SGLang's padding row was written to"

    def _check_lineages(self, request: Request, owned: set[int]) -> None:
        emitted = request.prompt + request.output
        self._check_read(self.table[request.row, : request.committed].tolist(), emitted, owned)
        for particle, tail in enumerate(request.tails):
            read = self._slots_read(request, particle, request.committed + len(tail))
            self._check_read(read, request.text(particle), owned)

    def _check_read(self, read: list[int], text: list[int], owned: set[int]) -> None:
        assert set(read) <= owned, "a particle reads a slot that its request does not own"
        for position, slot in enumerate(read):
            assert self.content[slot] == tuple(text[: position + 1]), "wrong KV"

    def _slots_read(self, request: Request, particle: int, length: int) -> list[int]:
        """Emitted text through the request's row, the tail through the particle's own."""
        row = self.ledger.particle_rows(torch.tensor([request.row]), particle + 1)[0, particle]
        committed = min(request.committed, length)
        prefix = self.table[request.row, :committed]
        return [*prefix.tolist(), *self._tail(int(row), committed, length)]

    def _tail(self, row: int, begin: int, end: int) -> list[int]:
        """Slots at these positions of a particle's row."""
        return [int(self.tails[row, p % self.tails.shape[1]]) for p in range(begin, end)]

    def _check_draft(self, request: Request, particle: int) -> None:
        """Before it drafts, the draft has read the particle's whole text, slot by slot."""
        text = request.text(particle)
        for position, slot in enumerate(self._slots_read(request, particle, len(text))):
            assert self.draft_content[slot] == tuple(text[: position + 1]), "wrong KV of the draft"

    def _check_reserved(self, batch: list[Request], slots: list) -> None:
        for request, of_group in zip(batch, slots, strict=True):
            ended_here = self.window.padded(request.ended, True)
            width = request.now.num_steps + 1
            live = [s for s, ended in zip(of_group, ended_here, strict=True) if not ended]
            reserved = [slot for row in live for slot in row[1 : 1 + width]]
            assert len(reserved) == len(set(reserved)), "a slot was handed out twice"
            arena = self.table[request.row, request.committed : request.allocated].tolist()
            assert set(reserved) <= set(arena)
            assert not set(reserved) & self._in_use(request), "a slot in use was handed out"
            for row, ended in zip(of_group, ended_here, strict=True):
                assert set(row if ended else row[1 + width :]) <= {0}, "more than its own columns"

    def _in_use(self, request: Request) -> set[int]:
        rows = self.ledger.particle_rows(torch.tensor([request.row]), len(request.tails))[
            0
        ].tolist()
        spans = zip(rows, request.tails, strict=True)
        begin = request.committed
        return {slot for row, tail in spans for slot in self._tail(row, begin, begin + len(tail))}

    def _check_population(self, population: Population, batch: list[Request]) -> None:
        self.operations += 1
        for group, request in enumerate(batch):
            size = len(request.tails)
            assert population.lengths[group, :size].tolist() == list(map(len, request.tails))
            assert population.ended[group, :size].tolist() == request.ended
            assert population.last_emitted[group, :size].tolist() == request.last_emitted
            assert population.last_tokens[group, :size].tolist() == [
                request.text(particle)[-1] for particle in range(size)
            ]
            for particle in range(size):
                if request.unread and not request.ended[particle]:
                    expected = request.text(particle)[-2:]
                    assert population.last_two[group, particle].tolist() == expected
            assert population.output_lengths[group, :size].tolist() == [
                len(request.output) + len(tail) for tail in request.tails
            ]
            for particle, tail in enumerate(request.tails):
                assert population.tokens[group, particle, : len(tail)].tolist() == tail
            assert population.present[group].tolist() == self.window.padded([True] * size, False)
            assert population.ended[group, size:].all()
            assert not population.lengths[group, size:].any()
