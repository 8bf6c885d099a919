"""Stand in for Mooncake's transfer engine: one process of a machine writes into another's memory.

SGLang's transfer of KV runs on it as it is, found where its parent folder is on the path.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _pid_of(peer: str) -> int:
    return int(peer.rsplit(":", 1)[1])


class TransferEngine:
    """The part of `mooncake.engine.TransferEngine` that SGLang calls; its port is its process."""

    def initialize(self, *_: object) -> int:
        from sglang.srt.disaggregation.mooncake import conn

        sender: Any = conn.MooncakeKVSender
        sender.supports_host_tensor_indices = False  # they come with an event of CUDA
        return 0

    def get_rpc_port(self) -> int:
        return os.getpid()

    def register_memory(self, *_: object) -> int:
        return 0

    unregister_memory = batch_register_memory = batch_unregister_memory = register_memory

    def send_probe(self, peer: str) -> int:
        return 0 if os.path.exists(f"/proc/{_pid_of(peer)}") else -1

    def transfer_sync_write(self, peer: str, source: int, target: int, size: int) -> int:
        spans = ctypes.byref(_Span(source, size)), ctypes.byref(_Span(target, size))
        moved = _LIBC.process_vm_writev(_pid_of(peer), spans[0], 1, spans[1], 1, 0)
        return 0 if moved == size else -1

    def batch_transfer_sync_write(
        self, peer: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> int:
        each = zip(sources, targets, sizes, strict=True)
        return min((self.transfer_sync_write(peer, *one) for one in each), default=0)
