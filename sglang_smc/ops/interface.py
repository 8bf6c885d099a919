"""Define the interface of the small operations of a round, for kernels and torch functions.

Both give the same tokens for the same seed; the torch functions are the reference. Kernels are
for devices where a launch takes longer than its work: there a round's hundreds of small torch
calls would take as long as a model's forward pass.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from sglang_smc.kv.ledger import Ledger
from sglang_smc.smc import weighing
from sglang_smc.smc.filters import KeptTokens
from sglang_smc.smc.prefixes import Narrowed
from sglang_smc.smc.verification import Kept, Walk

Kind = Literal["torch", "triton"]


class Ops(NamedTuple):
    """One implementation of each operation; signatures as in `ops.torch_ops`."""

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
    reweight_and_resample: Callable[..., weighing.Reweighted]
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
