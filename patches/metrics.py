"""Report SMC's totals beside SGLang's: on /metrics, and in each scheduler's internal state."""

import logging
from collections.abc import Callable
from typing import Any, cast

from sglang.srt.managers.io_struct import (
    GetInternalStateReq,
    GetInternalStateReqOutput,
    SetInternalStateReq,
    SetInternalStateReqOutput,
)
from sglang.srt.managers.scheduler import Scheduler

from sglang_smc.options.request import apply_budget, request_config
from sglang_smc.options.server import SERVER_ARGS_FIELDS
from sglang_smc.process import active, config_of, is_smc
from sglang_smc.server.hooks import Hooks
from sglang_smc.state.metrics import finite
from sglang_smc.state.request import find_state
from sglang_smc.worker import SMCWorker

logger = logging.getLogger(__name__)

# Settings that SGLang can change in a running server, and SMC does not use.
_UNREAD = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


PATCHES = Hooks()


@PATCHES.on(
    "sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter",
    "srt/managers/scheduler.py:1174 (an override point, after the worker is built)",
    "srt/observability/metrics_collector.py:238 (labels, and the classes of metrics)",
    why="Workers are built without it. `stat_loggers` replaces the whole collector, by a "
    "class that is the user's to choose.",
    retire_when="A worker may register metrics of its own.",
)
def init_metrics_reporter(
    original: Callable, scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """Pass SGLang's metrics reporter to the worker, to export sglang_spec_smc_* as it does."""
    original(scheduler, *args, **kwargs)
    if is_smc(scheduler.server_args):
        _worker(scheduler).monitor.report_as(scheduler.metrics_reporter)


@PATCHES.on(
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    "srt/managers/scheduler.py:4163 (internal_state is a plain dictionary)",
    why="It asks one algorithm, DSpark, for what it has to add.",
    retire_when="BaseSpecWorker has an internal state to show.",
)
def get_internal_state(
    original: Callable, scheduler: Scheduler, recv_req: GetInternalStateReq
) -> GetInternalStateReqOutput:
    """Add `smc` to each internal state that /server_info shows.

    It has settings, N and K in force, totals since the start, fidelity, memory, costs of rounds if
    N and K adapt, what draft layers a server has chosen, and requests that run.
    """
    output = original(scheduler, recv_req)
    if is_smc(scheduler.server_args):
        output.internal_state["smc"] = _state(scheduler)
    return output


def _worker(scheduler: Scheduler) -> "SMCWorker":
    """Return the worker, which is SMC's where the server arguments select SMC."""
    return cast("SMCWorker", scheduler.draft_worker)


def _state(scheduler: Scheduler) -> dict[str, Any]:
    worker = _worker(scheduler)
    monitor = worker.monitor
    config = monitor.dial.with_threshold(request_config(config_of(scheduler.server_args), None))
    now = apply_budget(config, active.budget)
    names = (name for name in SERVER_ARGS_FIELDS if name != "evidence_threshold")
    table = active.memory
    costs = None if active.policy is None else active.policy.costs
    threshold = finite(config.effective_evidence_threshold)  # None: verify all
    return {
        "settings": {name: getattr(config, name) for name in names}
        | {"evidence_threshold": threshold, "max_lag": config.lag},
        "chosen": worker.reason_of_sizes,  # where these N and K come from
        # Smaller than the settings while the server adapts to its load.
        "in_force": {name: getattr(now, name) for name in ("mode", "num_particles", "num_steps")},
        "since_start": monitor.totals(),
        "fidelity": monitor.fidelity(),
        "memory": None if table is None else table.as_dict(),
        "costs": None if costs is None else costs.as_dict(),
        "reason": None if active.policy is None else active.policy.reason,
        "draft_layers": worker.draft_layers(),
        "running": _running(scheduler),
    }


MOST_TOLD = 64
"""The most requests in an internal state."""


def _running(scheduler: Scheduler) -> list[dict[str, Any]]:
    """Return the requests that decode, in descending order of rounds."""
    begun = [
        state.progress(req.rid, len(req.output_ids))
        for req in scheduler.running_batch.reqs
        if (state := find_state(req)) is not None and not req.finished()
    ]
    return sorted(begun, key=lambda one: one["rounds"], reverse=True)[:MOST_TOLD]


@PATCHES.on(
    "sglang.srt.managers.scheduler.Scheduler.set_internal_state",
    "srt/managers/scheduler.py:4219 (the names it lets through)",
    why="They would be accepted and have no effect.",
    retire_when="SGLang asks the algorithm which of its settings may change.",
)
def set_internal_state(
    original: Callable, scheduler: Scheduler, recv_req: SetInternalStateReq
) -> Any:
    """Refuse to set the acceptance thresholds of other algorithms."""
    unread = [name for name in _UNREAD if name in recv_req.server_args]
    if not (is_smc(scheduler.server_args) and unread):
        return original(scheduler, recv_req)
    logger.warning("SMC reads no %s: nothing is updated.", " and no ".join(unread))
    return SetInternalStateReqOutput(updated=False)
