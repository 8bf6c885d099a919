"""Describe passes of models: the bytes that each moves, and its operations.

A pass reads its weights once (of experts those that its tokens visit), reads and writes KV, and
writes and reads its logits; it takes as long as the slower of its traffic and its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.shapes import ModelShape

#: Logits are written in float32 and read once, to draw from and score them.
LOGIT_BYTES = 2 * 4


class Cost(NamedTuple):
    """Bytes and floating-point operations of some work."""

    bytes: float
    flops: float

    def seconds(self, device: Device) -> float:
        return max(self.bytes / device.bandwidth, self.flops / device.flops)

    def bound(self, device: Device) -> str:
        """Return the limit of the work: ``memory`` or ``compute``."""
        memory = self.bytes / device.bandwidth >= self.flops / device.flops
        return "memory" if memory else "compute"


class Pass(NamedTuple):
    """A forward pass: its bytes by kind, and its operations."""

    name: str  # decode, draft, verify, or follow: a head's pass over the target's columns
    weights: float
    kv: float
    logits: float
    flops: float
    layers: int  # run sequentially

    @property
    def cost(self) -> Cost:
        return Cost(self.weights + self.kv + self.logits, self.flops)

    def with_weights(self, parameters: int, num_bytes: float, rows: int) -> Pass:
        """Return the pass with a further matrix of ``num_bytes`` a weight, for ``rows`` rows."""
        return self._replace(
            weights=self.weights + parameters * num_bytes,
            flops=self.flops + 2 * parameters * rows,
        )


@dataclass(frozen=True)
class Round:
    """Passes that run sequentially."""

    passes: tuple[Pass, ...]

    @property
    def bytes(self) -> float:
        return sum(one.cost.bytes for one in self.passes)

    @property
    def flops(self) -> float:
        return sum(one.flops for one in self.passes)

    @property
    def layers(self) -> int:
        """Return the sequential layers; each adds kernel launches, which no bound counts."""
        return sum(one.layers for one in self.passes)

    @property
    def traffic(self) -> dict[str, float]:
        """Return the bytes by kind: ``weights``, ``kv`` and ``logits``."""
        kinds = ("weights", "kv", "logits")
        return {kind: sum(getattr(one, kind) for one in self.passes) for kind in kinds}

    @property
    def parts(self) -> dict[str, Round]:
        """Return the passes by name, e.g. ``draft`` and ``verify``."""
        names = dict.fromkeys(one.name for one in self.passes)
        return {n: Round(tuple(one for one in self.passes if one.name == n)) for n in names}

    def seconds(self, device: Device) -> float:
        return sum(one.cost.seconds(device) for one in self.passes)

    def bound(self, device: Device) -> str:
        """Return ``memory`` or ``compute``, or, if passes differ, the limit of each by name."""
        limits = {
            name: "/".join(dict.fromkeys(one.cost.bound(device) for one in part.passes))
            for name, part in self.parts.items()
        }
        found = set(limits.values())
        return found.pop() if len(found) == 1 else ", ".join(f"{n} {v}" for n, v in limits.items())


class Rows(NamedTuple):
    """The sequences that one pass continues: ``batch`` requests of ``num_particles`` each.

    The particles of a request share ``context`` tokens, and each has a ``tail`` of its own, all in
    the KV cache already. A ``shared_prefix`` is read once per request, not once per particle.
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
        """Return the tokens of KV that a pass reads; of a prefix only those within the windows."""
        prefixes = self.batch if self.shared_prefix else self.count
        return prefixes * shape.seen(self.context) + self.count * self.tail


def forward(name: str, shape: ModelShape, rows: Rows, num_tokens: int, num_logits: int) -> Pass:
    """Return a pass over ``num_tokens`` new tokens per row, with logits of the last ``num_logits``.

    Without logits the LM head is not read.
    """
    logits = rows.count * num_logits
    # Each new token attends to all tokens before it, and to itself.
    seen = shape.seen(rows.context) + rows.tail
    keys = num_tokens * seen + num_tokens * (num_tokens + 1) / 2
    flops = (
        2 * shape.active_parameters * rows.count * num_tokens
        + shape.attention_flops * rows.count * keys
        + 2 * shape.head_parameters * logits
    )
    states = 0.0
    if shape.states is not None:  # advanced over the kept last columns, then the new
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
