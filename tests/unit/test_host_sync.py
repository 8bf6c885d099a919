"""Between prefill and result a round never waits for the device.

On a GPU torch itself raises at every wait. Where there is none (`fake_gpu`) each call is traced:
what needs a value on the host, or makes a tensor whose size depends on values, is refused; all
tensors must be on the device, and all copies to it be pinned.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from fake_gpu import fake_gpu
from toy_head import HeadWorker
from toy_laws import languages, toy
from toy_logprobs import AskingWorker
from toy_worker import ToyWorker

from sglang_smc.ops import TORCH, ops_of
from sglang_smc.options.request import OFF, Budget
from sglang_smc.smc.ops import Ops

FAKE = "fake GPU"
PLACES = ["GPU", "GPU with kernels"] if torch.cuda.is_available() else [FAKE]


@contextmanager
def place(name: str) -> Iterator[tuple[str, Callable[[], AbstractContextManager[None]], Ops]]:
    """Where rounds are played, how to refuse waits there, and by which operations."""
    if name == FAKE:
        with fake_gpu() as gpu:
            yield "cuda", gpu.no_waiting, TORCH
    else:
        yield "cuda", torch_raises, ops_of("triton", "cuda") if "kernels" in name else TORCH


@contextmanager
def torch_raises() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# What a GPU waits for, or minds.
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
    lambda x: torch.tensor([1], device=x.device),
    lambda x: torch.tensor([1]).pin_memory().to(x.device),
    lambda x: torch.tensor([1]).to(x.device, non_blocking=True),
    lambda x: x.copy_(torch.ones(3), non_blocking=True),
    lambda x: torch.empty(3).copy_(x, non_blocking=True),
    lambda x: x.to("cpu", non_blocking=True),
    lambda x: x[[0, 1]],
    lambda x: x.__setitem__(torch.tensor([0]), x[:1]),
    lambda x: x.__setitem__(torch.zeros(1, dtype=torch.int64, device=x.device), 1),
    lambda x: x + torch.ones(3),
]
REFUSALS = "waits for the device|two (different )?devices|DataDependent|DynamicOutput|aten"


@pytest.mark.skipif(FAKE not in PLACES, reason="torch itself refuses on a GPU")
def test_each_kind_of_wait_is_refused() -> None:
    with place(FAKE) as (there, no_waiting, _):
        values = torch.zeros(3, dtype=torch.int64, device=there)
        for wait in WAITS:
            with pytest.raises(Exception, match=REFUSALS), no_waiting():
                wait(values)


POWERED = {"power": 2.0, "proposal": "draft"}
VERIFIED = {"mode": "exact"}
ALL_CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"num_particles": 2, "num_steps": 1},
    {"resample_at": "token", "ess_threshold": 1.0},
    {"resampling_method": "stratified"},
    VERIFIED,
    {"mode": "auto"},
    POWERED,
    {**POWERED, "proposal": "verified"},
    {"return_particles": True},
    {"num_steps": 0},
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


# A fake GPU is slow: there "all choices" stands for these, and two rounds for all of other kinds.
COVERED = ("weighed beside verified", "powered", "filtered") if FAKE in PLACES else ()
CASES = itertools.product(ROUNDS.keys() - COVERED, PLACES)


@pytest.mark.parametrize(("name", "device"), sorted(CASES))
def test_a_round_never_waits_for_the_device(name: str, device: str) -> None:
    kind, variants = ROUNDS[name]
    server = {"num_particles": 3, "num_steps": 2, "evidence_threshold": 0.0, "limit": 12}
    size = max(4, len(variants.get("chosen", ())))
    with place(device) as (there, no_waiting, ops):
        given = server | {"kind": kind, "ops": ops, "budgets": BUDGETS} | variants
        worker = toy(size, languages(device=there), **given)
        reqs = worker.begin(list(range(1, size + 1)))
        for _ in BUDGETS[: 2 if device == FAKE and name != "weighed" else None]:
            worker.reserve(reqs)
            batch = worker.batch(reqs)
            with no_waiting():
                result = worker.worker.launch_round(batch)
            assert result.new_seq_lens is not None
            for req, length in zip(reqs, result.new_seq_lens.tolist(), strict=True):
                req.kv_committed_len = max(req.kv_committed_len, length)  # a fake GPU's are 0
