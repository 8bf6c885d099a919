"""New weights for a running server, and what stands in their way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from sglang.srt.managers import io_struct
from sglang.srt.plugins.hook_registry import HookType

from sglang_smc.process import is_smc
from sglang_smc.server.hooks import Patch

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_HELD = (
    "Requests hold KV of the present weights, and flush_cache is True. Allowed: no requests in "
    "progress, or ones that are paused with mode 'retract', which read their texts anew. With "
    "flush_cache False they go on from the KV that they have."
)


def update_from_disk(
    original: Callable,
    manager: "SchedulerWeightUpdaterManager",
    recv_req: "io_struct.UpdateWeightFromDiskReqInput",
) -> Any:
    """Look at the checkpoints and at the requests in progress before anything is loaded."""
    if is_smc(_scheduler(manager).server_args):
        reason = _held(manager, recv_req) or manager.draft_worker.reason_not_to_update(recv_req)
        if reason is not None:
            return io_struct.UpdateWeightFromDiskReqOutput(success=False, message=reason)
    return original(manager, recv_req)


def unless_held(output: Callable[..., Any]) -> Callable:
    """A hook that looks at the requests in progress first, for an update that answers `output`."""

    def update(original: Callable, manager: "SchedulerWeightUpdaterManager", recv_req: Any) -> Any:
        reason = _held(manager, recv_req)
        if reason is not None:
            return output(success=False, message=reason)
        return original(manager, recv_req)

    return update


def flush_after_update(
    original: Callable, manager: "SchedulerWeightUpdaterManager", recv_req: Any
) -> None:
    """Flush although requests wait: these own no KV."""
    if not (is_smc(_scheduler(manager).server_args) and recv_req.flush_cache):
        original(manager, recv_req)
        return
    with _nothing_held(_scheduler(manager)):
        original(manager, recv_req)


def release_memory(original: Callable, manager: "TokenizerManager", *args: Any) -> Any:
    """Refuse, before a scheduler hears of it."""
    if is_smc(manager.server_args):
        _refuse_to_release()
    return original(manager, *args)


def _refuse_to_release() -> NoReturn:
    raise ValueError(
        "SMC gives no memory back while it runs: the draft's buffers and the tables of its "
        "particles would not return. Stop the server instead."
    )


def _scheduler(manager: "SchedulerWeightUpdaterManager") -> "Scheduler":
    assert manager.scheduler is not None, "a scheduler hands itself to its manager"
    return manager.scheduler


def _held(manager: "SchedulerWeightUpdaterManager", recv_req: Any) -> str | None:
    scheduler = _scheduler(manager)
    if not (is_smc(scheduler.server_args) and recv_req.flush_cache):
        return None
    # Of a server that is not paused SGLang has let all requests end before it asks.
    holds = scheduler._engine_paused and not _is_retracted(scheduler)
    return _HELD if holds or len(scheduler.grammar_manager) else None


def _is_retracted(scheduler: "Scheduler") -> bool:
    """Whether no request of a paused server owns KV."""
    is_running = not scheduler.running_batch.is_empty()
    return not (is_running or scheduler.last_batch or scheduler.chunked_req)


@contextmanager
def _nothing_held(scheduler: "Scheduler") -> Iterator[None]:
    """Take the results in flight, and hide the requests that wait, which SGLang counts as busy."""
    was_paused = scheduler._engine_paused
    scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        yield
    finally:
        scheduler.waiting_queue = waiting
        scheduler._engine_paused = was_paused


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_HELD_WHAT = "Refuses while requests that are paused in place hold KV that is to be flushed."
_HELD_WHY = "SGLang loads the weights, and then asserts that it could flush: the server would die."

PATCHES = (
    Patch(
        target=_UPDATER + "update_weights_from_disk",
        hook_type=HookType.AROUND,
        function=update_from_disk,
        what=_HELD_WHAT + " Refuses checkpoints that do not fit what they replace.",
        why=_HELD_WHY + " A load that fails half way reads the same files again to roll back, "
        "fails again, and ends the scheduler.",
        relies_on=(
            "srt/managers/scheduler_components/weight_updater.py:110 (target, then the worker's "
            "own update_weights_from_disk, then the flush)",
            "srt/model_executor/model_runner_components/weight_updater.py:189 (rolling back)",
        ),
        retire_when="SGLang checks before it loads.",
    ),
    Patch(
        target=_UPDATER + "update_weights_from_tensor",
        hook_type=HookType.AROUND,
        function=unless_held(io_struct.UpdateWeightsFromTensorReqOutput),
        what=_HELD_WHAT,
        why=_HELD_WHY,
        relies_on=("srt/managers/scheduler_components/weight_updater.py:158",),
        retire_when="SGLang checks that it can flush before it loads.",
    ),
    Patch(
        target=_UPDATER + "update_weights_from_distributed",
        hook_type=HookType.AROUND,
        function=unless_held(io_struct.UpdateWeightsFromDistributedReqOutput),
        what=_HELD_WHAT,
        why=_HELD_WHY,
        relies_on=("srt/managers/scheduler_components/weight_updater.py:143",),
        retire_when="SGLang checks that it can flush before it loads.",
    ),
    Patch(
        target=_UPDATER + "flush_cache_after_weight_update",
        hook_type=HookType.AROUND,
        function=flush_after_update,
        what="Takes the results in flight and hides waiting requests while the cache is flushed.",
        why="SGLang flushes only when nothing waits, yet requests that are paused with mode "
        "'retract' wait; and with the overlap schedule a round is in flight when the last "
        "request has ended. It asserts, and the server would die.",
        relies_on=(
            "srt/managers/scheduler_components/weight_updater.py:103",
            "srt/managers/scheduler.py:3966 (is_fully_idle)",
            "srt/managers/scheduler.py:4465 (pause_generation)",
        ),
        retire_when="A flush after an update waits, or reports that it could not.",
    ),
    Patch(
        target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
        ".release_memory_occupation",
        hook_type=HookType.AROUND,
        function=release_memory,
        what="Answers HTTP 400 to /release_memory_occupation.",
        why="SGLang restores the buffers of the target alone, and a busy scheduler dies at an "
        "assertion.",
        relies_on=("srt/entrypoints/http_server.py:1462 (shows what is raised)",),
        retire_when="Memory comes back for draft models, too.",
    ),
    Patch(
        target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
        ".resume_memory_occupation",
        hook_type=HookType.AROUND,
        function=release_memory,
        what="Answers HTTP 400 to /resume_memory_occupation.",
        why="Nothing was released; SGLang's own would end the scheduler with a KeyError.",
        relies_on=("srt/entrypoints/http_server.py:1474",),
        retire_when="Memory comes back for draft models, too.",
    ),
)
