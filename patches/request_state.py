"""How a request's state takes a round that emits nothing, and shows its totals at the end."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

from sglang_smc.hooks import Patch
from sglang_smc.runs import publish

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def update_finish_state(original: Callable, req: "Req", new_accepted_len: int = 1) -> None:
    """Look at new tokens only; with none, a request ends only if it is told to."""
    if new_accepted_len > 0 or req.to_finish:
        original(req, new_accepted_len)
    publish(req)


PATCHES = (
    Patch(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        hook_type=HookType.AROUND,
        function=update_finish_state,
        what="Skips the look for an end where a round emitted no token; hands a finished SMC "
        "request's totals to the streamer as customized_info.",
        why="`output_ids[-0:]` is the whole output: an old token would be taken for a new end. "
        "No other place sees every request's end, in prefill and decode, before it is streamed.",
        relies_on=(
            "srt/managers/schedule_batch.py:1568",
            "srt/managers/scheduler_components/output_streamer.py:592 (customized_info)",
        ),
        retire_when="update_finish_state(0) is a no-op upstream.",
    ),
)
