"""Between host and device, without either waiting for the other.

A copy runs when the device comes to it, which is after the call that asked for it. Both of its ends
must last until then, and on CUDA only memory that is pinned is copied without the host.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")


def on_device(
    device: torch.device | str, values: Sequence[Any], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Numbers, or equally long rows of them, as a tensor there; the copy may still be under way.

    Args:
        device: where to.
        values: on the host.
        dtype: of the tensor; None: what torch makes of such numbers, which is float32 of fractions.
    """
    # The host is named: within `with torch.device("cuda")` torch would copy there, and wait.
    return to_device(device, torch.tensor(values, dtype=dtype, device="cpu"))


def to_device(device: torch.device | str, values: torch.Tensor) -> torch.Tensor:
    """A tensor of the host's there; the copy may still be under way.

    The host's memory may be let go at once. Torch hands pinned memory out anew only behind the
    copies from it that do not block: each leaves an event, which its host allocator asks for.
    """
    if torch.device(device).type == "cuda":
        values = values.contiguous().pin_memory()
    return values.to(device, non_blocking=True)


def on_host(values: T) -> T:
    """The same with each tensor in it on the host, once the current stream has come so far.

    The stream may be another one than that on which the tensors were made. Then their memory could
    be handed out anew on that one while this one still reads it, if nobody else held them:
    therefore each is marked as used here. SGLang's own `_async_d2h` does all of this alike.

    Args:
        values: a tensor, or tuples, lists and dictionaries of them and of anything else.
    """
    return each_tensor(_on_host, values)


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The same tuples, lists and dictionaries with each tensor in them changed."""
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, dict):
        return {key: each_tensor(change, value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        changed = [each_tensor(change, value) for value in values]
        named = isinstance(values, tuple) and hasattr(values, "_make")
        return type(values)(*changed) if named else type(values)(changed)
    return values


def joined(parts: Sequence[T]) -> T:
    """Join parts of a batch: tensors and lists of each place in them, along the first dimension.

    Args:
        parts: tensors, lists, None, or named tuples of such; of one form.
    """
    first, each = parts[0], cast("Sequence[Any]", parts)
    found: Any = first
    if isinstance(first, torch.Tensor):
        found = torch.cat(list(each))
    elif isinstance(first, list):
        found = [value for part in each for value in part]
    elif isinstance(first, tuple):
        found = type(first)(*map(joined, zip(*each, strict=True)))
    return found


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu", non_blocking=True)
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return copied
