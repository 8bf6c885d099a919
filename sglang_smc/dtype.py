"""Choose the fastest number format of a CPU."""

AUTO_DTYPE_ENV = "SGLANG_SMC_CPU_AUTO_DTYPE"
"""For tests: set to 1, it has the CPU platform leave `--dtype auto` to SGLang, as on a GPU."""


def default_dtype() -> str:
    """Return bfloat16 where the processor supports it in hardware, else float32.

    In hardware bfloat16 is two to five times as fast as float32. Elsewhere it is emulated, and
    float32 is both faster and more precise.
    """
    import torch

    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
