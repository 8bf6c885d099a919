"""The operations of a round as torch functions: they define what kernels compute."""

from sglang_smc.memory.ledger import Ledger
from sglang_smc.memory.rows import tally
from sglang_smc.ops.interface import Ops
from sglang_smc.smc import agreement, exact, fidelity, mixed, randomness, rounds
from sglang_smc.smc.stratify import same_text, stratify
from sglang_smc.tokens import distribution, edits, filters

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
    reweight_and_resample=rounds.reweight_and_resample,
    begin_walk=exact.begin_walk,
    walk_on=exact.walk_on,
    keep=mixed.keep,
    narrow=agreement.narrow,
    keep_column=fidelity.keep_column,
    watch=fidelity.watch,
    common_tail=agreement.common_tail,
    num_distinct=agreement.num_distinct,
    tally=tally,
    ledger=Ledger,
)
