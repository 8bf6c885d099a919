"""Between prefill and result a round never waits for the device.

On a GPU torch itself raises at every wait. Elsewhere each call of the decode path is traced: what
needs a value on the host, or makes a tensor whose size depends on values, is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from toy_laws import EOS, languages
from toy_logprobs import AskingWorker
from toy_worker import ToyWorker

from sglang_smc.options.budget import OFF, Budget
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
WAITING_METHODS = {
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITING_OPERATORS, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            by_mask = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not by_mask, f"{name} by a mask waits for the device"
        if name == "repeat_interleave":
            raise AssertionError("repeat_interleave by a tensor waits for the device")
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        assert func not in WAITING_METHODS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    if device == "cpu":
        with Operators(), Methods():
            yield
        return
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
    with pytest.raises(AssertionError, match="waits for the device"), no_waiting("cpu"):
        WAITS[name](torch.tensor([1, 2, 3]))


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
    "powered, verified and weighed": ({"power": 2.0}, {"mode": "exact"}, {}),
}
RUNGS = {
    "as asked": (None,),
    "more and fewer": (Budget(3, 2), Budget(2, 1), Budget(1, 2), OFF, Budget(3, 1)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budgets", list(RUNGS))
@pytest.mark.parametrize("name", list(CHOICES))
def test_a_round_never_waits_for_the_device(name: str, budgets: str, device: str) -> None:
    """The worker's own round, from the batch to the result, over models of a few tables."""
    play_rounds(device, chosen=CHOICES[name], budgets=RUNGS[budgets])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["weighed", "powered, verified and weighed"])
def test_penalties_and_biases_never_wait_for_the_device(name: str, device: str) -> None:
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5}
    asked = {**penalties, "logit_bias": {"1": 0.5}}
    play_rounds(device, chosen=CHOICES[name], budgets=RUNGS["more and fewer"], asked=asked)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asked", [{"top_k": 2, "top_p": 0.7}, {"top_k": 1}], ids=str)
def test_filters_never_wait_for_the_device(asked: dict[str, Any], device: str) -> None:
    chosen = CHOICES["powered, verified and weighed"]
    play_rounds(device, chosen=chosen, budgets=RUNGS["more and fewer"], asked=asked)


def play_rounds(device: str, **variants: Any) -> None:
    """Six rounds of four requests, none of which may wait."""
    config = SMCConfig(num_particles=3, num_steps=2, evidence_threshold=0.0)
    with torch.device(device):
        sizes = {"num_requests": 4, "max_new_tokens": 12, "eos": EOS}
        play(ToyWorker(config, *languages(), **sizes, **variants), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budgets", list(RUNGS))
@pytest.mark.parametrize("name", ["weighed beside verified", "powered"])
def test_log_probabilities_make_no_round_wait(name: str, budgets: str, device: str) -> None:
    config = SMCConfig(num_particles=3, num_steps=2, evidence_threshold=0.0)
    with torch.device(device):
        sizes = {"num_requests": 4, "max_new_tokens": 12, "eos": EOS}
        variants = {"chosen": CHOICES[name], "budgets": RUNGS[budgets]}
        shown = ((2, [0, 1]), None, (0, None))
        play(AskingWorker(config, *languages(), shown=shown, **sizes, **variants), device)


def play(toy: ToyWorker, device: str) -> None:
    """Some rounds of four requests, none of which may wait."""
    reqs = toy.begin([1, 2, 3, 4], torch.rand(4, dtype=torch.float64))
    for _ in range(6):
        toy.reserve(reqs)
        batch = toy.batch(reqs)
        with no_waiting(device):
            result = toy.worker.launch_round(batch)
        assert result.new_seq_lens is not None
        for req, length in zip(reqs, result.new_seq_lens.tolist(), strict=True):
            req.kv_committed_len = length
