"""Counts the launches of one round of the package beside its models' own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy_laws import EOS, languages
from toy_worker import SlotModel, ToyWorker
from triton.runtime.interpreter import GridExecutor

from sglang_smc.ops.interface import Ops
from sglang_smc.options.server import SMCConfig
from sglang_smc.round import steps
from sglang_smc.round.batch import RoundInputs, shape_of_server
from sglang_smc.smc import exact

NO_LAUNCH = {"empty", "empty_like", "new_empty", "_unsafe_view", "scalar_tensor"}


class Launches(TorchDispatchMode):
    """Counts torch calls that do more than look at memory, and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self._depth = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in NO_LAUNCH:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        self.count += self._depth == 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within a kernel, or a model."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def count(config: SMCConfig, patch: pytest.MonkeyPatch, kernels: Ops) -> dict[str, int]:
    """Launches of one round as a server captures it: in all, of verification and of its walk."""
    toy = ToyWorker(config, *languages(), num_requests=1, max_new_tokens=60, eos=EOS, ops=kernels)
    reqs = toy.begin([1], torch.rand(1, dtype=torch.float64))
    launches, counts = Launches(), {}
    execute, chain_logits = GridExecutor.__call__, SlotModel.chain_logits

    def run_kernel(*args: Any, **kwargs: Any) -> None:
        launches.note()
        with launches.paused():
            execute(*args, **kwargs)

    def run_model(*args: Any) -> torch.Tensor:
        with launches.paused():
            return chain_logits(*args)

    def counted(name: str, step: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = launches.count
            result = step(*args, **kwargs)
            counts[name] = launches.count - before
            return result

        return run

    patch.setattr(GridExecutor, "__call__", run_kernel)
    patch.setattr(SlotModel, "chain_logits", run_model)
    patch.setattr(steps, "verify", counted("verification", steps.verify))
    patch.setattr(exact, "verify", counted("walk", exact.verify))
    toy.reserve(reqs)
    inputs = RoundInputs.of(toy.batch(reqs), toy.device)
    with launches:
        toy.worker._round.play(inputs, shape_of_server(config))
    return {"all": launches.count, **counts}
