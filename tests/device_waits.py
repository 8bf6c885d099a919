"""What makes a host wait for its device, as torch's own calls show it."""

from typing import Any

import torch

# Operators that read a value, or whose result has a size that depends on values.
WAITING_OPERATORS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}


def refuse_waits(func: Any, args: tuple) -> None:
    """AssertionError where an operator waits for the device."""
    name = func.overloadpacket.__name__
    assert name not in WAITING_OPERATORS, f"{name} waits for the device"
    if name in ("index", "index_put", "index_put_"):
        by_mask = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        assert not by_mask, f"{name} by a mask waits for the device"
    assert name != "repeat_interleave", "repeat_interleave by a tensor waits for the device"
