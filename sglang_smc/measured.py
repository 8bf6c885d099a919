"""What passes cost on this machine, measured as a server starts.

Short texts: what long ones add, to read their keys, is no part of it.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_smc.adaptive import COSTS_ENV, Costs, Curve
from sglang_smc.forward import ParticleForward, Places
from sglang_smc.law import Law
from sglang_smc.ledger import Ledger
from sglang_smc.ops import Ops
from sglang_smc.steps import Steps

logger = logging.getLogger(__name__)

_LARGEST = 2048  # tokens of a pass; far beyond the memory-bound region, where costs are linear
_REPEATS = 3  # of which the fastest counts


def costs_of(steps: Steps, ledger: Ledger, ops: Ops, most_tokens: int, group: Any) -> Costs:
    """The costs of passes over up to ``most_tokens``, the same on all ranks of ``group``.

    Every rank must call it: passes of tensor-parallel models wait for each other.
    """
    given = os.environ.get(COSTS_ENV)
    if given is not None:
        return Costs.parse(given)
    start = time.perf_counter()
    passes = _Passes(steps, ledger, ops)
    sizes = list(_sizes(min(most_tokens, _LARGEST)))
    found = Costs(*(Curve.of(passes.measure(sizes, run)) for run in (passes.draft, passes.target)))
    found = group.broadcast_object(found, src=0)
    logger.info(
        "SMC measured its passes in %.1f s, milliseconds by tokens: draft %s, target %s",
        time.perf_counter() - start,
        *(_shown(curve) for curve in (found.draft, found.target)),
    )
    return found


class _Passes:
    """Passes over SGLang's padding row: its particles, and its KV slot 0."""

    def __init__(self, steps: Steps, ledger: Ledger, ops: Ops) -> None:
        self._steps = steps
        self._ledger = ledger
        self._ops = ops
        self._device = ledger.device

    def measure(
        self, sizes: list[int], run: Callable[[int], object]
    ) -> Iterator[tuple[int, float]]:
        """Sizes in tokens, and seconds of a pass over so many."""
        with torch.no_grad():
            for size in sizes:
                run(size)  # what is compiled or allocated once
                yield size, min(self._seconds(run, size) for _ in range(_REPEATS))

    def draft(self, num_tokens: int) -> object:
        """A forward of the draft and the draw behind each token."""
        logits = self._forward(self._steps.draft, ParticleForward.next_logits, num_tokens)
        return _law(logits).sample(self._ops, self._zeros(num_tokens).double())

    def target(self, num_tokens: int) -> object:
        """A forward of the target and the score of each token."""
        logits = self._forward(self._steps.target, ParticleForward.chain_logits, num_tokens)
        return _law(logits).score(self._ops, self._zeros(num_tokens))

    def _forward(self, model: ParticleForward, call: Callable, num_tokens: int) -> torch.Tensor:
        """Each token is a particle of its own request. Logits of any shape that ends in V."""
        rows, one = self._zeros(num_tokens), self._zeros(num_tokens) + 1
        places = Places(rows, one, self._ledger.particle_rows(rows, 1), max_tail=1)
        column = rows.view(-1, 1, 1)  # [G, 1, 1]
        return call(model, column, one.unsqueeze(1), column, places)

    def _zeros(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=torch.int64, device=self._device)

    def _seconds(self, run: Callable[[int], object], size: int) -> float:
        self._wait()
        start = time.perf_counter()
        run(size)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()


def _law(logits: torch.Tensor) -> Law:
    logits = logits.flatten(0, -2)
    return Law(logits, torch.ones(len(logits), device=logits.device))


def _sizes(most: int) -> Iterator[int]:
    """Powers of two, up to the first that is not below ``most``."""
    size = 1
    yield size
    while size < most:
        size *= 2
        yield size


def _shown(curve: Curve) -> str:
    return ", ".join(f"{tokens}: {1e3 * seconds:.3g}" for tokens, seconds in curve.points)
