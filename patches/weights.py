"""Load new weights into a running server, or report why not."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_server_args

from sglang_smc import upstream
from sglang_smc.models.weight_update import (
    NO_DRAFT,
    name_of_kv,
    names_in,
    reason_not_to_name,
    reason_not_to_scale,
)
from sglang_smc.process import config_of, is_smc
from sglang_smc.server.hooks import Hooks

Update = Callable[[Callable, "SchedulerWeightUpdaterManager", Any], Any]
"""Runs an update by SGLang's own function; returns its response, or why there is none."""

_HELD = (
    "Requests hold KV of the present weights, and flush_cache is True. Allowed: no requests in "
    "progress, or ones that are paused with mode 'retract', which read their texts anew. With "
    "flush_cache False they go on from the KV that they have."
)
_STORED = (
    "A storage's keys name the checkpoints that a server starts with: KV of other weights would "
    "come back. Allowed: weights and --hicache-storage-backend as at start."
)
_COPIES = "ongoing_write_through", "ongoing_load_back"  # of a hierarchical cache
_LOADED_BY_MODELS = None, "flattened_bucket"
_NOT_BY_MODELS = (
    "; allowed: none or 'flattened_bucket', since weights of a draft in 8 bits, or its LM head "
    "with --speculative-token-map, are copies that the model's own loading renews. Leave it out."
)
_NOT_LOADED = (
    "Tensors cannot be read, or do not fit the model. Those before them in the list may be in "
    "place: send all of them again. "
)


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_UPDATER_FILE = "srt/managers/scheduler_components/weight_updater.py"
_HELD_WHY = (
    " SGLang loads the weights first, and asks later whether it can flush. It cannot while requests"
    " that are paused in place hold KV, which is refused, nor while a round is in flight, and with "
    "the overlap schedule one is as the last request ends."
)
_FILES = {
    "why": "A full disk leaves pages below 4,096 bytes empty files, which are never written again.",
    "retire_when": "SGLang compares the sizes of its files.",
}
_ALIKE = "SGLang takes it that a draft shares the target's checkpoint, or has its tensors."
PATCHES = Hooks(why=_ALIKE + _HELD_WHY)


def at_rest(output: Callable[..., Any]) -> Callable[[Update], Update]:
    """Decorate a hook on a kind of update: it returns `output`, and fails if requests hold KV."""

    def decorate(update: Update) -> Update:
        @wraps(update)
        def around(
            original: Callable, manager: SchedulerWeightUpdaterManager, recv_req: Any
        ) -> Any:
            scheduler = _scheduler(manager)
            if not is_smc(scheduler.server_args):
                return original(manager, recv_req)
            answer: Any = _held(scheduler, recv_req)
            if answer is None:
                with _at_rest(scheduler):
                    answer = update(original, manager, recv_req)
            return output(success=False, message=answer) if isinstance(answer, str) else answer

        return around

    return decorate


@PATCHES.on(
    _UPDATER + "update_weights_from_disk",
    _UPDATER_FILE + ":138 (every model from one path, a draft if there is one)",
    "srt/managers/scheduler.py:5817 (pause_generation)",
    "srt/model_executor/model_runner_components/weight_updater.py:235 (rolling back)",
    why=_ALIKE + " A load that fails half way reads the same files again to roll back, fails "
    "again, and ends the scheduler." + _HELD_WHY,
    retire_when="SGLang has a path for each model, and checks before it loads.",
)
@at_rest(io_struct.UpdateWeightFromDiskReqOutput)
def update_from_disk(
    original: Callable,
    manager: SchedulerWeightUpdaterManager,
    recv_req: io_struct.UpdateWeightFromDiskReqInput,
) -> Any:
    """Load the draft's checkpoint, if manifest names one, then the target's.

    Refuse checkpoints that do not fit what they replace, before either is loaded. The cache is
    flushed after both, so that no KV of the former weights is reused.
    """
    worker = manager.draft_worker
    reason = worker.reason_not_to_update(recv_req) or worker.load_draft(recv_req)
    return reason or _update_target(original, manager, recv_req)


@PATCHES.on(
    _UPDATER + "update_weights_from_ipc",
    _UPDATER_FILE + ":263 (every model, a draft if there is one)",
    retire_when="An update by IPC selects its model.",
)
@at_rest(io_struct.UpdateWeightsFromIPCReqOutput)
def update_from_ipc(
    original: Callable, manager: SchedulerWeightUpdaterManager, recv_req: Any
) -> Any:
    """Update the target alone: hide the draft, into which SGLang would load its weights."""
    return _update_target(original, manager, recv_req)


def _update_target(
    original: Callable, manager: SchedulerWeightUpdaterManager, recv_req: Any
) -> Any:
    """Hide the draft, into which SGLang would load the target's weights."""
    worker = manager.draft_worker
    manager.draft_worker = None
    try:
        return original(manager, recv_req)
    finally:
        manager.draft_worker = worker


@PATCHES.on(
    _UPDATER + "update_weights_from_distributed",
    _UPDATER_FILE + ":184 (which models load what was received)",
    retire_when="The selector is 'target' unless it is given.",
)
@at_rest(io_struct.UpdateWeightsFromDistributedReqOutput)
def update_from_distributed(
    original: Callable,
    manager: SchedulerWeightUpdaterManager,
    recv_req: io_struct.UpdateWeightsFromDistributedReqInput,
) -> Any:
    """Update one model, where the selector is 'all' the session's or the target."""
    return _unfit(manager, recv_req, recv_req.names) or original(manager, recv_req)


@PATCHES.on(
    _UPDATER + "update_weights_from_tensor",
    _UPDATER_FILE + ":232 (which models; the barrier at its end)",
    "srt/managers/tp_worker.py:194 (the payload is a pickle)",
    why=_ALIKE + _HELD_WHY + " What loading raises would end the scheduler.",
    retire_when="The selector is 'target' unless it is given, and a failure is an answer.",
)
@at_rest(io_struct.UpdateWeightsFromTensorReqOutput)
def update_from_tensor(
    original: Callable,
    manager: SchedulerWeightUpdaterManager,
    recv_req: io_struct.UpdateWeightsFromTensorReqInput,
) -> Any:
    """Update one model, as `update_from_distributed` does, or return what is wrong with tensors."""
    try:
        names = names_in(recv_req.serialized_named_tensors[0])
        problem = _unfit(manager, recv_req, names) or _past_loaders(manager, recv_req)
        return problem or original(manager, recv_req)
    except Exception as error:  # reported to the sender, whatever it is
        # Ranks that have loaded theirs wait here.
        torch.distributed.barrier(group=manager.tp_cpu_group)
        return _NOT_LOADED + str(error)


@PATCHES.on(
    _UPDATER + "flush_cache_after_weight_update",
    _UPDATER_FILE + ":103",
    "srt/managers/scheduler.py:3966 (is_fully_idle)",
    why="SGLang flushes only when nothing waits, yet requests that are paused with mode "
    "'retract' wait. It asserts, and the server would die.",
    retire_when="`upstream.OLDER` leaves: later a flush that cannot be is an answer.",
    family=upstream.OLDER,
)
def flush_after_update(
    original: Callable, manager: SchedulerWeightUpdaterManager, recv_req: Any
) -> None:
    """Flush the cache although requests wait, as those that are paused with mode 'retract' do."""
    scheduler = _scheduler(manager)
    waiting = scheduler.waiting_queue
    if is_smc(scheduler.server_args):
        scheduler.waiting_queue = []
    try:
        original(manager, recv_req)
    finally:
        scheduler.waiting_queue = waiting


@PATCHES.on(
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation",
    "srt/entrypoints/http_server.py:1581 (shows what is raised)",
    why="A scheduler that has requests ends at an assertion.",
    retire_when="Busy and repeated calls are answers.",
)
async def release_memory(
    original: Callable, manager: TokenizerManager, obj: Any, request: Any = None
) -> None:
    """Release the memory of a server at rest, once; all else is HTTP 400."""
    if not is_smc(manager.server_args):
        return await original(manager, obj, request)
    args = upstream.resolved(manager.server_args)
    if not args.enable_memory_saver:
        start = " on a CPU." if args.device == "cpu" else ": start it with --enable-memory-saver."
        raise ValueError(f"No memory can be released{start}")
    async with _turn(manager):
        obj.tags = _tags(obj, set(GPU_MEMORY_ALL_TYPES) - released(manager))
        released(manager).update(obj.tags)  # first, so that no request arrives in between
        try:
            if not (await manager.flush_cache()).success:
                raise ValueError("Requests run or wait; allowed: none. Abort them, or ask later.")
            await original(manager, obj, request)
        except BaseException:
            released(manager).difference_update(obj.tags)
            raise


@PATCHES.on(
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.resume_memory_occupation",
    "srt/entrypoints/http_server.py:1592",
    why="For what is not released SGLang's scheduler ends with a KeyError.",
    retire_when="Busy and repeated calls are answers.",
)
async def resume_memory(
    original: Callable, manager: TokenizerManager, obj: Any, request: Any = None
) -> None:
    """Resume memory that is released; all else is HTTP 400."""
    if not is_smc(manager.server_args):
        return await original(manager, obj, request)
    async with _turn(manager):
        obj.tags = _tags(obj, released(manager))
        await original(manager, obj, request)
        released(manager).difference_update(obj.tags)


@PATCHES.on(
    "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped",
    "srt/managers/scheduler.py:1836 (the route's handler)",
    why="A storage that is attached while the server runs passes by the check of its arguments.",
    retire_when="A storage's keys name the weights of all models whose KV it holds.",
    family=upstream.NEWEST,
)
def attach_storage(original: Callable, scheduler: Scheduler, recv_req: Any) -> Any:
    """Refuse to attach a storage to the hierarchical cache of a running server."""
    if not is_smc(scheduler.server_args):
        return original(scheduler, recv_req)
    return io_struct.AttachHiCacheStorageReqOutput(success=False, message=_STORED)


@PATCHES.on(
    "sglang.srt.managers.cache_controller.storage_model_name",
    "srt/managers/cache_controller.py:792 (the name in a storage's keys)",
    "srt/mem_cache/hybrid_cache/hybrid_cache_controller.py:1434 (no hit without the draft's KV)",
    why="Keys have the served model's name: KV of other weights or drafts would come back.",
    retire_when="A storage's keys name the weights of all models whose KV it holds.",
    family=upstream.NEWEST,
)
def name_storage(original: Callable, model_name: str | None, host_pool: Any) -> str | None:
    """Name a storage's keys by the checkpoints of target, draft and adapters."""
    server_args = get_server_args()
    return original(name_of_kv(server_args) if is_smc(server_args) else model_name, host_pool)


@PATCHES.on(
    "sglang.srt.mem_cache.hicache_storage.HiCacheFile.get",
    "srt/mem_cache/hicache_storage.py:858 (a page's file that is cut is an error, each time)",
    **_FILES,
    family=upstream.NEWEST,
)
@PATCHES.on(
    "sglang.srt.mem_cache.hicache_storage.HiCacheFile.set",
    "srt/mem_cache/hicache_storage.py:894 (asks for the name alone)",
    "srt/mem_cache/hicache_storage.py:909 (numpy ignores what fails as the file is closed)",
    **_FILES,
    family=upstream.NEWEST,
)
def keep_whole(original: Callable, storage: Any, key: str, page: Any, *args: Any) -> Any:
    """Remove a page's file of another size, before it is read or written and behind that."""
    _remove_cut(storage, key, page.nbytes)
    done = original(storage, key, page, *args)
    return None if _remove_cut(storage, key, page.nbytes) else done


def _remove_cut(storage: Any, key: str, size: int) -> bool:
    """Remove the file of a page if it has not so many bytes; return whether it had not."""
    name = storage._get_suffixed_key(key)
    path = Path(storage.file_path, f"{name}.bin")
    try:
        if path.stat().st_size == size:
            return False
        path.unlink()
    except OSError:  # there is none
        return False
    storage._evictor.abort(name)
    if storage.metadata_cache is not None:
        storage.metadata_cache.remove(name)
    return True


def released(manager: TokenizerManager) -> set[str]:
    """Return the tags of the memory that is released, as a set that the hooks change."""
    return vars(manager).setdefault("smc_released", set())


def _turn(manager: TokenizerManager) -> asyncio.Lock:
    """Return the lock that a release or resumption holds until the scheduler has answered."""
    return vars(manager).setdefault("smc_turn", asyncio.Lock())


def _unfit(manager: Any, recv_req: Any, names: Iterable[str]) -> str | None:
    """Select one model, and return why tensors of these names are not for it; None if they are."""
    upstream.select_one_model(manager, recv_req)
    is_drafts = getattr(recv_req, "selector", None) == "draft"
    if is_drafts and manager.draft_worker.draft_worker is None:
        return NO_DRAFT
    told = list(names)
    is_cpu = upstream.resolved(_scheduler(manager).server_args).device == "cpu"
    return (is_cpu and reason_not_to_scale(told)) or reason_not_to_name(told)


def _past_loaders(manager: Any, recv_req: Any) -> str | None:
    """Return why a payload would leave a draft's copies as they were; None if it would not."""
    is_drafts = getattr(recv_req, "selector", "draft") == "draft"
    if not is_drafts or recv_req.load_format in _LOADED_BY_MODELS:
        return None
    given = _scheduler(manager).server_args
    is_cut = upstream.resolved(given).speculative_token_map is not None
    has_copies = is_cut or config_of(given).draft_layers == "fused-int8"
    return f"load_format is {recv_req.load_format!r}{_NOT_BY_MODELS}" if has_copies else None


def _tags(obj: Any, allowed: set[str]) -> list[str]:
    """Return the tags of a request, all that are allowed for None; ValueError for others."""
    tags = set(obj.tags or allowed)
    if not tags or tags - allowed:
        raise ValueError(
            f"tags is {obj.tags}; allowed now: {', '.join(sorted(allowed)) or 'none'}."
        )
    return sorted(tags)


def _scheduler(manager: SchedulerWeightUpdaterManager) -> Scheduler:
    assert manager.scheduler is not None, "a scheduler hands itself to its manager"
    return manager.scheduler


def _held(scheduler: Scheduler, recv_req: Any) -> str | None:
    if upstream.resolved(scheduler.server_args).hicache_storage_backend is not None:
        return _STORED
    if not recv_req.flush_cache:
        return None
    # Unless the server is paused, SGLang has waited for all requests to end.
    runs = not scheduler.running_batch.is_empty() or scheduler.last_batch or scheduler.chunked_req
    return _HELD if (scheduler._engine_paused and runs) or len(scheduler.grammar_manager) else None


@contextmanager
def _at_rest(scheduler: Scheduler) -> Iterator[None]:
    """Pause a server that is not: with overlap, a round is in flight when the last request ends.

    SGLang would not flush then, nor while KV is copied to the host. Waiting requests own no KV.
    """
    is_paused = scheduler._engine_paused
    cache = cast(Any, scheduler.tree_cache)
    if not is_paused:
        scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
    while any(getattr(cache, copies, None) for copies in _COPIES):
        cache.check_hicache_events()
    try:
        yield
    finally:
        if not is_paused:
            resume = io_struct.ContinueGenerationReqInput(torch_empty_cache=False)
            scheduler.continue_generation(resume)
