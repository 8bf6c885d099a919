"""A GPU that is not there: tensors on "cuda" without values, and how they come and go.

Torch's fake tensors have shapes, types and a device, which operators follow. So what mixes devices,
or needs a value of the device's on the host, fails as it would on a GPU. What a GPU would do by
waiting for itself fails here, too: copies between the devices that block, or that begin or end in
memory that is not pinned. The host's own tensors are real.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeGPU(TorchDispatchMode):
    """What moves while this is entered; begin with `fake_gpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses_waits = False
        self.to_device: list[StorageWeakRef] = []  # the host's memory that was copied there
        self.to_host: list[StorageWeakRef] = []  # the device's that was copied from there
        self.recorded: list[StorageWeakRef] = []  # the device's that was marked as used by a stream
        self._pinned: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        if not any(map(_is_there, leaves)):
            return self._on_host(func, args, kwargs)
        if name == "_local_scalar_dense" and not self.refuses_waits:
            return False if args[0].dtype == torch.bool else 0
        if name in ("index", "index_put", "index_put_"):
            fine = all(i is None or (_is_there(i) and i.dtype != torch.bool) for i in args[1])
            self._check(fine, f"{name} by a mask, or by what is on the host,")
            self._check(all(map(_is_there, args[2:3])), f"{name} of a number of the host's")
        if name == "_to_copy":
            copied = func(*args, **kwargs)
            self._note(args[0], copied, kwargs.get("non_blocking", False))
            return copied
        if name == "copy_":
            self._note(args[1], args[0], len(args) > 2 and args[2])
        return func(*args, **kwargs)

    def _on_host(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name == "is_pinned":
            return self.is_pinned(args[0])
        pins = kwargs.pop("pin_memory", False) or name == "_pin_memory"
        with unset_fake_temporarily():
            made = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
        if pins:
            self._pinned.append(made)
        return made

    def _note(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        """Note a copy from device to device, if it is one."""
        if source.device.type == target.device.type:
            return
        comes = target.device.type == "cuda"
        (self.to_device if comes else self.to_host).append(memory_of(source))
        self._check(non_blocking, "a copy that blocks")
        self._check(self.is_pinned(source if comes else target), "a copy of memory not pinned")

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host's lies in pinned memory."""
        return memory_of(tensor) in map(memory_of, self._pinned)

    def _check(self, is_fine: bool, otherwise: str) -> None:
        assert is_fine or not self.refuses_waits, f"{otherwise} waits for the device"

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Refuse waits; before and after it a value of the device's is 0 on the host."""
        self.refuses_waits = True
        try:
            yield
        finally:
            self.refuses_waits = False


@contextmanager
def fake_gpu() -> Iterator[FakeGPU]:
    """Have "cuda" be a fake GPU of one stream."""
    gpu = FakeGPU()
    record_stream = mock.patch.object(
        torch.Tensor, "record_stream", lambda tensor, _: gpu.recorded.append(memory_of(tensor))
    )
    current_stream = mock.patch.object(torch.cuda, "current_stream", lambda *_: None)
    can_pin = mock.patch("sglang.srt.utils.common.is_pin_memory_available", lambda _=None: True)
    with record_stream, current_stream, can_pin, FakeTensorMode(allow_non_fake_inputs=True), gpu:
        yield gpu


def _is_there(value: object) -> bool:
    """Whether a tensor is on the fake GPU or a copy from there, or a device is the GPU."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, FakeTensor)


def memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    """What a tensor's numbers stand in, without holding it."""
    return StorageWeakRef(tensor.untyped_storage())
