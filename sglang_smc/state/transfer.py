"""From the host to the device, without waiting for it."""

from typing import Any

import torch


def on_device(device: torch.device | str, values: list[Any]) -> torch.Tensor:
    """Numbers, or equally long rows of them, as a tensor there; the copy may still be under way."""
    return torch.tensor(values).to(device, non_blocking=True)
