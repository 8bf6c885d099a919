"""Whole rounds on the fake GPU at a server's sizes: the calls and the memory that they take.

The package's own round is played with its kernels and models stood in for. Each call of torch and
each kernel is noted; what a capture forbids is refused where it stands: a wait for the device, a
copy between host and device, a kernel's argument that is not on the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from fake_gpu import FakeGPU, fake_gpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from sglang_smc.kv import arena
from sglang_smc.models.chains import Chains
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.base import LanguageModel
from sglang_smc.round.batch import RoundInputs, RoundShape, Tables
from sglang_smc.round.play import ServedRound
from sglang_smc.smc.ops import Ops

VOCAB_SIZE = 128_256
PROMPT = 8_192

# They look at memory, or only take it.
NO_LAUNCH = {"device", "empty", "empty_like", "new_empty", "_unsafe_view", "scalar_tensor"}


class Trace(NamedTuple):
    """What a round asked of the device."""

    calls: list[str]  # of torch and kernels, beside the models' own
    num_bytes: int  # that these calls of torch read and write; of a kernel nobody has measured it
    peak: int  # most bytes alive at once of what the round made, the models' logits among them
    outcome: Any


class Account(TorchDispatchMode):
    """Notes each call, and the memory of all that is made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.num_bytes = self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._in_model = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = _tensors((args, kwargs))
        name = func.overloadpacket.__name__
        if name == "index_put_":  # the fake GPU takes it for pointwise work
            assert given[-1].device.type == "cuda", "a number of the host's is copied there"
        made = func(*args, **(kwargs or {}))
        found = _tensors(made)
        if not self._in_model and not func.is_view and name not in NO_LAUNCH:
            self.calls.append(name)
            self.num_bytes += sum(one.numel() * one.element_size() for one in (*given, *found))
        self._measure(found)
        return made

    def _measure(self, found: list[torch.Tensor]) -> None:
        """Bytes of all storages that were made here and are alive."""
        for one in found:
            storage = one.untyped_storage()
            reference = StorageWeakRef(storage)
            if one.device.type == "cuda":
                self._alive.setdefault(reference.cdata, (reference, storage.nbytes()))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Calls are a model's own."""
        self._in_model = True
        yield
        self._in_model = False


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class FakeModel:
    """Stands in for `ParticleForward`: logits as SGLang makes them, float32 of a bf16 product."""

    def __init__(self, account: Account) -> None:
        self._account = account

    attn_backend: Any = None

    def next_logits(self, chains: Chains) -> torch.Tensor:
        return self._logits(chains.starts.shape)

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        return self._logits(chains.tokens.shape)

    def _logits(self, shape: torch.Size) -> torch.Tensor:
        with self._account.in_model():
            rows = torch.empty(shape.numel(), VOCAB_SIZE, dtype=torch.bfloat16, device="cuda")
            return rows.float().unflatten(0, shape)


def nothing(*_: Any, **__: Any) -> None: ...


@contextmanager
def fake_cuda(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any] = nothing
) -> Iterator[tuple[FakeGPU, Account]]:
    """Count kernels in place of launching them, on the fake GPU, and hand their launch to `run`."""
    account = Account()

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        is_there = all(one.device.type == "cuda" for one in _tensors(args))
        assert is_there, f"{kernel.__name__} reads the host's memory"
        account.calls.append(kernel.__name__)
        run(kernel, *args, **options)

    with monkeypatch.context() as patches, fake_gpu() as gpu:
        patches.setattr(JITFunction, "run", launch)
        # Where kernels are interpreted a launch takes another way.
        patches.setattr(GridExecutor, "__call__", lambda self, *a, **k: launch(self.fn, *a, **k))
        yield gpu, account


def trace_round(
    monkeypatch: pytest.MonkeyPatch,
    config: SMCConfig,
    shape: RoundShape,
    num_groups: int,
    ops: Ops,
    run: Callable[..., Any] = nothing,
) -> Trace:
    """Play a round of any shape that a server of this configuration can capture."""
    with fake_cuda(monkeypatch, run) as (gpu, account):
        num_rows = 1 + num_groups
        width = PROMPT + arena.max_arena(config)
        tables = Tables.of(
            config,
            ops,
            torch.zeros(num_rows, width, dtype=torch.int32, device="cuda"),
            num_slots=num_rows * width,
            vocab_size=VOCAB_SIZE,
            device="cuda",
        )
        if shape.logprobs.own:
            tables.particles.logprobs.make_room(shape.logprobs)
        draft: Any = LanguageModel(FakeModel(account), None)  # type: ignore[arg-type]
        round_ = ServedRound(FakeModel(account), draft, tables)
        sizes = (num_groups,), (num_groups,), (4, num_groups)
        inputs = RoundInputs(*(torch.zeros(s, dtype=torch.int64, device="cuda") for s in sizes))
        gpu.to_device.clear()
        with gpu.no_waiting(), account:
            outcome = round_.play(inputs, shape)
        assert not gpu.to_device and not gpu.to_host, "copies between host and device"
        return Trace(account.calls, account.num_bytes, account.peak, outcome)
