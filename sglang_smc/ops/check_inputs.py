"""Generate random inputs for the checks of kernels, in the sizes of a server's rounds."""

from typing import NamedTuple

import torch

from sglang_smc.models.softmax import Heads

NUM_GROUPS, VOCAB, PREFIX = 3, 1000, 70


class Sizes(NamedTuple):
    """Sizes of a server's rounds."""

    num_particles: int = 8
    num_steps: int = 8
    heads: tuple[Heads, ...] = ()  # of its models' attention
    gated_delta: bool = False  # whether some layers have linear attention (gated delta rule)


class Inputs:
    """Random inputs with a fixed seed, in the sizes of the server's rounds."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.shape = NUM_GROUPS, sizes.num_particles, sizes.num_steps
        self._generator = torch.Generator().manual_seed(0)

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return integers in ``low .. high - 1``, int64."""
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def uniforms(self, *shape: int) -> torch.Tensor:
        """Return uniforms in [0, 1), float64."""
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return drawn.to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def flags(self, share: float, *shape: int) -> torch.Tensor:
        return self.uniforms(*shape) < share

    def numbers(self, *values: float) -> torch.Tensor:
        """Return the values as a tensor, float64."""
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def logits(self, num_rows: int) -> torch.Tensor:
        return 3 * self.normal(num_rows, VOCAB)

    def present(self) -> torch.Tensor:
        """Return present particles ``[G, N]`` bool, at least the first of each group."""
        size, num_particles, _ = self.shape
        return torch.arange(num_particles, device=self.device) < self.whole(
            1, num_particles + 1, size, 1
        )
