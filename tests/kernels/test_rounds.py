"""With kernels or without: for the same seeds a round gives the same tokens and weights."""

from typing import Any

import pytest
import torch
from toy_laws import languages, toy
from toy_logprobs import AskingWorker
from toy_worker import Outcome

from sglang_smc.models.softmax import Heads
from sglang_smc.ops import TORCH, check
from sglang_smc.ops.check_cases import CheckSizes, Passes
from sglang_smc.options.request import OFF, Budget
from sglang_smc.smc.ops import Ops

ASKED: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {"1": 0.8}},
    {},
    {"min_new_tokens": 5},
    {"presence_penalty": -0.5},
)
ONE_TOKEN: tuple[dict[str, Any], ...] = ({"top_k": 1},)
AT_TOKENS = {"resample_at": "token", "resampling_method": "multinomial", "ess_threshold": 1.0}
POWERED = {"power": 2.0, "proposal": "draft"}
VERIFIED = POWERED | {"proposal": "verified", "ess_threshold": 1.0}
AS_ASKED = (None,)
CHANGING = (Budget(3, 2), OFF, Budget(3, 1), Budget(2, 2), Budget(1, 2))
# What requests choose in turns, the budgets of rounds, and what requests ask for.
CASES: dict[str, tuple[tuple[dict[str, Any], ...], Any, tuple[dict[str, Any], ...]]] = {
    "weighed": (({}, {"num_particles": 2, "num_steps": 1}, {"num_steps": 0}), AS_ASKED, ({},)),
    "weighed and edited": (({}, {"num_particles": 2, "num_steps": 1}), CHANGING, ASKED),
    "at tokens": ((AT_TOKENS, {"resampling_method": "stratified"}), CHANGING, ({},)),
    "by torch's method": (
        ({"resampling_method": "stratified", "ess_threshold": 1.0}, {}),
        AS_ASKED,
        ({},),
    ),
    "verified": (({"mode": "exact"}, {"mode": "auto"}), CHANGING, ASKED),
    "each particle verified": ((VERIFIED, {"mode": "exact"}, {}), AS_ASKED, ({},)),
    "powered": ((POWERED,), CHANGING, ({},)),
    "powered and filtered": ((POWERED,), AS_ASKED, ({"top_k": 2, "min_p": 0.3},)),
    "powered and greedy": ((POWERED,), AS_ASKED, ONE_TOKEN),
}
NIGHTLY = "powered and filtered"


def serve(
    chosen: tuple[dict[str, Any], ...],
    budgets: tuple[Budget | None, ...],
    ops: Ops,
    device: str,
    asked: tuple[dict[str, Any], ...],
) -> tuple[Outcome, list[float]]:
    """What comes out, and the log-probabilities that requests are told."""
    server = {"num_particles": 3, "num_steps": 2, "max_lag": 4, "evidence_threshold": 0.0}
    own = {"chosen": chosen, "budgets": budgets, "asked": asked, "ops": ops}
    shown_to = {"kind": AskingWorker, "shown": ((0, None), (2, [1]), None)}
    worker = toy(4, languages(device=device), limit=9, **server, **own, **shown_to)
    outcome = worker.run([1, 2, 3, 4])
    worker.check_owned()
    shown = [req.logprob.output_token_logprobs_val for req in worker.begun]
    return outcome, [value for values in shown for value in values]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == NIGHTLY)) for name in CASES]
)
def test_kernels_change_no_token(name: str, device: str, kernels: Ops) -> None:
    chosen, budgets, asked = CASES[name]
    (by_kernels, shown), (by_torch, expected) = (
        serve(chosen, budgets, ops, device, asked) for ops in (kernels, TORCH)
    )
    assert torch.equal(by_kernels.outputs, by_torch.outputs)
    assert torch.allclose(by_kernels.log_evidence, by_torch.log_evidence, atol=1e-5)
    assert torch.allclose(by_kernels.fidelity, by_torch.fidelity, atol=1e-4)
    assert shown == pytest.approx(expected, abs=1e-5) and len(shown) > 10
    assert by_kernels.num_narrowed == by_torch.num_narrowed
    assert len(by_torch.outputs.unique(dim=0)) > 1 or asked == ONE_TOKEN


def test_all_kernels_pass(kernels: Ops, device: str) -> None:
    """On a GPU at a server's sizes, in the interpreter at small ones."""
    few = device == "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    heads = Heads(4, 2, 16, dtype) if few else Heads(32, 8, 128, dtype)
    latent = Heads(2, 1, 24, dtype, 16) if few else Heads(16, 1, 576, dtype, 512)
    n_and_k = (2, 2) if few else (8, 8)
    columns = (1, 3) if few else (1, 2, 9)
    passes = Passes(heads, columns), Passes(heads, columns, rotates=True), Passes(latent, columns)
    sizes = CheckSizes(*n_and_k, passes, gated_delta=True, vocab_size=1000 if few else 128_256)
    assert set(kernels) & set(TORCH) <= {None}, "an operation without a kernel"
    found = list(check.findings(kernels, device, sizes))
    assert [one for one in found if one.problem] == []
