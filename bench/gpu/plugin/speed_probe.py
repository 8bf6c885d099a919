"""Time rounds in SGLang's scheduler, and record the kernels of some, by a plugin of SGLang.

SGLang loads it if this folder is on the path; it is active if `SPEED_PROBE_OUT` names a file.
Whenever the scheduler becomes idle, a line of JSON with its steps since the last line is appended.
Kernels are those that torch's profiler sees, also of replayed CUDA graphs: those of one replay
share the correlation id of its launch; kernels launched one by one have each their own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

OUT, KERNELS = "SPEED_PROBE_OUT", "SPEED_PROBE_KERNELS"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
#: Rounds at the start of a burst that are not recorded, until all requests have arrived.
SKIPPED = 4

#: A point in time: seconds, or a CUDA event.
Moment = Any


def register() -> None:
    """Install hooks in schedulers; SGLang calls this in every process, but only they match."""
    if OUT not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    probe = Probe(os.environ[OUT], KernelRecorder(int(os.environ.get(KERNELS, "0"))))
    HookRegistry.register(f"{SCHEDULER}.init_model_worker", probe.built, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.run_batch", probe.ran, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.maybe_sleep_on_idle", probe.idle, HookType.AROUND)


def now() -> Moment:
    """Return the current time, on a GPU that of the end of the queued work."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments; wait until the GPU has passed both."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


class Probe:
    """Steps and rounds of one scheduler since it was last idle."""

    def __init__(self, path: str, recorder: KernelRecorder) -> None:
        self._path, self._recorder = path, recorder
        self._steps: list[tuple[Moment, int]] = []  # each decode step's start and batch size
        self._rounds: list[tuple[Moment, Moment, int, bool]] = []  # ends, batch, is recorded

    def built(self, original: Callable[..., Any], scheduler: Any) -> None:
        """Wrap the scheduler's worker once it is built, to time the rounds of an SMC worker."""
        original(scheduler)
        worker = getattr(scheduler, "draft_worker", None)
        if hasattr(worker, "launch_round"):
            worker.launch_round = self._timed(worker.launch_round)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def timed(batch: Any) -> Any:
            self._recorder.before(len(self._rounds))
            start = now()
            result = original(batch)
            self._rounds.append((start, now(), len(batch.reqs), self._recorder.is_recording))
            return result

        return timed

    def ran(self, original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any) -> Any:
        """Record the start of each decode step."""
        if batch.forward_mode.is_decode():
            self._steps.append((now(), len(batch.reqs)))
        return original(scheduler, batch, *rest)

    def idle(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Write the timings when the scheduler is idle."""
        if self._steps:
            origin = self._steps[0][0]
            content = {
                "steps": [[seconds(origin, moment), size] for moment, size in self._steps],
                "rounds": [
                    {"batch": batch, "recorded": recorded, "round": seconds(start, end)}
                    for start, end, batch, recorded in self._rounds
                ],
                "kernels": self._recorder.take(),
            }
            self._steps, self._rounds = [], []
            with open(self._path, "a") as file:
                file.write(json.dumps(content) + "\n")
        return original(scheduler)


class KernelRecorder:
    """Recorder of ``number`` rounds of each burst that is long enough; of none for 0."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._profiler: Any = None
        self._recorded: dict[str, Any] | None = None

    @property
    def is_recording(self) -> bool:
        return self._profiler is not None

    def before(self, place: int) -> None:
        """Start or stop recording before round ``place`` of a burst, counted from 0."""
        if self._number and place == SKIPPED:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler.start()
        elif self.is_recording and place == SKIPPED + self._number:
            self._recorded = self._stop()

    def take(self) -> dict[str, Any] | None:
        """Return the kernels recorded since the last call; None if the burst was too short."""
        if self.is_recording:
            self._stop()
        found, self._recorded = self._recorded, None
        return found

    def _stop(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return kernels_of(profiler.profiler.kineto_results.events())


def kernels_of(events: Iterable[Any]) -> dict[str, Any]:
    """Return kernels as ``[name index, start, duration, launch]``, in nanoseconds."""
    names: dict[str, int] = {}
    found = [
        [
            names.setdefault(event.name(), len(names)),
            event.start_ns(),
            event.duration_ns(),
            event.correlation_id(),
        ]
        for event in events
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    ]
    origin = min((start for _, start, _, _ in found), default=0)
    return {
        "names": list(names),
        "events": [[name, start - origin, *rest] for name, start, *rest in found],
    }
