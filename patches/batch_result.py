"""Make the scheduler wait for a round's result where rules need it, and record its statistics."""

from collections.abc import Callable
from functools import partial

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_smc.process import is_smc
from sglang_smc.round.result import SMCBatchResult
from sglang_smc.rules.registry import needs_host
from sglang_smc.server.hooks import Hooks
from sglang_smc.state.request import find_state

PATCHES = Hooks()


@PATCHES.on(
    "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
    "srt/managers/scheduler.py:1744 (asks once a loop, after the batch is chosen)",
    "srt/managers/scheduler.py:1789 (what structured output waits by is the model)",
    why="Particles are searched for stop texts in every round, before they are weighed, and "
    "processors read texts: that needs what is emitted on the host. SGLang waits so for "
    "structured output, and for nothing else.",
    retire_when="Stop texts are matched on the device.",
)
def is_disable_overlap_for_batch(
    original: Callable,
    scheduler: Scheduler,
    batch: ScheduleBatch | None,
    last_batch: ScheduleBatch | None,
) -> bool:
    """Wait for the last round's result where a request's rule reads texts on the host.

    Such rules are stop strings and patterns, custom logit processors, potentials.
    """
    if original(scheduler, batch, last_batch):
        return True
    if batch is None or not (is_smc(scheduler.server_args) and scheduler.result_queue):
        return False
    return batch.forward_mode.is_decode() and any(map(needs_host, batch.reqs))


@PATCHES.on(
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    "srt/managers/scheduler_components/batch_result_processor.py:624",
    "srt/managers/schedule_batch.py:1192 (the histogram)",
    why="SGLang books `accept_len - 1`, which is -1 for a round that emits nothing, and an "
    "index error in the histogram.",
    retire_when="A result may carry its own number of correct drafts per request.",
)
def resolve_tokens(
    original: Callable,
    processor: SchedulerBatchResultProcessor,
    result: GenerationBatchResult,
    batch: ScheduleBatch,
) -> list[list[int]]:
    """Book the columns that an SMC round kept as its correct drafts, and its counters."""
    if not isinstance(result, SMCBatchResult):
        return original(processor, result, batch)
    return result.resolve(batch, lambda: original(processor, result, batch))


@PATCHES.on(
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._maybe_update_reasoning_tokens",
    "srt/managers/scheduler_components/batch_result_processor.py:1048 (before the look for an end)",
    "srt/managers/schedule_batch.py:1555 (drops the answer from the cache where there are any)",
    why="SGLang counts all tokens of a step as thoughts before it looks for the answer's end, and "
    "a first token that may change as it is then.",
    retire_when="SGLang counts thoughts up to the answer's end.",
)
def count_thoughts(
    original: Callable, processor: SchedulerBatchResultProcessor, req: Req, tokens: int | list[int]
) -> None:
    """Count as SGLang does, and keep how, for `state.thoughts` to count once the end is known."""
    original(processor, req, tokens)
    if (state := find_state(req)) is not None:
        state.count_thoughts = partial(original, processor)
