"""Provide the KV pool of the plain-CPU platform, and its slot allocator."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """SGLang's KV pool, with slots moved by torch.

    With speculation, the stock pool compiles a Triton kernel for that, and launches it once.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True


class CpuTokenAllocator(TokenToKVPoolAllocator):
    """SGLang's slot allocator with the paged signature of platforms.

    The stock paged allocator needs Triton kernels; on a CPU a page is one slot.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: KVCache,
        need_sort: bool,
    ) -> None:
        if page_size != 1:
            raise ValueError(f"the smc_cpu platform needs --page-size 1, got {page_size}")
        super().__init__(size, dtype, device, kvcache, need_sort)
