"""Implement the operations of a round as torch functions, the references of the kernels."""

from sglang_smc.kv.ledger import Ledger
from sglang_smc.ops.interface import Ops
from sglang_smc.ops.rows import tally
from sglang_smc.smc import (
    distribution,
    edits,
    fidelity,
    filters,
    prefixes,
    randomness,
    verification,
    weighing,
)
from sglang_smc.smc.randomness import same_text, stratify

TORCH = Ops(
    kind="torch",
    uniforms=randomness.particle_uniforms,
    round_seeds=randomness.round_seeds,
    same_text=same_text,
    stratify=stratify,
    edit_logits=edits.edit_logits,
    count_tokens=edits.count_tokens,
    keep_tokens=filters.keep_tokens,
    sample_and_score=distribution.sample_and_score,
    score_tokens=distribution.score_tokens,
    log_probs=distribution.log_probs,
    log_sums=distribution.log_sums,
    row_sums=distribution.row_sums,
    reweight_and_resample=weighing.reweight_and_resample,
    begin_walk=verification.begin_walk,
    walk_on=verification.walk_on,
    keep=verification.keep,
    narrow=prefixes.narrow,
    keep_column=fidelity.keep_column,
    watch=fidelity.watch,
    common_tail=prefixes.common_tail,
    num_distinct=prefixes.num_distinct,
    tally=tally,
    ledger=Ledger,
)
