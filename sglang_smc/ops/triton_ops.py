"""Implement the operations of a round as Triton kernels."""

from typing import Any

import torch

from sglang_smc.kernels import filters, lineage, sample
from sglang_smc.kernels.agreement import common_tail, narrow, num_distinct, same_text, stratify
from sglang_smc.kernels.edits import count_tokens, edit_logits
from sglang_smc.kernels.randomness import round_seeds, uniforms
from sglang_smc.kernels.reweight import keep, reweight_and_resample, tally
from sglang_smc.kernels.verify import verify
from sglang_smc.kernels.watch import keep_column, watch
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ledger import Ledger
from sglang_smc.smc.ops import Ops


class KernelLedger(Ledger):
    """Ledger with kernels for three of its methods, of one to three launches each."""

    def reserve(self, *arguments: Any) -> torch.Tensor:
        return lineage.reserve(self, *arguments)

    def descend(self, *arguments: Any, **more: Any) -> None:
        lineage.descend(self, *arguments, **more)

    def commit(self, *arguments: Any, **more: Any) -> None:
        lineage.commit(self, *arguments, **more)


class KernelDistribution(TokenDistribution):
    """Distributions that are filtered, sampled and scored by kernels."""

    keep_tokens = staticmethod(filters.keep_tokens)

    def summed(self) -> TokenDistribution:
        return self._replace(sums=sample.row_sums(self))

    def _sample(self, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sample.sample_and_score(self, uniforms)

    def _score(self, tokens: torch.Tensor) -> torch.Tensor:
        return sample.score_tokens(self, tokens)

    def log_probs(self) -> torch.Tensor:
        return sample.log_probs(self)

    def log_sums(self) -> torch.Tensor:
        return sample.log_sums(self)


_KERNELS: tuple[Any, ...] = (
    *(uniforms, round_seeds, same_text, stratify, edit_logits, count_tokens),
    *(reweight_and_resample, verify, keep, narrow),
    *(keep_column, watch, common_tail, num_distinct, tally),
)
_BY_NAME = {kernel.__name__: kernel for kernel in _KERNELS}
TRITON = Ops("triton", ledger=KernelLedger, distribution=KernelDistribution, **_BY_NAME)
