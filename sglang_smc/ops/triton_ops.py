"""Implement the operations of a round as Triton kernels."""

from typing import Any

import torch

from sglang_smc.kernels import lineage
from sglang_smc.kernels.agreement import common_tail, narrow, num_distinct, same_text, stratify
from sglang_smc.kernels.edits import count_tokens, edit_logits
from sglang_smc.kernels.filters import keep_tokens
from sglang_smc.kernels.randomness import round_seeds, uniforms
from sglang_smc.kernels.reweight import keep, reweight_and_resample, tally
from sglang_smc.kernels.sample import log_probs, log_sums, row_sums, sample_and_score, score_tokens
from sglang_smc.kernels.verify import begin_walk, walk_on
from sglang_smc.kernels.watch import keep_column, watch
from sglang_smc.kv.ledger import Ledger
from sglang_smc.ops.interface import Ops


class KernelLedger(Ledger):
    """Ledger with kernels for its three methods, of one to three launches each."""

    def reserve(self, rows: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return lineage.reserve(self.table, self.tails, self._num_particles, rows, **arguments)

    def descend(self, rows: torch.Tensor, **arguments: Any) -> None:
        lineage.descend(self.tails, self._num_particles, rows, **arguments)

    def commit(self, rows: torch.Tensor, **arguments: Any) -> None:
        lineage.commit(
            self.table,
            self.tails,
            self.rank,
            self._free_rank,
            self._num_particles,
            rows,
            **arguments,
        )


_KERNELS: tuple[Any, ...] = (
    *(uniforms, round_seeds, same_text, stratify, edit_logits, count_tokens, keep_tokens),
    *(sample_and_score, score_tokens, log_probs, log_sums, row_sums, reweight_and_resample),
    *(begin_walk, walk_on, keep, narrow, keep_column, watch, common_tail, num_distinct, tally),
)
TRITON = Ops("triton", ledger=KernelLedger, **{kernel.__name__: kernel for kernel in _KERNELS})
