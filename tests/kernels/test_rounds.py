"""With kernels or without: for the same seeds a round gives the same tokens and weights."""

from typing import Any

import pytest
import torch
from toy_laws import EOS, languages
from toy_logprobs import AskingWorker
from toy_worker import Outcome, ToyWorker

from sglang_smc.ops.interface import Ops
from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.options.budget import OFF, Budget
from sglang_smc.options.server import SMCConfig

CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "weighed": ({}, {"num_particles": 2, "num_steps": 1}),
    "at tokens, by other methods": (
        {"resample_at": "token", "resampling_method": "multinomial", "ess_threshold": 1.0},
        {"resampling_method": "stratified"},
    ),
    "by methods that torch draws": ({"resampling_method": "ssp", "ess_threshold": 1.0}, {}),
    "verified": ({"mode": "exact"}, {"mode": "mixed"}),
    "powered": ({"power": 2.0}, {}),
}


ASKED: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {"1": 0.8}},
    {},
    {"min_new_tokens": 5},
    {"presence_penalty": -0.5},
)
RUNGS = {
    "as asked": (None,),
    "of changing size": (Budget(3, 2), OFF, Budget(3, 1), Budget(2, 2), Budget(1, 2)),
}


def serve(
    chosen: tuple[dict[str, Any], ...],
    budgets: tuple[Budget | None, ...],
    ops: Ops,
    device: str,
    asked: tuple[dict[str, Any], ...] = ({},),
) -> Outcome:
    config = SMCConfig(num_particles=3, num_steps=2, max_lag=4, evidence_threshold=0.0)
    toy = ToyWorker(
        config,
        *languages(device=device),
        num_requests=4,
        max_new_tokens=9,
        eos=EOS,
        chosen=chosen,
        budgets=budgets,
        asked=asked,
        ops=ops,
    )
    outcome = toy.run([1, 2, 3, 4], torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64))
    toy.check_owned()
    return outcome


@pytest.mark.parametrize(
    ("name", "budgets", "asked"),
    [
        ("weighed", "as asked", ({},)),
        ("weighed", "of changing size", ASKED),
        ("at tokens, by other methods", "of changing size", ({},)),
        ("by methods that torch draws", "as asked", ({},)),
        ("verified", "of changing size", ASKED),
        pytest.param(
            "powered", "as asked", ({"top_k": 2, "min_p": 0.3},), marks=pytest.mark.nightly
        ),
        ("powered", "of changing size", ({},)),
        ("powered", "as asked", ({"top_k": 1},)),
    ],
)
def test_kernels_change_no_token(
    name: str, budgets: str, asked: tuple[dict[str, Any], ...], device: str, kernels: Ops
) -> None:
    by_kernels, by_torch = (
        serve(CHOICES[name], RUNGS[budgets], ops, device, asked) for ops in (kernels, TORCH)
    )
    assert torch.equal(by_kernels.outputs, by_torch.outputs)
    assert torch.allclose(by_kernels.log_evidence, by_torch.log_evidence, atol=1e-5)
    assert torch.allclose(by_kernels.fidelity, by_torch.fidelity, atol=1e-4)
    assert by_kernels.num_narrowed == by_torch.num_narrowed
    assert len(by_torch.outputs.unique(dim=0)) > 1 or asked == ({"top_k": 1},)


def books(chosen: tuple[dict[str, Any], ...], ops: Ops, device: str) -> list[list[float]]:
    """Log-probabilities of each request's tokens."""
    config = SMCConfig(num_particles=3, num_steps=2, max_lag=4, evidence_threshold=0.0)
    sizes = {"num_requests": 3, "max_new_tokens": 9, "eos": EOS}
    own = {"chosen": chosen, "shown": ((0, None), (2, [1])), "ops": ops}
    toy = AskingWorker(config, *languages(device=device), **sizes, **own)
    toy.run([1, 2, 3], torch.tensor([0.1, 0.4, 0.6], dtype=torch.float64))
    return [req.logprob.output_token_logprobs_val for req in toy.begun]


@pytest.mark.parametrize("name", ["weighed", "verified"])
def test_kernels_change_no_log_probability(name: str, device: str, kernels: Ops) -> None:
    by_kernels = books(CHOICES[name], kernels, device)
    by_torch = books(CHOICES[name], TORCH, device)
    for one, other in zip(by_kernels, by_torch, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert max(map(len, by_torch)) > 3
