"""Passes of models: the bytes that each must move, and the operations it computes.

A pass reads its weights once (of experts those that its tokens visit), reads and writes KV, and
writes and reads its logits; it takes as long as the slower of its traffic and its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang_smc.plan.devices import Device
from sglang_smc.plan.shapes import ModelShape

#: Logits are written in float32 and read once, to draw from and score them.
LOGIT_BYTES = 2 * 4


class Cost(NamedTuple):
    """What some work moves and computes."""

    bytes: float
    flops: float

    def seconds(self, device: Device) -> float:
        return max(self.bytes / device.bandwidth, self.flops / device.flops)

    def bound(self, device: Device) -> str:
        """What limits the work: ``memory`` or ``compute``."""
        memory = self.bytes / device.bandwidth >= self.flops / device.flops
        return "memory" if memory else "compute"


class Pass(NamedTuple):
    """One forward pass: the bytes it moves, by what they are, and what it computes."""

    name: str  # decode, draft, verify, or follow: what a draft does with the target's columns
    weights: float
    kv: float
    logits: float
    flops: float
    layers: int  # one after another

    @property
    def cost(self) -> Cost:
        return Cost(self.weights + self.kv + self.logits, self.flops)

    def with_weights(self, parameters: int, num_bytes: float, rows: int) -> Pass:
        """The same, with a matrix besides, of ``num_bytes`` a weight, for so many rows."""
        return self._replace(
            weights=self.weights + parameters * num_bytes,
            flops=self.flops + 2 * parameters * rows,
        )


@dataclass(frozen=True)
class Round:
    """Passes one after another."""

    passes: tuple[Pass, ...]

    @property
    def bytes(self) -> float:
        return sum(one.cost.bytes for one in self.passes)

    @property
    def flops(self) -> float:
        return sum(one.flops for one in self.passes)

    @property
    def layers(self) -> int:
        """Layers one after another: each is some kernel launches, whose gaps no bound counts."""
        return sum(one.layers for one in self.passes)

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes by what they are: ``weights``, ``kv`` and ``logits``."""
        kinds = ("weights", "kv", "logits")
        return {kind: sum(getattr(one, kind) for one in self.passes) for kind in kinds}

    @property
    def parts(self) -> dict[str, Round]:
        """The passes by their names, e.g. ``draft`` and ``verify``."""
        names = dict.fromkeys(one.name for one in self.passes)
        return {n: Round(tuple(one for one in self.passes if one.name == n)) for n in names}

    def seconds(self, device: Device) -> float:
        return sum(one.cost.seconds(device) for one in self.passes)

    def bound(self, device: Device) -> str:
        """``memory``, ``compute``, or where passes differ what limits each, by name."""
        limits = {
            name: "/".join(dict.fromkeys(one.cost.bound(device) for one in part.passes))
            for name, part in self.parts.items()
        }
        found = set(limits.values())
        return found.pop() if len(found) == 1 else ", ".join(f"{n} {v}" for n, v in limits.items())


class Rows(NamedTuple):
    """The texts that one pass continues: ``batch`` requests of ``num_particles`` each.

    The particles of a request have ``context`` tokens in common, and ``tail`` of their own, all
    in the KV cache already. A ``shared_prefix`` is read once a request, not once a particle.
    """

    batch: int
    num_particles: int
    context: float
    tail: float
    shared_prefix: bool

    @property
    def count(self) -> int:
        return self.batch * self.num_particles

    def kv_tokens(self, shape: ModelShape) -> float:
        """Tokens whose KV a pass reads; of a prefix no more than its layers see."""
        prefixes = self.batch if self.shared_prefix else self.count
        return prefixes * shape.seen(self.context) + self.count * self.tail


def forward(name: str, shape: ModelShape, rows: Rows, num_tokens: int, num_logits: int) -> Pass:
    """A pass over ``num_tokens`` new tokens of each row, with logits of the last ``num_logits``.

    Without logits the LM head is not read.
    """
    logits = rows.count * num_logits
    # Each new token attends to all before it, and to itself.
    seen = shape.seen(rows.context) + rows.tail
    keys = num_tokens * seen + num_tokens * (num_tokens + 1) / 2
    flops = (
        2 * shape.active_parameters * rows.count * num_tokens
        + shape.attention_flops * rows.count * keys
        + 2 * shape.head_parameters * logits
    )
    states = 0.0
    if shape.states is not None:  # rolled over what was kept of the last columns, then on
        turns = 1 if num_tokens == 1 else 2
        states = 2 * turns * rows.count * shape.states.bytes
        flops += turns * rows.count * num_tokens * shape.states.flops
    kv = (rows.kv_tokens(shape) + rows.count * num_tokens) * shape.kv_bytes_per_token
    return Pass(
        name,
        weights=shape.bytes_read(rows.count * num_tokens, with_head=num_logits > 0),
        kv=kv + states,
        logits=LOGIT_BYTES * shape.vocab_size * logits,
        flops=flops,
        layers=shape.num_layers,
    )
