"""Address spans of rows, such as those of `req_to_token`."""

import torch


def spans(
    rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and columns of the entries ``start .. end - 1`` of each row, concatenated."""
    size = (end - start).long()
    owner = torch.repeat_interleave(size)  # [total] which row an entry goes to
    place = torch.arange(len(owner), device=size.device) - (size.cumsum(0) - size)[owner]
    return rows[owner], start.long()[owner] + place
