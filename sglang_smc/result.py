"""The result of a round, and how the scheduler's books take it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_smc.diagnostics import IntervalLog

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


@dataclass
class SMCBatchResult(GenerationBatchResult):
    """A `GenerationBatchResult` with what SMC adds; filled by the worker, read on the host."""

    num_kept_columns: torch.Tensor | None = None  # [G] drafted tokens that the round kept
    counters: torch.Tensor | None = None  # [G, len(Counters)] float64
    log: IntervalLog | None = None

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Copy our tensors along with SGLang's."""
        assert self.num_kept_columns is not None and self.counters is not None
        self.num_kept_columns = self.num_kept_columns.to("cpu", non_blocking=True)
        self.counters = self.counters.to("cpu", non_blocking=True)
        super().copy_to_cpu(*args, **kwargs)

    def resolve(
        self, batch: "ScheduleBatch", resolve: Callable[[], list[list[int]]]
    ) -> list[list[int]]:
        """Run SGLang's ``resolve`` of the emitted tokens, with SMC's statistics for its own.

        SGLang takes what a round emits, less one, for correct drafts. An SMC round may emit
        nothing, or several rounds' tokens at once; what is true is how many columns it kept.
        """
        assert self.num_kept_columns is not None and self.counters is not None
        assert self.log is not None
        kept = self.num_kept_columns.tolist()
        live = [not (req.is_retracted or req.finished()) for req in batch.reqs]
        before = [_set_aside(req) for req in batch.reqs]
        tokens = resolve()
        self.num_correct_drafts, self.num_correct_drafts_per_req_cpu = sum(kept), kept
        totals = self.counters.tolist()
        for i, req in enumerate(batch.reqs):
            req.spec_num_correct_drafts, req.spec_correct_drafts_histogram = before[i]
            if live[i]:
                req.spec_num_correct_drafts += kept[i]
                req.update_spec_correct_drafts_histogram(kept[i])
                run = req.smc_run  # type: ignore[attr-defined]
                self.log.add(run.counters, totals[i])
                run.counters = totals[i]
        self.log.end_round()
        return tokens


def _set_aside(req: "Req") -> tuple[int, list[int]]:
    """Take a request's accept statistics, and leave a histogram that even -1 can index."""
    saved = req.spec_num_correct_drafts, req.spec_correct_drafts_histogram
    req.spec_correct_drafts_histogram = [0]
    return saved
