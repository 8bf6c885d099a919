"""Define devices' memory bandwidth and compute: from data sheets, or measured here."""

from __future__ import annotations

import os
from typing import Any, NamedTuple


class Device(NamedTuple):
    """A device's roofline at one precision."""

    name: str
    bandwidth: float  # bytes a second
    flops: float  # a second
    capacity: float | None = None  # bytes of memory

    @property
    def ridge(self) -> float:
        """Return the operations per byte above which work is compute-bound."""
        return self.flops / self.bandwidth

    def times(self, count: int) -> Device:
        """Return ``count`` of these as one device that splits each pass perfectly (TP)."""
        if count == 1:
            return self
        capacity = None if self.capacity is None else count * self.capacity
        name = f"{count} x {self.name}"
        return Device(name, count * self.bandwidth, count * self.flops, capacity)


#: From data sheets, of the SXM module where there are several: bytes a second, FLOP a second in
#: bf16 and in fp8, and bytes. FLOP/s are dense, with float32 accumulation: data sheets often print
#: the doubled sparse ones.
DATA_SHEETS = {
    # NVIDIA A100 80GB SXM data sheet. No fp8 units: fp8 weights are multiplied in bf16.
    "a100": (2.039e12, 312e12, 312e12, 80e9),
    # NVIDIA H100 Tensor Core GPU data sheet (1,979 and 3,958 TFLOP/s with sparsity).
    "h100": (3.35e12, 989e12, 1979e12, 80e9),
    # NVIDIA H200 Tensor Core GPU data sheet.
    "h200": (4.8e12, 989e12, 1979e12, 141e9),
    # NVIDIA DGX B200 data sheet, an eighth of its 64 TB/s, 1,440 GB and sparse 72 PFLOP/s of fp8.
    "b200": (8e12, 2250e12, 4500e12, 180e9),
    # NVIDIA L40S data sheet.
    "l40s": (864e9, 362e12, 733e12, 48e9),
    # NVIDIA L4 data sheet.
    "l4": (300e9, 121e12, 242e12, 24e9),
    # NVIDIA Ada GPU architecture white paper, table 2.
    "rtx-4090": (1008e9, 165.2e12, 330.3e12, 24e9),
}


def named(name: str, weight_bytes: float = 2.0) -> Device:
    """Return a device by its data sheet, computing on weights of ``weight_bytes`` (1 fp8, 2 bf16).

    Raises ValueError for other names.
    """
    if name.lower() not in DATA_SHEETS:
        raise ValueError(
            f"{name!r} is no known device. Known: {', '.join(DATA_SHEETS)}. 'measured' measures "
            "this machine."
        )
    bandwidth, bf16, fp8, capacity = DATA_SHEETS[name.lower()]
    rates = {1.0: fp8, 2.0: bf16}
    return Device(name.lower(), bandwidth, rates[weight_bytes], capacity)


def measure(
    device: str = "cpu", weight_bytes: float = 2.0, *, nbytes: int = 1 << 30, seconds: float = 1.0
) -> Device:
    """Measure this machine's ``device`` ("cpu" or "cuda") for about three times ``seconds``.

    Bandwidth is the better of a copy and a sum over ``nbytes``, which must exceed all caches;
    compute is a square matrix product, in bf16 (``weight_bytes`` 2) or float32 (4).

    Raises ValueError for other precisions and for devices that torch does not find.
    """
    import torch
    from torch.utils.benchmark import Timer

    types = {2.0: torch.bfloat16, 4.0: torch.float32}
    if weight_bytes not in types:
        raise ValueError(
            f"A device is measured with weights of 2 bytes (bf16) or 4 (float32), not "
            f"{weight_bytes}. Name the device for fp8."
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device here. Measure 'cpu', or name a device.")

    def fastest(work: str, **values: Any) -> float:
        """Return the seconds of the fastest run of ``work``."""
        timer = Timer(work, globals=values, num_threads=torch.get_num_threads())
        return min(timer.blocked_autorange(min_run_time=seconds).times)

    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * nbytes / fastest("target.copy_(source)", source=source, target=target)
    read = nbytes / fastest("source.sum()", source=source)
    size = 8192 if device == "cuda" else 1024
    square = torch.ones(size, size, dtype=types[weight_bytes], device=device)
    flops = 2 * size**3 / fastest("square @ square", square=square)
    if device == "cuda":
        capacity = torch.cuda.get_device_properties(0).total_memory
    else:
        capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(f"{device} (measured)", max(copy, read), flops, float(capacity))
