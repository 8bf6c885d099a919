"""The small operations of a round, which kernels and torch functions both have.

Both give the same tokens for the same seed; the torch functions are the definition. Kernels are
for devices where a launch costs more than the work that it does: there a round's hundreds of small
torch calls would take as long as a model's forward.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from sglang_smc.memory.ledger import Ledger
from sglang_smc.smc import rounds
from sglang_smc.smc.agreement import Narrowed
from sglang_smc.smc.exact import Walk
from sglang_smc.smc.mixed import Kept
from sglang_smc.tokens.filters import KeptTokens

Kind = Literal["torch", "triton"]


class Ops(NamedTuple):
    """One implementation of each; signatures as in `torch_ops`."""

    kind: Kind
    uniforms: Callable[..., torch.Tensor]
    round_seeds: Callable[..., torch.Tensor]
    same_text: Callable[..., torch.Tensor]
    stratify: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    edit_logits: Callable[..., None]
    count_tokens: Callable[..., None]
    keep_tokens: Callable[..., KeptTokens]
    sample_and_score: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    score_tokens: Callable[..., torch.Tensor]
    log_probs: Callable[..., torch.Tensor]
    log_sums: Callable[..., torch.Tensor]
    row_sums: Callable[..., Any]
    reweight_and_resample: Callable[..., rounds.Reweighted]
    narrow: Callable[..., Narrowed]
    common_tail: Callable[..., torch.Tensor]
    num_distinct: Callable[..., torch.Tensor]
    tally: Callable[..., torch.Tensor]
    begin_walk: Callable[..., Walk]
    walk_on: Callable[..., Walk]
    keep: Callable[..., Kept]
    keep_column: Callable[..., torch.Tensor]
    watch: Callable[..., torch.Tensor]
    ledger: type[Ledger]
