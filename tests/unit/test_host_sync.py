"""Between prefill and result a round never waits for the device.

On a GPU torch itself raises at every wait. On a CPU each call of the decode path is traced: what
needs a value on the host, or makes a tensor whose size depends on values, is refused. And on a GPU
that is not there (`fake_gpu`) all tensors must be on it, and all copies to it be pinned.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from fake_gpu import fake_gpu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from toy_head import HeadWorker
from toy_laws import EOS, languages
from toy_logprobs import AskingWorker
from toy_worker import ToyWorker

from sglang_smc.ops.interface import TORCH, Ops
from sglang_smc.ops.select import ops_of
from sglang_smc.options.request import OFF, Budget
from sglang_smc.options.server import SMCConfig

# Operators that read a value, or whose result has a size that depends on values.
WAITING_OPERATORS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
# Methods that reach the memory of a CPU tensor without any operator.
TENSOR = torch.Tensor
WAITING_METHODS = {TENSOR.cpu, TENSOR.numpy, TENSOR.tolist, TENSOR.__array__}
FAKE = "fake GPU"
GPUS = ["GPU", "GPU with kernels"] if torch.cuda.is_available() else []
DEVICES = ["cpu", FAKE, *GPUS]


class Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        refuse_waits(func, args)
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        assert func not in WAITING_METHODS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def refuse_waits(func: Any, args: tuple) -> None:
    """AssertionError where an operator waits for the device."""
    name = func.overloadpacket.__name__
    assert name not in WAITING_OPERATORS, f"{name} waits for the device"
    if name in ("index", "index_put", "index_put_"):
        by_mask = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        assert not by_mask, f"{name} by a mask waits for the device"
    assert name != "repeat_interleave", "repeat_interleave by a tensor waits for the device"


@contextmanager
def place(name: str) -> Iterator[tuple[str, Callable[[], AbstractContextManager[None]], Ops]]:
    """Where rounds are played, how to refuse waits there, and by which operations."""
    if name == "cpu":
        yield "cpu", traced, TORCH
    elif name == FAKE:
        with fake_gpu() as gpu:
            yield "cuda", gpu.no_waiting, TORCH
    else:
        yield "cuda", torch_raises, ops_of("triton") if "kernels" in name else TORCH


@contextmanager
def traced() -> Iterator[None]:
    with Operators(), Methods():
        yield


@contextmanager
def torch_raises() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# What any device waits for.
WAITS: list[Callable[[torch.Tensor], object]] = [
    lambda x: x[0].item(),
    lambda x: bool(x[0] > 0),
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: x[x > 1],
    lambda x: x.__setitem__(x > 1, x[:1].clone()),
    lambda x: torch.where(x > 0),
    lambda x: x.unique(),
    lambda x: torch.repeat_interleave(x),
]
# What a GPU alone waits for, or minds.
COPIES: list[Callable[[torch.Tensor], object]] = [
    lambda x: torch.tensor([1], device=x.device),
    lambda x: torch.tensor([1]).pin_memory().to(x.device),
    lambda x: torch.tensor([1]).to(x.device, non_blocking=True),
    lambda x: x.copy_(torch.ones(3), non_blocking=True),
    lambda x: torch.empty(3).copy_(x, non_blocking=True),
    lambda x: x.to("cpu", non_blocking=True),
    lambda x: x[[0, 1]],
    lambda x: x.__setitem__(torch.tensor([0]), x[:1]),
    lambda x: x + torch.ones(3),
]
REFUSALS = "waits for the device|two (different )?devices|DataDependent|DynamicOutput|aten"


@pytest.mark.parametrize("device", ["cpu", FAKE])
def test_each_kind_of_wait_is_refused(device: str) -> None:
    with place(device) as (there, no_waiting, _):
        values = torch.zeros(3, dtype=torch.int64, device=there)
        for wait in WAITS + COPIES * (device == FAKE):
            with pytest.raises(Exception, match=REFUSALS), no_waiting():
                wait(values)


POWERED, VERIFIED = {"power": 2.0}, {"mode": "exact"}
ALL_CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 2, "num_steps": 1},
    {"resample_at": "token", "ess_threshold": 1.0},
    {"resampling_method": "ssp"},
    VERIFIED,
    {"mode": "mixed"},
    POWERED,
    {"return_particles": True},
    {"trace": True},
    {**VERIFIED, "trace": True},
)
FILTERS = {"top_p": 0.9, "top_k": 2, "min_p": 0.1, "min_new_tokens": 3}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5}
EDITS = {**PENALTIES, "logit_bias": {"1": 0.5}}
BUDGETS = (None, OFF, Budget(2, 1), Budget(3, 2), Budget(1, 2), Budget(3, 1))
SHOWN = ((2, [0, 1]), None, (0, None))
ROUNDS: dict[str, tuple[type[ToyWorker], dict[str, Any]]] = {
    "weighed": (ToyWorker, {}),
    "verified": (ToyWorker, {"chosen": (VERIFIED,)}),
    "weighed beside verified": (ToyWorker, {"chosen": ({}, VERIFIED)}),
    "powered": (ToyWorker, {"chosen": (POWERED, {})}),
    "all choices": (ToyWorker, {"chosen": ALL_CHOICES, "asked": ({}, FILTERS, {"top_k": 1})}),
    "filtered": (ToyWorker, {"asked": FILTERS}),
    "greedy": (ToyWorker, {"asked": {"top_k": 1}}),
    "edited": (ToyWorker, {"chosen": (POWERED, VERIFIED, {}), "asked": EDITS}),
    "with a head": (HeadWorker, {"chosen": ({}, VERIFIED)}),
    "with log-probabilities": (AskingWorker, {"chosen": (POWERED, {}, VERIFIED), "shown": SHOWN}),
}


# A fake GPU is slow: there "all choices" stands for these, and some rounds for all.
COVERED = ("verified", "weighed beside verified", "powered")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        (name, device)
        for name, device in itertools.product(ROUNDS, DEVICES)
        if name not in COVERED or device != FAKE
    ],
)
def test_a_round_never_waits_for_the_device(name: str, device: str) -> None:
    config = SMCConfig(num_particles=3, num_steps=2, evidence_threshold=0.0)
    kind, variants = ROUNDS[name]
    size = max(4, len(variants.get("chosen", ())))
    with place(device) as (there, no_waiting, ops):
        sizes = {"num_requests": size, "max_new_tokens": 12, "eos": EOS, "ops": ops}
        toy = kind(config, *languages(device=there), **sizes, budgets=BUDGETS, **variants)
        reqs = toy.begin(list(range(1, size + 1)))
        for _ in BUDGETS[: 2 if device == FAKE else None]:
            toy.reserve(reqs)
            batch = toy.batch(reqs)
            with no_waiting():
                result = toy.worker.launch_round(batch)
            assert result.new_seq_lens is not None
            for req, length in zip(reqs, result.new_seq_lens.tolist(), strict=True):
                req.kv_committed_len = max(req.kv_committed_len, length)  # a fake GPU's are 0
