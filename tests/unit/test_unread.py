"""Marks of slots whose tokens the draft has not read."""

import torch

from sglang_smc.kv.unread import UnreadSlots


def test_the_first_unread_token_of_each_text_is_found() -> None:
    """Red where another text's slots, or those behind a text, are looked at."""
    table = torch.tensor([[0] * 6, [9, 8, 7, 6, 5, 4], [9, 8, 3, 2, 1, 0]], dtype=torch.int32)
    unread = UnreadSlots(table, 10)
    unread.mark(torch.tensor([6, 1]), unread=False)
    assert not unread.has_some and unread.firsts([1, 2], [6, 4]) == [6, 4]
    unread.mark_row(1, 3, 5, unread=True)
    unread.mark_row(2, 4, 5, unread=True)
    assert unread.firsts([1, 2, 2], [6, 4, 5]) == [3, 4, 4]
    unread.mark_row(1, 0, 4, unread=False)
    assert unread.firsts([1, 1], [4, 6]) == [4, 4]
    assert unread.marks.nonzero().flatten().tolist() == [1, 5]
