"""Admit a request only when its arena fits beside it.

SGLang's budget counts prompt and expected output. Without the arena a full pool would admit a
request, retract it at its first round, and admit it again.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.tp_worker import TpModelWorker

from sglang_smc import process, upstream
from sglang_smc.kv import arena
from sglang_smc.process import active, active_config
from sglang_smc.server.hooks import Hooks
from sglang_smc.state.request import num_new

PATCHES = Hooks(retire_when="Admission asks the algorithm what a request reserves.")


@PATCHES.on(
    "sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
    "srt/managers/schedule_policy.py:477 (the two offsets of the budget)",
    why="The adder's budget has no seam for memory beyond a request's own tokens.",
)
def init_budget(original: Callable, adder: PrefillAdder, *args: Any, **kwargs: Any) -> None:
    """Charge the arenas that running requests have yet to reserve."""
    original(adder, *args, **kwargs)
    config = active_config()
    if config is None:
        return
    running = adder.running_batch.reqs if adder.running_batch is not None else []
    pending = sum(
        num_new(arena.sizes_of(config, req, active.budget), req)
        for req in running
        if upstream.holds_kv(req)  # else it has finished and waits to be filtered out
    )
    upstream.charge(adder, pending)


@PATCHES.on(
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
    "srt/managers/schedule_policy.py:1395 (who is admitted is in can_run_list)",
    "srt/managers/schedule_policy.py:1241 (as are those of add_one_req_ignore_eos)",
    why="The adder charges a request's prompt and output, and has no seam for more.",
)
def add_one_req(
    original: Callable, adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> Any:
    """Admit a request only if its own arena, by its own mode, fits beside it."""
    admitted = len(adder.can_run_list)
    charged = _charge(adder, req)
    result = original(adder, req, *args, **kwargs)
    if len(adder.can_run_list) == admitted:
        upstream.charge(adder, -charged)
    return result


@PATCHES.on(
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
    "srt/managers/schedule_policy.py:1140",
    why="The adder charges a request's prompt and output, and has no seam for more.",
)
def add_chunked_req(original: Callable, adder: PrefillAdder, req: Req) -> Any:
    """Charge the arena of a request whose prompt is prefilled in chunks."""
    result = original(adder, req)
    _charge(adder, req)
    return result


@PATCHES.on(
    "sglang.srt.managers.schedule_policy.PrefillAdder.preempt_to_schedule",
    "srt/managers/schedule_policy.py:1707",
    why="Else others would give way to a request that is then not admitted.",
)
def preempt_to_schedule(
    original: Callable, adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
) -> bool:
    """Count a request's arena in what must be free before others are preempted for it."""
    charged = _charge(adder, req)
    result = original(adder, req, *args, **kwargs)
    upstream.charge(adder, -charged)
    return result


def _charge(adder: PrefillAdder, req: Req) -> int:
    """Charge the slots that a request will own beside its text; none without SMC."""
    config = active_config()
    num_slots = 0 if config is None else arena.arena_of(config, req, active.budget)
    upstream.charge(adder, num_slots)
    return num_slots


@PATCHES.on(
    "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
    "srt/managers/tp_worker.py:508 (the order of the tuple)",
    why="A request that fits the pool but not beside its arena would wait for ever.",
    retire_when="The longest request may depend on what the algorithm reserves.",
)
def worker_info(original: Callable, worker: TpModelWorker) -> tuple:
    """Reduce the longest request by an arena, and log once what memory requests take."""
    info = original(worker)
    config = active_config()
    if config is None:
        return info
    longest = arena.longest(config, info[_MAX_TOTAL], info[_MAX_REQ_LEN])
    process.log_memory_report(num_slots=info[_MAX_TOTAL], most_running=info[_MOST_RUNNING])
    told = list(info)
    told[_MAX_REQ_LEN] = longest
    told[_MAX_INPUT_LEN] = longest - arena.INPUT_MARGIN
    return tuple(told)


@PATCHES.on(
    "sglang.srt.managers.utils.validate_input_length",
    "srt/managers/utils.py:258 (answers with the error, or None)",
    why="It names a number of tokens that follows from no flag, and no way to raise it.",
    retire_when="The longest request may depend on what the algorithm reserves.",
)
def validate_input_length(
    original: Callable, req: Req, max_req_input_len: int, allow_auto_truncate: bool
) -> str | None:
    """Add to the error for a long request what else the pool must hold, and what helps."""
    error = original(req, max_req_input_len, allow_auto_truncate)
    memory = active.memory
    if error is None or memory is None or not memory.is_shortened:
        return error
    config = active_config()
    assert config is not None, "a process that knows of SMC's memory runs it"
    return (
        f"{error} This server's KV pool holds {memory.pool_slots} tokens, of which "
        f"{arena.max_arena(config)} are kept for the particles of one request "
        "(docs/architecture.md). Longer requests want a larger --max-total-tokens or "
        "--mem-fraction-static, or a smaller --speculative-smc-max-lag or "
        "--speculative-smc-num-particles."
    )


# Indices into the tuple that TpModelWorker.get_worker_info returns.
_MAX_TOTAL = 0
_MOST_RUNNING = 2
_MAX_REQ_LEN = 4
_MAX_INPUT_LEN = 5
