"""Time SGLang's scheduler by a plugin of SGLang that adds nothing but clocks.

SGLang loads it if this folder is on the path; it is active if `SPEED_PROBE_OUT` names a file.
Whenever the scheduler becomes idle, a line of JSON with its steps since the last line is appended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gpu.plugin.kernel_recorder import KernelRecorder

OUT, EVERY = "SPEED_PROBE_OUT", "SPEED_PROBE_FORWARDS_EVERY"
KERNELS = "SPEED_PROBE_KERNELS"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
#: The methods that run a model over particles.
FORWARDS = ("first_logits", "next_logits", "chain_logits", "decode", "verify")
#: Methods of a round beside its steps, and their displayed names.
OWN_PARTS = {"_load_round": "open", "_commit": "commit"}
#: Number of times that a round's forwards are repeated, back to back.
REPEATS = 3

#: A point in time: seconds, or a CUDA event.
Moment = Any


def register() -> None:
    """Install hooks in schedulers; SGLang calls this in every process, but only they match."""
    if OUT not in os.environ:
        return
    from kernel_recorder import KernelRecorder  # SGLang has this folder on its path
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = KernelRecorder(int(os.environ.get(KERNELS, "0")))
    probe = Probe(os.environ[OUT], int(os.environ.get(EVERY, "0")), recorder)
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

    def __init__(self, path: str, forwards_every: int, recorder: KernelRecorder) -> None:
        self._path, self._forwards_every = path, forwards_every
        self._recorder = recorder
        self._steps: list[tuple[Moment, int]] = []  # each decode step's start and batch size
        self._rounds: list[Round] = []
        self._open: Round | None = None
        self._num_rounds = 0

    def built(self, original: Callable[..., Any], scheduler: Any) -> None:
        """Wrap the scheduler's worker once it is built, to time the rounds of an SMC worker."""
        original(scheduler)
        worker = getattr(scheduler, "draft_worker", None)
        if self._forwards_every and hasattr(worker, "launch_round"):
            self._wrap(worker)

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
                "rounds": [one.content() for one in self._rounds],
                "kernels": self._recorder.take(),
            }
            self._steps, self._rounds = [], []
            with open(self._path, "a") as file:
                file.write(json.dumps(content) + "\n")
        return original(scheduler)

    def _wrap(self, worker: Any) -> None:
        steps = worker._steps
        for name in public_methods(steps):
            setattr(steps, name, self._part(name, getattr(steps, name)))
        for name, shown in OWN_PARTS.items():
            setattr(worker._round, name, self._part(shown, getattr(worker._round, name)))
        for model in ("draft", "target"):
            forward = getattr(steps, model)
            for name in set(FORWARDS) & set(public_methods(forward)):
                setattr(forward, name, self._forward(model, getattr(forward, name)))
        worker.launch_round = self._round(worker.launch_round)

    def _round(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def timed(batch: Any) -> Any:
            self._num_rounds += 1
            self._recorder.before(len(self._rounds))
            self._open = Round(len(batch.reqs), self._recorder.is_recording)
            result = original(batch)
            self._open.end = now()
            self._rounds.append(self._open)
            self._open = None
            return result

        return timed

    def _part(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Time a part of a round; one called by another part counts as that one."""

        @wraps(original)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            one = self._open
            if one is None or one.is_inside:
                return original(*arguments, **keywords)
            one.is_inside, start = True, now()
            result = original(*arguments, **keywords)
            one.parts.append((name, start, now()))
            one.is_inside = False
            return result

        return timed

    def _forward(self, model: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Time a forward; one called by another forward counts as that one."""

        @wraps(original)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            one = self._open
            if one is None or one.is_forwarding:
                return original(*arguments, **keywords)
            one.is_forwarding, start = True, now()
            result = original(*arguments, **keywords)
            part = len(one.parts)  # index of the enclosing part, once it is closed
            one.forwards.append((model, part, start, now()))
            one.calls.append(lambda: original(*arguments, **keywords))
            # The target's forward is the last of a round; its tables are unchanged since the
            # forwards.
            if model == "target" and self._num_rounds % self._forwards_every == 0:
                one.run_alone()
            one.is_forwarding = False
            return result

        return timed


class Round:
    """The timestamps of one round."""

    def __init__(self, batch: int, is_recorded: bool) -> None:
        self.batch, self.is_recorded = batch, is_recorded
        self.start, self.end = now(), now()
        self.parts: list[tuple[str, Moment, Moment]] = []
        self.forwards: list[tuple[str, int, Moment, Moment]] = []
        self.calls: list[Callable[[], Any]] = []
        self.alone: tuple[int, Moment, Moment] | None = None
        self.is_inside = self.is_forwarding = False

    def run_alone(self) -> None:
        """Run the very same forwards again: same rows, tokens, tables and slots.

        They rewrite the keys and values that are already in these slots.
        """
        start = now()
        for call in self.calls * REPEATS:
            call()
        self.alone = len(self.parts), start, now()

    def content(self) -> dict[str, Any]:
        """Return seconds of the round, its forwards and its other parts, without `alone`."""
        part, alone = -1, 0.0
        if self.alone is not None:
            part, *ends = self.alone
            alone = seconds(*ends)
        parts: dict[str, float] = {}
        for place, (name, start, end) in enumerate(self.parts):
            inside = sum(seconds(*moments) for _, at, *moments in self.forwards if at == place)
            rest = seconds(start, end) - inside - (alone if place == part else 0.0)
            parts[name] = parts.get(name, 0.0) + rest
        forwards: dict[str, float] = {}
        for model, _, *moments in self.forwards:
            forwards[model] = forwards.get(model, 0.0) + seconds(*moments)
        return {
            "batch": self.batch,
            "recorded": self.is_recorded,
            "round": seconds(self.start, self.end) - alone,
            "forwards": forwards,
            "alone": alone / REPEATS if self.alone else None,
            "parts": parts,
        }


def public_methods(instance: Any) -> list[str]:
    """Return the names of the public methods of an object's class."""
    return [
        name for name, value in vars(type(instance)).items() if callable(value) and name[0] != "_"
    ]
