"""Compute the bytes that a forward pass of a model moves, and its operations.

A pass reads its weights once (of experts those that its tokens visit), reads and writes KV, and
writes and reads its logits; it takes as long as the slower of its traffic and its arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.shapes import ModelShape

#: Logits are written in float32 and read once, to draw from and score them.
LOGIT_BYTES = 2 * 4


class Pass(NamedTuple):
    """A forward pass: its bytes by kind, and its operations."""

    name: str  # decode, draft, verify, or follow: a head's pass over the target's columns
    weights: float
    kv: float
    logits: float
    flops: float
    layers: int  # run sequentially

    def with_weights(self, parameters: int, num_bytes: float, rows: int) -> Pass:
        """Return the pass with a further matrix of ``num_bytes`` a weight, for ``rows`` rows."""
        return self._replace(
            weights=self.weights + parameters * num_bytes,
            flops=self.flops + 2 * parameters * rows,
        )

    @property
    def bytes(self) -> float:
        return self.weights + self.kv + self.logits

    def seconds(self, device: Device) -> float:
        return max(self.bytes / device.bandwidth, self.flops / device.flops)

    def bound(self, device: Device) -> str:
        """Return the limit of the work: ``memory`` or ``compute``."""
        memory = self.bytes / device.bandwidth >= self.flops / device.flops
        return "memory" if memory else "compute"


class Round(NamedTuple):
    """Passes that run sequentially."""

    passes: tuple[Pass, ...]

    @property
    def bytes(self) -> float:
        return sum(one.bytes for one in self.passes)

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

    def seconds(self, device: Device) -> float:
        return sum(self.seconds_by_pass(device).values())

    def seconds_by_pass(self, device: Device) -> dict[str, float]:
        """Return the seconds of all passes of a name, e.g. ``draft`` and ``verify``."""
        found: dict[str, float] = {}
        for one in self.passes:
            found[one.name] = found.get(one.name, 0.0) + one.seconds(device)
        return found

    def bound(self, device: Device) -> str:
        """Return ``memory`` or ``compute``, or, if passes differ, the limit of each by name."""
        limits: dict[str, dict[str, None]] = {}  # in order, without repetition
        for one in self.passes:
            limits.setdefault(one.name, {})[one.bound(device)] = None
        found = {name: "/".join(of_name) for name, of_name in limits.items()}
        values = set(found.values())
        return values.pop() if len(values) == 1 else ", ".join(f"{n} {v}" for n, v in found.items())


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


def forward(name: str, shape: ModelShape, rows: Rows, num_tokens: int, num_logits: int) -> Pass:
    """Return a pass over ``num_tokens`` new tokens per row, with logits of the last ``num_logits``.

    Without logits the LM head is not read.
    """
    logits = rows.count * num_logits
    # Each new token attends to all tokens before it, and to itself.
    seen = shape.seen(rows.context)
    keys = num_tokens * (seen + rows.tail) + num_tokens * (num_tokens + 1) / 2
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
    prefixes = rows.batch if rows.shared_prefix else rows.count
    tokens = prefixes * seen + rows.count * (rows.tail + num_tokens)
    return Pass(
        name,
        weights=shape.bytes_read(rows.count * num_tokens, with_head=num_logits > 0),
        kv=tokens * shape.kv_bytes_per_token + states,
        logits=LOGIT_BYTES * shape.vocab_size * logits,
        flops=flops,
        layers=shape.num_layers,
    )
