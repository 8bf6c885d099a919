"""A request is admitted only when its arena fits beside it.

SGLang's budget counts prompt and expected output. Without the arena a full pool would
admit a request, retract it at its first round, and admit it again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_smc import upstream
from sglang_smc.memory import arena
from sglang_smc.options.budget import apply_budget
from sglang_smc.process import active_budget, active_config
from sglang_smc.server.hooks import Patch
from sglang_smc.upstream import allocated, kv_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.tp_worker import TpModelWorker


def init_budget(original: Callable, adder: "PrefillAdder", *args: Any, **kwargs: Any) -> None:
    """Charge what running requests have yet to reserve, and room for any one more."""
    original(adder, *args, **kwargs)
    config = active_config()
    if config is None:
        return
    budget = active_budget()
    running = adder.running_batch.reqs if adder.running_batch is not None else []
    pending = sum(
        max(0, kv_of(req).kv_committed_len + arena.arena_of(config, req, budget) - allocated(req))
        for req in running
        if upstream.holds_kv(req)  # else it has finished and waits to be filtered out
    )
    upstream.charge(adder, pending + arena.max_arena(config))


def update_budget(
    original: Callable,
    adder: "PrefillAdder",
    prefix_len: int,
    extend_input_len: int,
    max_new_tokens: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Charge the arena of the request that has just been admitted."""
    original(adder, prefix_len, extend_input_len, max_new_tokens, *args, **kwargs)
    config = active_config()
    if config is not None:
        # 0 stands for a prompt that is prefilled in part: its output comes later.
        of_part = arena.max_arena(config)
        of_whole = arena.arena(apply_budget(config, active_budget()), max_new_tokens)
        upstream.charge(adder, of_whole if max_new_tokens else of_part)


def worker_info(original: Callable, worker: "TpModelWorker") -> tuple:
    """Shorten the longest request by an arena, so that what is accepted can be admitted."""
    info = original(worker)
    config = active_config()
    if config is None:
        return info
    longest = min(info[_MAX_REQ_LEN], info[_MAX_TOTAL] - arena.max_arena(config) - 1)
    return (*info[:_MAX_REQ_LEN], longest, longest - _INPUT_MARGIN, *info[_MAX_REQ_LEN + 2 :])


# Places in the tuple that TpModelWorker.get_worker_info returns.
_MAX_TOTAL, _MAX_REQ_LEN = 0, 4
_INPUT_MARGIN = 5  # what SGLang keeps between the longest request and its longest input

PATCHES = (
    Patch(
        target="sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
        hook_type=HookType.AROUND,
        function=init_budget,
        what="Charges the arenas that running requests have yet to reserve, and one for the next.",
        why="The adder's budget has no seam for memory beyond a request's own tokens.",
        relies_on=("srt/managers/schedule_policy.py:477 (the two offsets of the budget)",),
        retire_when="Admission asks the algorithm what a request reserves.",
    ),
    Patch(
        target="sglang.srt.managers.schedule_policy.PrefillAdder._update_prefill_budget",
        hook_type=HookType.AROUND,
        function=update_budget,
        what="Charges the arena of each request admitted.",
        why="The adder charges a request's prompt and output, and has no seam for more.",
        relies_on=("srt/managers/schedule_policy.py:741",),
        retire_when="Admission asks the algorithm what a request reserves.",
    ),
    Patch(
        target="sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
        hook_type=HookType.AROUND,
        function=worker_info,
        what="Lowers the longest request and input by the arena.",
        why="A request that fits the pool but not beside its arena would wait for ever.",
        relies_on=("srt/managers/tp_worker.py:508 (the order of the tuple)",),
        retire_when="The longest request may depend on what the algorithm reserves.",
    ),
)
