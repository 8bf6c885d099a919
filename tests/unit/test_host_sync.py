"""Between prefill and result a round never waits for the device.

On a GPU torch itself raises at every wait. On a CPU each call of the decode path is traced: what
needs a value on the host, or makes a tensor whose size depends on values, is refused. And on a GPU
that is not there (`fake_gpu`) all tensors must be on it, and all copies to it be pinned.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from device_waits import refuse_waits
from fake_gpu import fake_gpu, memory_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from toy_head import HeadWorker
from toy_laws import EOS, languages
from toy_logprobs import AskingWorker
from toy_worker import ToyWorker

from sglang_smc.ops.interface import Ops
from sglang_smc.ops.select import ops_of
from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.options.budget import OFF, Budget
from sglang_smc.options.server import SMCConfig

# Methods that reach the memory of a CPU tensor without any operator.
WAITING_METHODS = {
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
}
GPUS = ["GPU", "GPU with kernels"] if torch.cuda.is_available() else []
DEVICES = ["cpu", "fake GPU", *GPUS]


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


class Place(NamedTuple):
    """Where rounds are played, and how to refuse waits there."""

    device: str
    no_waiting: Callable[[], AbstractContextManager[None]]
    ops: Ops = TORCH


@contextmanager
def place(name: str) -> Iterator[Place]:
    if name == "cpu":
        yield Place("cpu", traced)
    elif name == "fake GPU":
        with fake_gpu() as gpu:
            yield Place("cuda", gpu.no_waiting)
    else:
        yield Place("cuda", torch_raises, ops_of("triton") if "kernels" in name else TORCH)


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


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "mask": lambda x: x[x > 1],
    "mask assigned": lambda x: x.__setitem__(x > 1, x[:1].clone()),
    "nonzero": lambda x: torch.nonzero(x),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat": lambda x: torch.repeat_interleave(x),
}


@pytest.mark.parametrize("name", list(WAITS))
def test_the_tracer_sees_each_kind_of_wait(name: str) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), traced():
        WAITS[name](torch.tensor([1, 2, 3]))


# What a GPU alone waits for, or minds.
COPIES: dict[str, Callable[[torch.Tensor], object]] = {
    **{name: wait for name, wait in WAITS.items() if name != "equal"},
    "made there": lambda x: torch.tensor([1], device=x.device),
    "blocking": lambda x: torch.tensor([1]).pin_memory().to(x.device),
    "not pinned": lambda x: torch.tensor([1]).to(x.device, non_blocking=True),
    "copied from": lambda x: x.copy_(torch.ones(3), non_blocking=True),
    "copied to": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "to the host": lambda x: x.to("cpu", non_blocking=True),
    "by a list": lambda x: x[[0, 1]],
    "by the host's": lambda x: x[torch.tensor([0, 1])],
    "assigned by the host's": lambda x: x.__setitem__(torch.tensor([0]), x[:1]),
    "mixed": lambda x: x + torch.ones(3),
}
REFUSALS = "waits for the device|two (different )?devices|DataDependent|DynamicOutput|aten"


@pytest.mark.parametrize("name", list(COPIES))
def test_the_fake_gpu_refuses_each_kind_of_wait(name: str) -> None:
    with fake_gpu() as gpu:
        there = torch.zeros(3, dtype=torch.int64, device="cuda")
        with pytest.raises(Exception, match=REFUSALS), gpu.no_waiting():
            COPIES[name](there)


def test_the_fake_gpu_lets_pinned_copies_pass_and_knows_them() -> None:
    with fake_gpu() as gpu:
        there = torch.zeros(2, device="cuda")
        with gpu.no_waiting():
            pinned = torch.ones(2).pin_memory()
            there.copy_(pinned[:1], non_blocking=True)
            assert (there + pinned.to("cuda", non_blocking=True)).device.type == "cuda"
            torch.empty(2, pin_memory=True).copy_(there, non_blocking=True)
    assert [len(gpu.to_device), len(gpu.to_host)] == [2, 1]
    assert gpu.to_host == [memory_of(there)] and gpu.to_device[0] == memory_of(pinned)


CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "weighed": ({},),
    "of unlike sizes": ({}, {"num_particles": 2, "num_steps": 1}),
    "at tokens, by unlike methods": (
        {"resample_at": "token", "ess_threshold": 1.0},
        {"resampling_method": "ssp"},
    ),
    "verified": ({"mode": "exact"}, {"mode": "mixed"}),
    "weighed beside verified": ({}, {"mode": "exact"}),
    "powered": ({"power": 2.0}, {}),
    "shown": ({"return_particles": True},),
    "traced": ({"trace": True}, {"mode": "exact", "trace": True}, {}),
    "powered, verified and weighed": ({"power": 2.0}, {"mode": "exact"}, {}),
}
RUNGS = {
    "as asked": (None,),
    "more and fewer": (Budget(3, 2), Budget(2, 1), Budget(1, 2), OFF, Budget(3, 1)),
}


# Without values budgets that change do all that others do.
SETTINGS = [
    (device, budgets)
    for device in DEVICES
    for budgets in RUNGS
    if (device, budgets) != ("fake GPU", "as asked")
]


@pytest.mark.parametrize(("device", "budgets"), SETTINGS)
@pytest.mark.parametrize("name", list(CHOICES))
def test_a_round_never_waits_for_the_device(name: str, budgets: str, device: str) -> None:
    """The worker's own round, from the batch to the result, over models of a few tables."""
    play_rounds(device, chosen=CHOICES[name], budgets=RUNGS[budgets])


ASKED: dict[str, dict[str, Any]] = {
    "filters": {"top_p": 0.9, "top_k": 2, "min_p": 0.1, "min_new_tokens": 3},
    "the likeliest": {"top_k": 1},
    "edits": {
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"1": 0.5},
    },
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asked", list(ASKED))
@pytest.mark.parametrize("name", ["weighed", "powered, verified and weighed"])
def test_what_sampling_is_asked_for_never_waits(name: str, asked: str, device: str) -> None:
    """Filters, greedy requests, penalties and biases."""
    variants = {"chosen": CHOICES[name], "budgets": RUNGS["more and fewer"]}
    play_rounds(device, **variants, asked=ASKED[asked])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asked", [{"top_k": 2, "top_p": 0.7}, {"top_k": 1}], ids=str)
def test_filters_never_wait_for_the_device(asked: dict[str, Any], device: str) -> None:
    chosen = CHOICES["powered, verified and weighed"]
    play_rounds(device, chosen=chosen, budgets=RUNGS["more and fewer"], asked=asked)


@pytest.mark.parametrize(("device", "budgets"), SETTINGS)
def test_a_head_never_waits(device: str, budgets: str) -> None:
    """It looks for the target's states by slot."""
    chosen = CHOICES["weighed beside verified"]
    play_rounds(device, HeadWorker, chosen=chosen, budgets=RUNGS[budgets])


def play_rounds(device: str, kind: type[ToyWorker] = ToyWorker, **variants: Any) -> None:
    """Six rounds of four requests, none of which may wait."""
    config = SMCConfig(num_particles=3, num_steps=2, evidence_threshold=0.0)
    with place(device) as here:
        sizes = {"num_requests": 4, "max_new_tokens": 12, "eos": EOS, "ops": here.ops}
        play(kind(config, *languages(device=here.device), **sizes, **variants), here)


@pytest.mark.parametrize(("device", "budgets"), SETTINGS)
@pytest.mark.parametrize("name", ["weighed beside verified", "powered"])
def test_log_probabilities_make_no_round_wait(name: str, budgets: str, device: str) -> None:
    config = SMCConfig(num_particles=3, num_steps=2, evidence_threshold=0.0)
    with place(device) as here:
        sizes = {"num_requests": 4, "max_new_tokens": 12, "eos": EOS, "ops": here.ops}
        variants = {"chosen": CHOICES[name], "budgets": RUNGS[budgets]}
        shown, pair = ((2, [0, 1]), None, (0, None)), languages(device=here.device)
        play(AskingWorker(config, *pair, shown=shown, **sizes, **variants), here)


def play(toy: ToyWorker, here: Place) -> None:
    """Some rounds of four requests, none of which may wait."""
    reqs = toy.begin([1, 2, 3, 4], torch.rand(4, dtype=torch.float64))
    for _ in range(6):
        toy.reserve(reqs)
        batch = toy.batch(reqs)
        with here.no_waiting():
            result = toy.worker.launch_round(batch)
        assert result.new_seq_lens is not None
        for req, length in zip(reqs, result.new_seq_lens.tolist(), strict=True):
            req.kv_committed_len = max(req.kv_committed_len, length)  # a fake GPU's are 0
