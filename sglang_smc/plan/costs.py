"""What a round of each draft costs, and the speed that measured tokens per pass make of it."""

from __future__ import annotations

from typing import NamedTuple

from sglang_smc.plan.devices import Device
from sglang_smc.plan.passes import Round
from sglang_smc.plan.proposals import Proposal
from sglang_smc.plan.roofline import smc_round
from sglang_smc.plan.shapes import ModelShape


class RoundCost(NamedTuple):
    """A round's least time on a device, in seconds, by what takes it."""

    draft: float  # to propose
    target: float  # its pass
    rest: float  # a head's, over the target's columns
    layers: int  # one after another, of all passes
    batch: int
    num_steps: int

    @classmethod
    def of(cls, one: Round, device: Device, batch: int, num_steps: int) -> RoundCost:
        seconds = {name: part.seconds(device) for name, part in one.parts.items()}
        return cls(
            draft=seconds.get("draft", 0.0),
            target=seconds["verify"],
            rest=seconds.get("follow", 0.0),
            layers=one.layers,
            batch=batch,
            num_steps=num_steps,
        )

    @property
    def seconds(self) -> float:
        return self.draft + self.target + self.rest

    def tokens_per_second(self, tokens_per_pass: float) -> float:
        """At most, of all requests together.

        Args:
            tokens_per_pass: that a request commits in a round, on average, as measured: 1 to K + 1.
        """
        if not 1 <= tokens_per_pass <= self.num_steps + 1:
            raise ValueError(
                f"tokens per pass are {tokens_per_pass:g}; {self.num_steps} steps yield 1 to "
                f"{self.num_steps + 1}."
            )
        return self.batch * tokens_per_pass / self.seconds


def round_cost(
    target: ModelShape,
    draft: Proposal,
    device: Device,
    num_particles: int,
    num_steps: int,
    *,
    batch: int = 1,
    context: float,
    tail: float = 0.0,
    shared_prefix: bool = True,
) -> RoundCost:
    """The cost of a round of N particles and K steps.

    Args:
        target: of `shapes.from_config`.
        draft: what proposes, of `proposals.from_config`.
        device: of `devices.named` or `devices.measure`, at `proposals.lowest_precision`.
        num_particles: N.
        num_steps: K.
        batch: requests at once.
        context: tokens that a request's particles share.
        tail: tokens that each particle has of its own.
        shared_prefix: the shared tokens are read once a request, not once a particle.

    Raises ValueError for sizes below 1, and for a draft that does not fit the target or K.
    """
    one = smc_round(target, draft, batch, num_particles, num_steps, context, tail, shared_prefix)
    return RoundCost.of(one, device, batch, num_steps)
