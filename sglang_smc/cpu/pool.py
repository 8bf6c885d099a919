"""Provide the KV pool of the plain-CPU platform."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """SGLang's KV pool, with slots moved by torch.

    With speculation, the stock pool compiles a Triton kernel for that, and launches it once.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
