"""Launches, where there is no GPU: torch calls that touch memory, and kernels that are not run."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FREE = {"new_empty", "_unsafe_view"}  # neither is a launch


class Calls(TorchDispatchMode):
    """Notes the torch calls that touch memory: on a GPU each is a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Launch:
    """Stands in for a kernel: counts its launches, and keeps what it was to be launched with."""

    def __init__(self) -> None:
        self.count = 0
        self.arguments: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(extent, int) for extent in grid)
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.arguments = arguments
        self.count += 1
