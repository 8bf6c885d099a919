"""Grammars on a CPU, for requests that SMC does not serve: SGLang's own decoding there."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_smc import upstream
from sglang_smc.server.hooks import Patch

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar


def allocate_token_bitmask(original: Callable, vocab_size: int, batch_size: int) -> torch.Tensor:
    """Pin memory only where there is a device to copy it to."""
    if torch.accelerator.is_available():
        return original(vocab_size, batch_size)
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)


def apply_vocab_mask(
    original: Callable, grammar: "XGrammarGrammar", logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """xgrammar's own kernel for tensors on a CPU."""
    if logits.device.type != "cpu":
        return original(grammar, logits, vocab_mask)
    from xgrammar import apply_token_bitmask_inplace

    return apply_token_bitmask_inplace(logits, vocab_mask)


PATCHES = (
    Patch(
        target="sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask",
        hook_type=HookType.AROUND,
        function=allocate_token_bitmask,
        what="Leaves a grammar's masks unpinned where torch has no accelerator.",
        why="Without one, pinning raises, and takes the scheduler with it. A grammar backend of "
        "our own (register_grammar_backend) would lose the reasoning parser's wrapper.",
        relies_on=("srt/constrained/xgrammar_backend.py:60",),
        retire_when="A release that serves grammars on a CPU is the oldest supported.",
        family=upstream.OLDER,
    ),
    Patch(
        target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        hook_type=HookType.AROUND,
        function=apply_vocab_mask,
        what="Masks logits that are on a CPU.",
        why="SGLang has kernels for accelerators alone, and raises.",
        relies_on=("srt/constrained/xgrammar_backend.py:137",),
        retire_when="A release that serves grammars on a CPU is the oldest supported.",
        family=upstream.OLDER,
    ),
)
