"""Implement the operations of a round as Triton kernels."""

from typing import Any

from sglang_smc.kernels import filters, lineage, sample
from sglang_smc.kernels.agreement import common_tail, narrow, num_distinct, same_text, stratify
from sglang_smc.kernels.edits import count_tokens, edit_logits
from sglang_smc.kernels.randomness import round_seeds, uniforms
from sglang_smc.kernels.reweight import keep, reweight_and_resample, tally
from sglang_smc.kernels.skinny import skinny
from sglang_smc.kernels.verify import verify
from sglang_smc.kernels.watch import keep_column, watch
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ledger import Ledger
from sglang_smc.smc.ops import Ops

# Their functions are methods here: the first argument is the object.
_ledgers: Any = lineage
_distributions: Any = sample


class KernelLedger(Ledger):
    """Ledger with kernels for three of its methods, of one to three launches each."""

    reserve = _ledgers.reserve
    descend = _ledgers.descend
    commit = _ledgers.commit


class KernelDistribution(TokenDistribution):
    """Distributions that are filtered, sampled and scored by kernels."""

    keep_tokens = staticmethod(filters.keep_tokens)
    _sample = _distributions.sample_and_score
    _score = _distributions.score_tokens
    log_probs = _distributions.log_probs
    log_sums = _distributions.log_sums

    def summed(self) -> TokenDistribution:
        return self._replace(sums=sample.row_sums(self))


_KERNELS: tuple[Any, ...] = (
    *(uniforms, round_seeds, same_text, stratify, edit_logits, count_tokens),
    *(reweight_and_resample, verify, keep, narrow),
    *(keep_column, watch, common_tail, num_distinct, tally, skinny),
)
_BY_NAME = {kernel.__name__: kernel for kernel in _KERNELS}
TRITON = Ops("triton", ledger=KernelLedger, distribution=KernelDistribution, **_BY_NAME)
