"""What the device keeps of all requests from one round to the next."""

from typing import NamedTuple

import torch

from sglang_smc.memory import arena
from sglang_smc.memory.ledger import Ledger
from sglang_smc.memory.measured import tensor_bytes
from sglang_smc.ops.interface import Ops
from sglang_smc.options.server import SMCConfig
from sglang_smc.state.counters import CounterTable, zero_counters
from sglang_smc.state.edits import EditTable
from sglang_smc.state.judged import JudgedTable
from sglang_smc.state.population import ParticleTable
from sglang_smc.state.settings import RequestTable, TableEntry
from sglang_smc.state.tail_logprobs import LogprobTable
from sglang_smc.state.transfer import on_device


class Tables(NamedTuple):
    """One row for each request that SGLang's request pool can hold; row 0 pads batches."""

    requests: RequestTable  # what each asked for
    edits: EditTable  # what each changes in logits
    particles: ParticleTable  # texts, weights, ends
    logprobs: LogprobTable  # beside their tails
    judged: JudgedTable  # what potentials have said of them
    counters: CounterTable  # what its rounds have come to
    ledger: Ledger  # KV slots, in SGLang's own req_to_token and beside it

    @classmethod
    def of(
        cls,
        config: SMCConfig,
        ops: Ops,
        req_to_token: torch.Tensor,
        *,
        num_slots: int,
        vocab_size: int,
        device: str,
    ) -> "Tables":
        """Empty tables.

        Args:
            req_to_token: ``[num_rows, width]``, SGLang's, the padding row included.
            num_slots: size of the KV pool, the padding slot 0 included.
            vocab_size: V, of the target's logits.
        """
        num_rows, num_particles = len(req_to_token), config.num_particles
        max_tail, tail_width = arena.max_tail(config), arena.tail_width(config)
        tails = torch.zeros(num_rows * num_particles, tail_width, dtype=torch.int32, device=device)
        return cls(
            requests=RequestTable(num_rows, vocab_size, device),
            edits=EditTable(num_rows, vocab_size, device),
            particles=ParticleTable(num_rows, num_particles, max_tail, device),
            logprobs=LogprobTable(num_rows, num_particles, max_tail, device),
            judged=JudgedTable(num_rows, num_particles, device),
            counters=CounterTable(num_rows, device, ops),
            ledger=ops.ledger(
                req_to_token,
                tails,
                num_particles=num_particles,
                max_tail=max_tail,
                num_slots=num_slots,
            ),
        )

    def sizes(self) -> dict[str, int]:
        """Bytes, by what it is."""
        of_texts = self.particles, self.logprobs, self.judged
        state = (self.requests, self.edits, *of_texts, self.counters)
        return {
            "rows of requests": tensor_bytes(self.ledger.table),
            "rows of particles": tensor_bytes(self.ledger.tails),
            "state of requests": tensor_bytes(state),
            "marks of KV slots": tensor_bytes(self.ledger.rank),
        }

    def begin_padding(self, entry: TableEntry, num_particles: int, device: str) -> None:
        """Give SGLang's padding row particles that have ended: they play what a batch leaves."""
        self.requests.write([entry])
        row = torch.zeros(1, dtype=torch.int64, device=device)
        zeros = on_device(device, [zero_counters(1)], torch.float64)
        self.counters.begin(row, zeros)
        self.particles.begin(
            row,
            first_tokens=row,
            num_emitted=row,
            log_evidence=torch.zeros_like(row, dtype=torch.float64),
            num_particles=row + num_particles,
            ended=torch.ones(1, num_particles, dtype=torch.bool, device=device),
        )
