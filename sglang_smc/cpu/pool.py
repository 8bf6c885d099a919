"""KV slot allocator of the plain-CPU platform."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache


class CpuTokenAllocator(TokenToKVPoolAllocator):
    """SGLang's slot allocator behind the paged signature that platforms are called with.

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
