"""Copy tensors between host and device asynchronously.

A copy runs on the device's stream after the call has returned. Source and destination must live
until then, and on CUDA only pinned memory is copied without blocking the host.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

T = TypeVar("T")


def on_device(
    device: torch.device | str, values: Sequence[Any], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return numbers, or equally long rows of them, as a tensor on a device, asynchronously.

    Args:
        dtype: of the tensor; None: torch's default for such numbers, float32 for floats.
    """
    # device="cpu": within `with torch.device("cuda")` torch would copy to the GPU, and block.
    return to_device(device, torch.tensor(values, dtype=dtype, device="cpu"))


def to_device(device: torch.device | str, values: torch.Tensor) -> torch.Tensor:
    """Return a host tensor on a device, asynchronously.

    The host's tensor may be freed at once: torch's host allocator reuses pinned memory only after
    the non-blocking copies from it, for each of which it records an event.
    """
    if torch.device(device).type == "cuda":
        values = values.contiguous().pin_memory()
    return values.to(device, non_blocking=True)


def on_host(values: T) -> T:
    """Copy each tensor in a structure to the host, asynchronously on the current stream.

    The tensors may have been allocated on another stream, which could reuse their memory while
    this one still reads it: therefore each is marked as used on this stream, as SGLang's own
    `_async_d2h` does.

    Args:
        values: a tensor, or tuples, lists and dictionaries of tensors and of anything else.
    """
    return each_tensor(_on_host, values)


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Apply a function to each tensor in nested tuples, lists and dictionaries."""
    return tree_map_only(torch.Tensor, change, values)


def joined(parts: Sequence[T]) -> T:
    """Concatenate parts of a batch: their tensors and lists, along the first dimension.

    Args:
        parts: tensors, lists, None, or named tuples of these; all of the same structure.
    """

    def join(*each: Any) -> Any:
        if isinstance(each[0], torch.Tensor):
            return torch.cat(each)
        return list(chain(*each)) if isinstance(each[0], list) else each[0]

    return tree_map(join, *parts, is_leaf=lambda part: isinstance(part, list))


def padded_to_widest(parts: Sequence[T]) -> list[T]:
    """Return parts of a batch with tensors of equal shapes but for the first dimension.

    Zeros follow what is narrower than another part's.

    Args:
        parts: of the same structure, as for `joined`.
    """
    columns = [
        [one for one in tree_leaves(part) if isinstance(one, torch.Tensor)] for part in parts
    ]
    widths = [
        [max(sizes) for sizes in zip(*(one.shape[1:] for one in of), strict=True)]
        for of in zip(*columns, strict=True)
    ]
    found = []
    for part in parts:
        each = iter(widths)
        found.append(each_tensor(lambda column, each=each: _widened(column, next(each)), part))
    return found


def _widened(column: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    more = [width - own for own, width in zip(column.shape[1:], widths, strict=True)]
    return pad(column, [side for width in reversed(more) for side in (0, width)])


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu", non_blocking=True)
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return copied
