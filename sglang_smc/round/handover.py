"""Hand the rows of requests over to SGLang: to its radix cache, and to other requests.

SGLang gives rows to other requests, and writes them, on its own stream, so each method works on the
stream of rounds, of which one may run, and the current stream waits for it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc import upstream
from sglang_smc.kv.sizes import kv_buffers
from sglang_smc.round.prefill import Prefill
from sglang_smc.state.request import find_state

_MOST_COPIED = 1 << 24  # numbers of 4 bytes in the copy of a part of a layer's KV


@dataclass
class Handover:
    """Hands over rows of a server."""

    prefill: Prefill
    table: torch.Tensor  # `req_to_token`
    pools: list[Any]  # SGLang's KV pools, of target and draft
    page_size: int
    device: str
    stream: Any = None  # of the last batch

    def finish(self, req: Req) -> None:
        """Let the draft have done with a finished sequence; keep its last slot out of the cache.

        The draft would read the last token only in a further round. Both models have read all
        tokens that the cache already owns, in a prefill.
        """
        if self.prefill.is_behind(req):
            with self._after_rounds():
                self.prefill.finish(req)
        if len(req.output_ids) > 1:
            kv = upstream.kv_of(req)
            kv.kv_committed_len = max(kv.kv_committed_len - 1, kv.cache_protected_len)

    def order_pages(self, req: Req, *, keeps: bool) -> None:
        """Put a row that rounds have had into the order of pages, and move its KV if ``keeps``."""
        kv = upstream.kv_of(req)
        page = self.page_size
        end = upstream.allocated(req)
        start = max(kv.cache_protected_len, len(req.origin_input_ids) // page * page)
        # Before the first round a row ends with its text, and is in order.
        if find_state(req) is None or end <= start or end % page:
            return
        with self._after_rounds():
            row = self.table[kv.req_pool_idx]
            buffers = self._buffers() if keeps else ()
            order(row[start:end], kv.kv_committed_len - start, buffers)

    def _buffers(self) -> Iterator[torch.Tensor]:
        """Yield what the pools have for each slot, and its mark."""
        for pool in self.pools:
            yield from kv_buffers(pool)
        if self.prefill.unread is not None:
            yield self.prefill.unread.marks

    @contextmanager
    def _after_rounds(self) -> Iterator[None]:
        """Work on the stream of rounds; the current stream waits for it."""
        device = torch.get_device_module(self.device)
        with device.stream(self.stream):
            yield
        device.current_stream().wait_stream(self.stream)


def order(row: torch.Tensor, num_kept: int, buffers: Iterable[torch.Tensor]) -> None:
    """Sort the slots of a part of a row, and move the KV of its first tokens to the new ones.

    Args:
        row: ``[A]`` int32 of `req_to_token`, the slots of whole pages.
        num_kept: its first tokens; KV in the other slots is overwritten.
        buffers: ``[slots, ...]`` each, of KV, as `move` takes them.
    """
    slots = row.long()
    ordered = slots.sort().values
    for buffer in buffers:
        move(buffer, slots[:num_kept], ordered[:num_kept])
    row.copy_(ordered)


def move(buffer: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy KV of ``[slots, ...]`` from ``sources`` ``[n]`` int64 to ``targets``; both may overlap.

    The buffer must be contiguous.
    """
    rows = buffer.view(torch.int32).view(len(buffer), -1)
    # Each part has all tokens: one token's slot may be where another is to be copied from.
    for part in rows.split(max(1, _MOST_COPIED // max(1, len(sources))), dim=1):
        part.index_copy_(0, targets, part.index_select(0, sources))
