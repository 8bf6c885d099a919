"""Run SGLang's own speculative decoding on a CPU: attention of its drafts, and a missing wheel."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from sglang_smc.cpu.attention import CpuAttentionBackend, columns

from .trees import places_in_mask, tree_of_mask

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftStep(CpuAttentionBackend):
    """The attention of pass ``step`` of the draft, over a row for each branch of each request.

    Branch ``b`` has written to the ``step`` slots from ``num_steps * b`` on after the request's
    sequence, and now writes to the next.
    """

    def __init__(self, runner: ModelRunner, topk: int, num_steps: int, step: int) -> None:
        super().__init__(runner)
        self.topk = topk
        self.num_steps = num_steps
        self.step = step

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the calls of this pass; ``seq_lens`` excludes draft tokens."""
        if forward_batch.forward_mode.is_idle():
            return
        rows = forward_batch.req_pool_indices.repeat_interleave(self.topk)
        text = forward_batch.seq_lens.long().repeat_interleave(self.topk)
        branch = torch.arange(self.topk).repeat(len(forward_batch.seq_lens))
        req_to_token = self.req_to_token_pool.req_to_token

        def slots_of(index: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
            column = columns(kv_lens)
            own = (column >= text[index, None]) * branch[index, None] * self.num_steps
            return req_to_token[rows[index, None], column + own]

        ones = torch.ones_like(text)
        self.set_plan(slots_of=slots_of, prefix_lens=text + self.step, query_lens=ones)


class DraftSteps:
    """The attention of all passes of a round's draft, in the structure that SGLang expects."""

    def __init__(self, runner: ModelRunner, topk: int, num_steps: int) -> None:
        # The prediction of a last pass would not be verified.
        steps = range(num_steps - 1)
        self.attn_backends = [DraftStep(runner, topk, num_steps, step) for step in steps]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan all passes."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


class DraftExtend(CpuAttentionBackend):
    """The attention of the draft's pass over accepted tokens."""

    # SGLang sizes the masks of trees by them.
    needs_cpu_seq_lens = True


def tree_of(forward_batch: ForwardBatch) -> torch.Tensor | None:
    """Return which new tokens attend to which, ``[rows, width, width]`` bool; None for chains."""
    spec_info: Any = forward_batch.spec_info
    if not forward_batch.forward_mode.is_target_verify() or spec_info is None:
        return None
    if spec_info.custom_mask is None or spec_info.tree_topk == 1:
        return None
    places = places_in_mask(forward_batch.seq_lens, spec_info.draft_token_num)
    return spec_info.custom_mask[places].bool()


def stand_in_for_wheel() -> None:
    """Provide what NGRAM imports from SGLang's wheel of CUDA kernels, which needs `libcuda`."""
    wheel: Any = ModuleType("sgl_kernel.speculative")
    wheel.reconstruct_indices_from_tree_mask = tree_of_mask
    sys.modules[wheel.__name__] = wheel
