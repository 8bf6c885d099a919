"""Provide the small operations of a round: torch functions, those of a CPU, Triton kernels."""

import os

from sglang_smc.smc.ops import Kind, Ops

TORCH = Ops()


def kind_of(kernels: str, device: str) -> Kind:
    """Return the implementation for a value of `--speculative-smc-kernels` on a device.

    Raises ValueError for "triton" where Triton has neither a GPU nor its interpreter.
    """
    if kernels == "auto":
        return "torch" if device == "cpu" else "triton"
    if kernels == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"--speculative-smc-kernels is {kernels!r} on --device {device}; allowed: 'auto' or "
            "'torch', since Triton needs a GPU. Leave it out, or set TRITON_INTERPRET=1 to run "
            "kernels in Triton's interpreter, thousands of times slower."
        )
    return "torch" if kernels == "torch" else "triton"


def ops_of(kind: Kind, device: str) -> Ops:
    """Return the implementation of a kind on a device; Triton is imported only if needed."""
    if kind == "torch" and device == "cpu":
        from sglang_smc.ops.cpu_ops import CPU

        return CPU
    if kind == "torch":
        return TORCH
    from sglang_smc.ops.triton_ops import TRITON

    return TRITON
