"""How many launches a captured round has beside its models' own, played on values.

On a GPU each takes some two microseconds, in a graph too, however little it does: 250 of them are
5 % of a round of 10 ms. `test_fake_cuda` counts at a server's sizes, and names them.
"""

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
from sglang_smc.round.batch import RoundInputs, shape_of_server

MOST = 240  # at N = K = 8, in mode smc: three kernels for each of 8 draft steps among them
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


def test_a_round_has_few_launches(
    monkeypatch: pytest.MonkeyPatch, device: str, kernels: Ops
) -> None:
    if device != "cpu":
        pytest.skip("kernels are counted in Triton's interpreter")
    config = SMCConfig(num_particles=8, num_steps=8)
    toy = ToyWorker(config, *languages(), num_requests=1, max_new_tokens=60, eos=EOS, ops=kernels)
    reqs = toy.begin([1], torch.rand(1, dtype=torch.float64))
    launches, execute, chain_logits = Launches(), GridExecutor.__call__, SlotModel.chain_logits

    def run_kernel(*args: Any, **kwargs: Any) -> None:
        launches.note()
        with launches.paused():
            execute(*args, **kwargs)

    def run_model(*args: Any) -> torch.Tensor:
        with launches.paused():
            return chain_logits(*args)

    monkeypatch.setattr(GridExecutor, "__call__", run_kernel)
    monkeypatch.setattr(SlotModel, "chain_logits", run_model)
    toy.reserve(reqs)
    inputs = RoundInputs.of(toy.batch(reqs), toy.device)
    with launches:
        toy.worker._round.play(inputs, shape_of_server(config))
    print("launches:", launches.count)
    assert 100 < launches.count <= MOST
