"""Implement the operations of a round as Triton kernels."""

from typing import Any

from sglang_smc.kernels import filters, lineage, population, sample
from sglang_smc.kernels.agreement import same_text, stratify
from sglang_smc.kernels.attention.work import in_order as in_order
from sglang_smc.kernels.edits import count_tokens, edit_logits
from sglang_smc.kernels.randomness import round_seeds, uniforms
from sglang_smc.kernels.reweight import keep, resample_by_weights, reweight_and_resample, tally
from sglang_smc.kernels.skinny import skinny
from sglang_smc.kernels.verify import verify
from sglang_smc.kernels.watch import keep_column, watch
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ledger import Ledger
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import Population

# Their functions are methods here: the first argument is the object.
_ledgers: Any = lineage
_distributions: Any = sample
_filters: Any = filters
_populations: Any = population


class KernelLedger(Ledger):
    """Ledger with kernels for three of its methods, of one to three launches each."""

    reserve = _ledgers.reserve
    descend = _ledgers.descend
    commit = _ledgers.commit


class KernelPopulation(Population):
    """Populations that kernels move, of one launch for each of these methods."""

    gather = _populations.gather
    store = _populations.store
    extend = _populations.extend
    append_bonus = _populations.append_bonus
    narrow = _populations.narrow


class KernelDistribution(TokenDistribution):
    """Distributions that are filtered, sampled and scored by kernels."""

    filtered = _filters.filtered
    _sample = _distributions.sample_and_score
    _score = _distributions.score_tokens
    log_probs = _distributions.log_probs
    log_sums = _distributions.log_sums

    def summed(self) -> TokenDistribution:
        return self._replace(sums=sample.row_sums(self)) if self.sums is None else self


_KERNELS: tuple[Any, ...] = (
    *(uniforms, round_seeds, same_text, stratify, edit_logits, count_tokens),
    *(reweight_and_resample, resample_by_weights, verify, keep),
    *(keep_column, watch, tally, skinny),
)
_BY_NAME = {kernel.__name__: kernel for kernel in _KERNELS}
_CLASSES: Any = {
    "ledger": KernelLedger,
    "population": KernelPopulation,
    "distribution": KernelDistribution,
}
TRITON = Ops("triton", **_CLASSES, **_BY_NAME)
