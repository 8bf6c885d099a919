"""Stand in for running requests, so that rounds are measured before any comes in.

Each has a last token of its own, so that a mixture of experts routes its rows as it does a text's.
Its chains branch as the draft has them, or are forced to be equal or to differ.
"""

from enum import Enum
from typing import NamedTuple

import torch
from msgspec.structs import replace
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sglang_smc.kv.transfer import on_device
from sglang_smc.options.request import Budget, RequestConfig, apply_budget, request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import RoundInputs, Tables
from sglang_smc.state.metrics import zero_counters
from sglang_smc.state.settings import Start

_FLAT = 1e6  # a temperature at which a draft's tokens are equally likely
_PEAKED = 1e-6
_STRIDE = 7919  # a prime, so that last tokens are spread over the vocabulary


class Branches(Enum):
    """Name how the chains of a request differ."""

    NONE = "none"
    OWN = "own"  # as the draft has them, at temperature 1
    MOST = "most"


class StandIns(NamedTuple):
    """Requests in rows 1 and up of a server's tables, which no other request has yet."""

    tables: Tables
    config: SMCConfig
    before: torch.Tensor  # [rows, slots of a round] of `Ledger.table`

    @classmethod
    def of(cls, tables: Tables, config: SMCConfig) -> "StandIns":
        width = 1 + config.num_particles * (config.num_steps + 1)
        return cls(tables, config, tables.ledger.table[:, :width].clone())

    @property
    def most(self) -> int:
        """Return how many there may be."""
        return len(self.tables.ledger.table) - 1

    def room(self, budget: Budget) -> int:
        """Return how many have KV slots apart; at least one."""
        return max((len(self.tables.ledger.rank) - 1) // self._width(budget), 1)

    def begin(self, budget: Budget, size: int, branches: Branches) -> RoundInputs:
        """Start ``size`` requests after a prompt of one token, and return a round's inputs."""
        tables = self.tables
        ledger = tables.ledger
        device = ledger.device
        rows = torch.arange(1, size + 1, device=device)
        config = self._options(branches)
        is_greedy = self.config.ngram_matches and branches is Branches.NONE
        params = SamplingParams(
            max_new_tokens=1 << 20, ignore_eos=True, top_k=1 if is_greedy else TOP_K_ALL
        )
        starts = [Start(row, row, params, config, frozenset()) for row in range(1, size + 1)]
        tables.requests.write(starts)
        zeros = on_device(str(device), [zero_counters(1)] * size, torch.float64)
        tables.counters.begin(rows, zeros)
        ones = torch.ones_like(rows)
        tables.particles.begin(
            rows,
            first_tokens=rows * _STRIDE % tables.requests.vocab_size,
            num_emitted=ones,
            log_evidence=ones.double(),
            num_particles=ones * apply_budget(self.config, budget).num_particles,
        )
        width = self._width(budget)
        slots = 1 + torch.arange(size * width, device=device) % (len(ledger.rank) - 1)
        ledger.table[rows, 0] = 0
        ledger.table[rows, 1 : 1 + width] = slots.view(size, width).to(ledger.table.dtype)
        known = [1 + width, *map(int, apply_budget(self.config, budget).round_sizes)]
        columns = on_device(str(device), known).unsqueeze(1).repeat(1, size)
        return RoundInputs(rows, ones, columns)

    def end(self) -> None:
        """Leave the rows' slots as they were, with ended particles."""
        self.tables.ledger.table[:, : self.before.shape[1]] = self.before
        self.tables.begin_padding(self.config, self.most + 1)

    def _width(self, budget: Budget) -> int:
        """Return the KV slots of a request's round."""
        now = apply_budget(self.config, budget)
        return now.num_particles * (now.num_steps + 1)

    def _options(self, branches: Branches) -> RequestConfig:
        own = request_config(self.config, None)
        temperature = {Branches.NONE: _PEAKED, Branches.OWN: None, Branches.MOST: _FLAT}[branches]
        return own if self.config.ngram_matches else replace(own, draft_temperature=temperature)
