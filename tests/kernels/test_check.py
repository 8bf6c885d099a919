"""The check that a server makes as it starts, with the kernels themselves."""

import torch

from sglang_smc.models.shared_prefix import Heads
from sglang_smc.ops import check
from sglang_smc.ops.check_inputs import Sizes
from sglang_smc.ops.interface import Ops


def test_all_kernels_pass(kernels: Ops, device: str) -> None:
    """On a GPU at a server's sizes, in the interpreter at small ones."""
    few, dtype = device == "cpu", torch.float32 if device == "cpu" else torch.bfloat16
    heads = Heads(4, 2, 16, dtype) if few else Heads(32, 8, 128, dtype)
    latent = Heads(2, 1, 24, dtype, 16) if few else Heads(16, 1, 576, dtype, 512)
    n_and_k = (2, 2) if few else (8, 8)
    sizes = Sizes(*n_and_k, (heads, latent), gated_delta=True)
    found = list(check.findings(kernels, device, sizes))
    assert [one for one in found if one.problem] == []
