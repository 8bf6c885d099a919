"""What a round emitted and kept, in the scheduler's books."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

from sglang_smc.round.result import SMCBatchResult
from sglang_smc.server.hooks import Patch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )
    from sglang.srt.managers.utils import GenerationBatchResult


def resolve_tokens(
    original: Callable,
    processor: "SchedulerBatchResultProcessor",
    result: "GenerationBatchResult",
    batch: "ScheduleBatch",
) -> list[list[int]]:
    """Resolve a round's tokens; an SMC result brings its own accept statistics."""
    if not isinstance(result, SMCBatchResult):
        return original(processor, result, batch)
    return result.resolve(batch, lambda: original(processor, result, batch))


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        hook_type=HookType.AROUND,
        function=resolve_tokens,
        what="Books the columns that an SMC round kept as its correct drafts, and its counters.",
        why="SGLang books `accept_len - 1`, which is -1 for a round that emits nothing, and an "
        "index error in the histogram.",
        relies_on=(
            "srt/managers/scheduler_components/batch_result_processor.py:624",
            "srt/managers/schedule_batch.py:1192 (the histogram)",
        ),
        retire_when="A result may carry its own number of correct drafts per request.",
    ),
)
