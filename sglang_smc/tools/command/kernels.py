"""Check each kernel against its torch reference on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_smc.tools.command.findings import Finding, fail, ok, warning

if TYPE_CHECKING:
    from sglang_smc.ops.check_inputs import Sizes

DO = (
    "A server replaces it by its torch function, and says so; --speculative-smc-kernels torch does "
    "without all kernels."
)


def findings(num_particles: int, num_steps: int) -> Iterator[Finding]:
    """Yield a finding for each operation, as soon as it is available.

    Args:
        num_particles, num_steps: N and K of the rounds that set the inputs' sizes.
    """
    import torch

    from sglang_smc.ops import check
    from sglang_smc.ops.select import ops_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        yield warning(
            "kernels",
            f"no GPU runs them here; on one these are checked: {', '.join(check.CHECKS)}",
            "Run it on the GPU that is to serve. TRITON_INTERPRET=1 runs kernels in Triton's "
            "interpreter, which says little of a GPU.",
        )
        return
    try:
        kernels = ops_of("triton")
    except ImportError as error:
        yield fail("kernels", f"cannot be imported: {error}", DO)
        return
    for found in check.findings(kernels, device, _sizes(num_particles, num_steps, device)):
        if found.problem:
            yield fail(found.name, found.problem, DO)
        else:
            told = f"agrees with torch, within {found.deviation:.1g}"
            yield ok(found.name, told, deviation=found.deviation)
        if found.is_fatal:
            yield fail("device", "stopped by this kernel", "The others cannot be checked.")
            return


def _sizes(num_particles: int, num_steps: int, device: str) -> Sizes:
    """Return input sizes: heads of Llama 3 8B and DeepSeek-V2-Lite; small for the interpreter."""
    import torch

    from sglang_smc.models.softmax import Heads
    from sglang_smc.ops.check_inputs import Sizes

    if device == "cpu":
        heads = Heads(4, 2, 32, torch.float32), Heads(3, 1, 40, torch.float32, 32)
    else:
        heads = Heads(32, 8, 128, torch.bfloat16), Heads(16, 1, 576, torch.bfloat16, 512)
    return Sizes(num_particles, num_steps, heads, gated_delta=True)
