"""A potential of how long an output is."""

import math
from collections.abc import Sequence

import msgspec

from sglang_smc.potentials.base import Potential, Text


class LengthArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request says of the length it wants."""

    per_token: float
    """Nats that each token costs which is missing or too many; 0 or more."""

    target: int = 0
    """Tokens of an output, EOS among them, that cost nothing; with 0 each token costs."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_token) and self.per_token >= 0):
            raise ValueError(f"per_token={self.per_token!r}; allowed: a finite number >= 0")
        if self.target < 0:
            raise ValueError(f"target={self.target!r}; allowed: a number of tokens >= 0")


class Length(Potential):
    """log phi = -per_token * |tokens - target|, of tokens of output.

    A beginning pays for what is too many alone: what it lacks can still come.
    """

    Args = LengthArgs

    def complete(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.complete`."""
        return [-t.args.per_token * abs(len(t.output_ids) - t.args.target) for t in texts]

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.prefix`."""
        return [-t.args.per_token * max(0, len(t.output_ids) - t.args.target) for t in texts]
