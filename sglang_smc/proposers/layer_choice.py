"""Choose which passes of a draft run by fused layers: `--speculative-smc-draft-layers auto`.

When a server starts, passes of its draft are captured at the sizes of its rounds in three ways: by
SGLang's layers, by fused ones whose launches wait for each other, and by fused ones that overlap,
as rounds run them. Over changing tokens what overlaps must give the same bits as what waits, and
nearly SGLang's logits; else SGLang's layers run all passes. A size is fused where that is faster.

A wrong layer would change the draft's distribution alone, from which tokens are drawn and by which
they are weighed; never the law.
"""

import logging
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from sglang_smc.models.recorder import Replay

logger = logging.getLogger(__name__)

FASTER = 1.03
"""How many times as fast fused layers must be: noise chooses nothing."""

TOLERANCE = 0.1
"""How far logits may be from SGLang's over the largest: roundings of bfloat16, layer by layer."""

REPLAYS = 20
"""Passes over changing tokens that are compared, and passes that are timed at once."""

_TURNS = 5


class PassClock(NamedTuple):
    """Times passes."""

    wait: Callable[[], None]  # until the device has done all that was launched
    now: Callable[[], float] = time.perf_counter  # seconds


class Times(NamedTuple):
    """The milliseconds of a pass."""

    sglang: float
    fused: float

    @property
    def is_fused(self) -> bool:
        """Return whether fused layers are to run it."""
        return self.fused * FASTER <= self.sglang


class CapturedWay(NamedTuple):
    """A pass as it was captured in one way."""

    logits: torch.Tensor  # which a replay writes
    replay: Replay

    def read(self) -> torch.Tensor:
        """Return the logits for the tokens of now."""
        self.replay()
        return self.logits.clone()

    def milliseconds(self, clock: PassClock) -> float:
        """Return the time of a replay, of `REPLAYS` at once."""
        clock.wait()
        began = clock.now()
        for _ in range(REPLAYS):
            self.replay()
        clock.wait()
        return 1000 * (clock.now() - began) / REPLAYS


class LayerTrial(NamedTuple):
    """A pass over some rows, as it was captured in each way."""

    num_rows: int
    tokens: torch.Tensor  # int64 which it reads, below ``vocab_size``
    vocab_size: int
    sglang: CapturedWay
    in_order: CapturedWay
    overlapped: CapturedWay

    def fault(self) -> str | None:
        """Return in what fused layers are wrong; None if in nothing."""
        for _ in range(REPLAYS):  # what races is not found by one
            self.tokens.random_(self.vocab_size)
            sglang = self.sglang.read()
            in_order = self.in_order.read()
            if not torch.equal(self.overlapped.read(), in_order):
                return f"over {self.num_rows} rows launches that overlap give other bits"
            # Tokens that are never drafted have -inf in both.
            gap = torch.where(in_order == sglang, 0.0, in_order - sglang).abs().max()
            largest = sglang.where(sglang.isfinite(), 0.0).abs().max()
            if not gap <= TOLERANCE * largest:
                return f"over {self.num_rows} rows a logit is {float(gap / largest):.2g} apart"
        return None

    def times(self, clock: PassClock) -> Times:
        """Return medians of turns."""
        turns = [
            Times(self.sglang.milliseconds(clock), self.overlapped.milliseconds(clock))
            for _ in range(_TURNS)
        ]
        return Times(*map(statistics.median, zip(*turns, strict=True)))


class LayerChoice:
    """Which passes run by fused layers; larger ones than all that were timed run by SGLang's."""

    def __init__(self) -> None:
        self.is_open = True  # whether it is yet to be made
        self._times: dict[int, Times] = {}  # by rows, ascending
        self._reason: str | None = "nothing is measured where rounds are not captured"
        self._tries: bool | None = None  # what a trial asks for
        self._asked: list[int] = []

    def fuses(self, num_rows: int) -> bool:
        """Return whether a pass over so many rows runs by fused layers."""
        if self._tries is not None:
            self._asked.append(num_rows)
            return self._tries
        sizes = [*self._times]
        place = bisect_left(sizes, num_rows)
        return place < len(sizes) and self._times[sizes[place]].is_fused

    def trying(self, fuses: bool, run: Callable[[], Any]) -> Any:
        """Run a function by fused layers, or by SGLang's."""
        self._tries = fuses
        try:
            return run()
        finally:
            self._tries = None

    def rows_of(self, run: Callable[[], Any]) -> int:
        """Run a function by SGLang's layers, and return the rows of the last; 0 if it ran none."""
        self._asked.clear()
        self.trying(False, run)
        return self._asked[-1] if self._asked else 0

    def leave(self, reason: str) -> None:
        """Leave all passes to SGLang's layers, and log why."""
        self.is_open = False
        self._times = {}
        self._reason = reason
        logger.warning("--speculative-smc-draft-layers auto takes SGLang's layers: %s.", reason)

    def make(self, trials: Iterable[LayerTrial], clock: PassClock) -> None:
        """Compare and time passes, in ascending order of rows, and log what is chosen."""
        self.is_open = False
        self._reason = None
        for trial in trials:
            if (fault := trial.fault()) is not None:
                return self.leave(fault)
            self._times[trial.num_rows] = trial.times(clock)
        if not self._times:
            return self.leave("no pass of a captured size has rows for fused layers")
        logger.info("--speculative-smc-draft-layers auto: %s", self.as_dict()["passes"])

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for /server_info: passes in milliseconds, or why none is fused."""
        passes = [
            {"rows": rows, "layers": "fused" if one.is_fused else "sglang", **one._asdict()}
            for rows, one in self._times.items()
        ]
        return {"passes": passes, "reason": self._reason}
