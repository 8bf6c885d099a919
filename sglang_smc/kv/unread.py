"""Mark KV slots whose tokens the draft has not read: its keys there are another text's.

Rounds without drafts leave the draft out, and so do prompts that such rounds follow. The radix
cache hands their slots on to other requests, which may draft: then the draft reads them.
"""

from collections.abc import Sequence

import torch

from sglang_smc.kv.transfer import on_device


class UnreadSlots:
    """Marks of slots; requests' tokens are in those of their rows of `req_to_token`.

    Args:
        table: ``[rows, width]`` int32, SGLang's `req_to_token`.
        num_slots: of the KV pool, with its padding.
    """

    def __init__(self, table: torch.Tensor, num_slots: int) -> None:
        # As wide as a slot's KV is at least, with which marks are moved (`handover.move`).
        self.marks = torch.zeros(num_slots, dtype=torch.int32, device=table.device)
        self._table = table
        self.has_some = False  # any was ever marked; until then none has to be looked at

    def mark(self, slots: torch.Tensor, *, unread: bool) -> None:
        """Mark ``slots`` ``[M]``, or clear their marks."""
        self.has_some |= unread
        if self.has_some:
            self.marks.index_fill_(0, slots.long(), int(unread))

    def mark_row(self, row: int, start: int, end: int, *, unread: bool) -> None:
        """Mark the slots of a request's tokens ``[start, end)``, or clear their marks."""
        if end > start:
            self.mark(self._table[row, start:end], unread=unread)

    def firsts(self, rows: Sequence[int | None], ends: list[int]) -> list[int]:
        """Return the first marked token of each text, or its end; the host waits for them.

        Args:
            rows: ``[R]`` of `req_to_token`.
            ends: ``[R]`` tokens that are looked at.
        """
        device = self.marks.device
        width = max(ends)
        row, end = on_device(device, [rows, ends]).unbind(0)
        column = torch.arange(width, device=device)
        marked = self.marks[self._table[row, :width].long()] * (column < end.unsqueeze(1))  # [R, W]
        found = torch.where(marked.any(1), marked.argmax(1), end)
        return found.tolist()
