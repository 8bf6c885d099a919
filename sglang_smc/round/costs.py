"""Measure the cost of rounds on this machine when a server starts.

Sequences are short: the cost of reading the KV cache of long ones is not included.
"""

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from sglang_smc.models.chains import KVLocations
from sglang_smc.options.policy import COSTS_ENV, Costs, Curve, RoundCosts
from sglang_smc.proposers.base import DraftSlots
from sglang_smc.round.graph import Recordings, RoundGraphs
from sglang_smc.round.play import Steps
from sglang_smc.smc.distribution import TokenDistribution

logger = logging.getLogger(__name__)

AnyCosts = Costs | RoundCosts

_LARGEST = 2048  # tokens of a pass; far beyond the memory-bound region, where costs are linear
_REPEATS = 3


def costs_of(measure: Callable[[], AnyCosts], group: Any) -> AnyCosts:
    """Return costs from the environment, or measured ones: the same on all ranks of ``group``.

    Every rank must call it: passes of tensor-parallel models wait for each other.
    """
    given = os.environ.get(COSTS_ENV)
    if given is not None:
        return Costs.parse(given)
    start = time.perf_counter()
    found = group.broadcast_object(measure(), src=0)
    logger.info("SMC measured in %.1f s %s", time.perf_counter() - start, found)
    return found


def rehearse(steps: Steps) -> None:
    """Run each model once over a particle, so that an unsupported one fails at start.

    Raises:
        ValueError: if a model cannot run over particles; it includes the cause and a remedy.
    """
    passes = _Passes(steps)
    for name, run in (
        ("--speculative-draft-model-path", passes.begin),
        ("--speculative-draft-model-path", passes.draft),
        ("--model-path", passes.target),
    ):
        try:
            with torch.no_grad():
                run(1)
        except Exception as error:
            raise ValueError(
                f"{name} cannot run over particles: {type(error).__name__}: {error}. {_cure(error)}"
            ) from error


def _cure(error: Exception) -> str:
    """Return the remedy for a pass that raises: the cause may be a kernel, memory or the model."""
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_globals["__name__"].startswith("sglang_smc.kernels") for frame, _ in frames):
        return (
            "A kernel of sglang-smc fails: pass --speculative-smc-kernels torch, which is slower."
        )
    if isinstance(error, torch.OutOfMemoryError):
        return "Pass a smaller --mem-fraction-static, or a smaller --max-running-requests."
    return "Choose another model or another --speculative-algorithm."


def costs_of_passes(steps: Steps, most_tokens: int) -> Costs:
    """Return the costs of passes over up to ``most_tokens``."""
    passes = _Passes(steps)
    sizes = list(_sizes(min(most_tokens, _LARGEST)))
    at_once = steps.draft.at_once
    if at_once:  # two tokens per particle: the last, and a mask
        draft = Curve.of((2 * size, cost) for size, cost in passes.measure(sizes, passes.block))
    else:
        draft = Curve.of(passes.measure(sizes, passes.draft, passes.begin))
    target = Curve.of(passes.measure(sizes, passes.target))
    return Costs(draft, target, at_once=at_once)


def costs_of_recordings(recordings: Recordings, device: str) -> RoundCosts:
    """Measure captured rounds by replays in which all groups are padding.

    For each budget the kind of round that most requests use is measured.
    """

    def curve(of_budget: RoundGraphs) -> Curve:
        runs = ((size, partial(of_budget.replay_padding, size)) for size in of_budget.sizes)
        return Curve.of((size, _seconds(run, device)) for size, run in runs)

    return RoundCosts(
        {
            budget: curve(found[0])
            for budget, found in recordings.of_budget.items()
            if budget is not None
        }
    )


class _Passes:
    """Passes over SGLang's padding row, with its particles and its KV slot 0."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._ledger = steps.ledger
        self._ops = steps.ops
        self._device = steps.ledger.device

    def measure(
        self,
        sizes: list[int],
        run: Callable[[int], object],
        before: Callable[[int], object] | None = None,
    ) -> Iterator[tuple[int, float]]:
        """Yield sizes in tokens with the seconds of a pass over them; ``before`` is not timed."""
        with torch.no_grad():
            for size in sizes:
                if before is not None:
                    before(size)
                yield size, _seconds(partial(run, size), self._device.type)

    def begin(self, num_tokens: int) -> object:
        """Run the draft's first pass, after which others can follow."""
        at = self._slots(num_tokens)
        return self._steps.draft.first_logits(at.slots[:2].permute(1, 2, 0), at)

    def block(self, num_particles: int) -> object:
        """Run the single pass of a block head for one draft token each, and the draw."""
        at = self._slots(num_particles, num_steps=1)
        logits = self._steps.draft.first_logits(at.slots[:2].permute(1, 2, 0), at)
        return _distribution(logits).sample(self._ops, self._zeros(num_particles).double())

    def draft(self, num_tokens: int) -> object:
        """Run a later pass of the draft, and the draw of the next token of each."""
        at = self._slots(num_tokens)
        logits = self._steps.draft.next_logits(1, at.slots[0], at)
        return _distribution(logits).sample(self._ops, self._zeros(num_tokens).double())

    def target(self, num_tokens: int) -> object:
        """Run a forward pass of the target, and score each token."""
        at = self._slots(num_tokens)
        logits = self._steps.target.chain_logits(at.chains(at.slots[:1].permute(1, 2, 0), 0))
        return _distribution(logits).score(self._ops, self._zeros(num_tokens))

    def _slots(self, num_particles: int, num_steps: int = 2) -> DraftSlots:
        """Return the slots of a round with K draft tokens for particles of distinct requests."""
        rows = self._zeros(num_particles)
        slots = rows.view(1, -1, 1).repeat(num_steps + 2, 1, 1)  # [K + 2, G, 1]
        return DraftSlots(slots, slots + 1, self._locations(rows))

    def _locations(self, rows: torch.Tensor) -> KVLocations:
        return KVLocations(rows, rows + 1, self._ledger.particle_rows(rows, 1), max_tail=1)

    def _zeros(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=torch.int64, device=self._device)


def _seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest run but the first, which may compile and allocate."""
    times = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.get_device_module(device).synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _distribution(logits: torch.Tensor) -> TokenDistribution:
    logits = logits.flatten(0, -2)
    return TokenDistribution(logits, torch.ones(1, device=logits.device))


def _sizes(most: int) -> Iterator[int]:
    """Yield powers of two, up to the first that is not below ``most``."""
    size = 1
    yield size
    while size < most:
        size *= 2
        yield size
