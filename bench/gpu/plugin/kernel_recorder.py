"""Record the kernels of some rounds with torch's profiler, including those of replayed CUDA graphs.

Kernels of one replay share the correlation id of its launch; kernels launched one by one have each
their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

#: Rounds at the start of a burst that are not recorded, until all requests have arrived.
SKIPPED = 4


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
            self._start()
        elif self.is_recording and place == SKIPPED + self._number:
            self._recorded = self._stop()

    def take(self) -> dict[str, Any] | None:
        """Return the kernels recorded since the last call; None if the burst was too short."""
        if self.is_recording:
            self._stop()
        found, self._recorded = self._recorded, None
        return found

    def _start(self) -> None:
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.start()

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
