"""Bound the time of decoding from below: bytes to move and operations to compute.

Each pass of a model takes the longer of its memory and its compute time (Williams et al. 2009; for
SMC: section 3.1 of arXiv 2604.15672). A pass reads its weights once (of experts those that its
tokens visit), reads and writes KV, and writes and reads its logits. Passes run one after another,
so their times add up. Left out are launch gaps, synchronization, sampling, activations, hidden
states and communication between devices: the results are bounds, not predictions.

A head's own KV covers the target's columns: once these are known it is computed from their hidden
states, in a pass named ``follow``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from sglang_smc_tools.plan.devices import Device
from sglang_smc_tools.plan.shapes import DFLASH, ModelShape

DEFAULT_PARTICLES = (4, 8, 16)
#: The largest batch at which plain decoding is compared.
LARGEST_BATCH = 1024
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
            weights=self.weights + parameters * num_bytes, flops=self.flops + 2 * parameters * rows
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


class RoundCost(NamedTuple):
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


class PassRows(NamedTuple):
    """The sequences that one pass continues: ``batch`` requests of ``num_particles`` each.

    The particles of a request share ``context`` tokens, and each has a ``tail`` of its own, all in
    the KV cache already. A ``shared_prefix`` is read once per request, not once per particle.
    """

    batch: int
    num_particles: int
    context: float
    tail: float = 0.0
    shared_prefix: bool = True

    @property
    def count(self) -> int:
        return self.batch * self.num_particles


def forward(name: str, shape: ModelShape, rows: PassRows, num_tokens: int, num_logits: int) -> Pass:
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


def ar_step(target: ModelShape, batch: int, context: float) -> RoundCost:
    """Return the pass for one token of each of ``batch`` requests with ``context`` tokens."""
    rows = PassRows(batch, 1, context)
    return RoundCost((forward("decode", target, rows, 1, 1),))


def smc_round(target: ModelShape, draft: ModelShape, rows: PassRows, num_steps: int) -> RoundCost:
    """Return the draft's passes over all particles, and a target pass over K + 1 tokens of each.

    With one particle it is a round of speculative decoding with one chain.

    Raises ValueError for a draft that does not fit.
    """
    verify = forward("verify", target, rows, num_steps + 1, num_steps + 1)
    draft.require_fit(target, num_steps)
    if draft.kind == DFLASH:
        block, follow = _of_block(target, draft, rows, num_steps)
        return RoundCost((block, *_steps(target, draft, rows, num_steps), verify, follow))
    if draft.is_head:
        drafted = _drafted(draft, rows, [1] * num_steps)
        return RoundCost((*drafted, verify, _follow(draft, rows, num_steps)))
    # The first reads the last round's last draft token, not yet in the draft's KV, and the bonus.
    tokens = (2, *[1] * (num_steps - 1)) if draft.num_layers else ()
    return RoundCost((*_drafted(draft, rows, tokens), verify))


def _drafted(draft: ModelShape, rows: PassRows, num_tokens: Iterable[int]) -> list[Pass]:
    """Return a pass over so many tokens of each row for each step.

    An EAGLE-3 head reads fc's output first, computed before, and then its own states.
    """
    found = []
    for count in num_tokens:
        found.append(forward("draft", draft, rows, count, 1))
        rows = rows._replace(tail=rows.tail + count)
    return found


def _follow(draft: ModelShape, rows: PassRows, num_steps: int) -> Pass:
    """Return an EAGLE-3 head's pass over N (K + 1) target columns: all but its LM head."""
    follow = forward("follow", draft, rows, num_steps + 1, 0)
    return follow.with_weights(draft.fc_parameters, draft.head_bytes, rows.count * (num_steps + 1))


def _steps(target: ModelShape, draft: ModelShape, rows: PassRows, num_steps: int) -> list[Pass]:
    """Return what a block adds to the logits of each step by the tokens before."""
    if not draft.step_parameters:
        return []
    logits = LOGIT_BYTES * target.vocab_size * rows.count
    step = Pass("draft", weights=0.0, kv=0.0, logits=logits, flops=0.0, layers=1)
    return [step.with_weights(draft.step_parameters, draft.head_bytes, rows.count)] * num_steps


def _of_block(
    target: ModelShape, draft: ModelShape, rows: PassRows, num_steps: int
) -> tuple[Pass, Pass]:
    """Return a pass over the last token and K masks, and one over the target's columns.

    The first has N K rows of logits by the target's LM head; attention is bidirectional within
    the block. The layers of the second are independent and count as one.
    """
    drafts = rows.count * num_steps
    columns = rows.count * (num_steps + 1)
    unmasked = drafts * (num_steps + 1) / 2
    block = forward("draft", draft, rows, num_steps + 1, 0)
    block = block._replace(
        flops=block.flops + draft.attention_flops * unmasked,
        logits=LOGIT_BYTES * target.vocab_size * drafts,
    ).with_weights(target.head_parameters, target.head_bytes, drafts)
    heads = draft.num_layers * draft.num_kv_heads * draft.head_dim
    written = columns * draft.kv_bytes_per_token
    follow = Pass("follow", weights=0.0, kv=written, logits=0.0, flops=0.0, layers=1)
    follow = follow.with_weights(draft.fc_parameters, draft.head_bytes, columns)
    return block, follow.with_weights(2 * draft.hidden_size * heads, draft.weight_bytes, columns)


def at_least(least: int, particles: Iterable[int]) -> list[int]:
    """Return the numbers of particles that are ``least`` or more; raise ValueError without any."""
    allowed = [n for n in particles if n >= least]
    if not allowed:
        raise ValueError(f"No number of particles is {least} or more.")
    return allowed


@dataclass(frozen=True)
class Scenario:
    """A target and its draft on a device, one setting of them, and its speed at most.

    The device should compute at `shapes.lowest_precision`. The setting is plain decoding of one
    request until `sd` or `smc` makes another of it.
    """

    target: ModelShape
    draft: ModelShape
    device: Device
    context: float
    tail: float = 0.0
    shared_prefix: bool = True
    method: str = "AR"  # AR, SD or SMC
    num_particles: int = 1
    num_steps: int = 0
    batch: int = 1
    tokens: float = 1.0  # per request and round

    def ar(self, batch: int) -> Scenario:
        """Return plain decoding."""
        return self._with("AR", batch, 1, 0, 1.0)

    def sd(self, batch: int, num_steps: int, acceptance: float) -> Scenario:
        """Return speculative decoding with this probability that a draft is accepted.

        A round has 1 + a + ... + a^K tokens: the drafts before the first rejected one, and one of
        the target's own (Leviathan et al., arXiv 2211.17192, equation 1).
        """
        tokens = sum(acceptance**accepted for accepted in range(num_steps + 1))
        return self._with("SD", batch, 1, num_steps, tokens)

    def smc(self, batch: int, n: int, k: int, kept: float | None = None) -> Scenario:
        """Return SMC; a round has the bonus token and ``kept`` drafts on average, K by default.

        Keeping all K is the paper's rule; cutting blocks at low evidence keeps fewer.
        """
        kept = k if kept is None else kept
        if not 0 <= kept <= k:
            raise ValueError(f"kept is {kept}; it must lie within 0 and the {k} steps.")
        return self._with("SMC", batch, n, k, kept + 1)

    def _with(self, method: str, batch: int, n: int, k: int, tokens: float) -> Scenario:
        sizes = {"num_particles": n, "num_steps": k}
        return replace(self, method=method, batch=batch, tokens=tokens, **sizes)

    def measured(self, tokens: float) -> Scenario:
        """Return the setting at the mean number of tokens that a request commits in a round."""
        if not 1 <= tokens <= self.num_steps + 1:
            raise ValueError(
                f"tokens per pass are {tokens:g}; {self.num_steps} steps yield 1 to "
                f"{self.num_steps + 1}."
            )
        return replace(self, tokens=tokens)

    @cached_property
    def round(self) -> RoundCost:
        length = self.context + self.tail  # of a method's single text
        if self.method == "AR":
            return ar_step(self.target, self.batch, length)
        rows = PassRows(self.batch, 1, length)
        if self.method != "SD":
            count = self.num_particles
            rows = PassRows(self.batch, count, self.context, self.tail, self.shared_prefix)
        return smc_round(self.target, self.draft, rows, self.num_steps)

    @cached_property
    def seconds(self) -> float:
        return self.round.seconds(self.device)

    @property
    def parts(self) -> tuple[float, float, float]:
        """Return the seconds of the draft, the target, and a head's pass over its columns."""
        found = self.round.seconds_by_pass(self.device)
        return found.get("draft", 0.0), found["verify"], found.get("follow", 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all requests together."""
        return self.batch * self.tokens / self.seconds

    @property
    def experts(self) -> float | None:
        """Return the experts of a layer that the target's rows visit; None without experts."""
        rows = self.batch * self.num_particles * (self.num_steps + 1)
        return None if self.target.experts is None else self.target.experts.visited(rows)

    @property
    def label(self) -> str:
        if self.method == "AR":
            return self.method
        particles = f" N={self.num_particles}" if self.method == "SMC" else ""
        return f"{self.method}{particles} K={self.num_steps}"

    @cached_property
    def times_ar(self) -> float:
        """Return the speed relative to plain decoding of the same batch."""
        return self.tokens_per_second / self.ar(self.batch).tokens_per_second

    @cached_property
    def plain_wins_from(self) -> int | None:
        """Return the smallest batch at which plain decoding is at least as fast.

        None if there is none up to `LARGEST_BATCH`, and for plain decoding itself.
        """
        batches = range(1, LARGEST_BATCH + 1) if self.method != "AR" else ()
        return next((b for b in batches if replace(self, batch=b).times_ar <= 1), None)

    def best(
        self,
        batch: int,
        particles: Iterable[int] = DEFAULT_PARTICLES,
        steps: Iterable[int] | None = None,
        *,
        min_particles: int = 1,
        kept: Mapping[int, float] | None = None,
    ) -> tuple[Scenario, list[Scenario]]:
        """Return the (N, K) with the most tokens per second, and all that were compared.

        Fewer particles are never slower, and never closer to the target: ``min_particles`` is the
        smallest N that the quality allows. ``kept`` holds the mean number of kept drafts by K; all
        K without it. ``steps`` defaults to the draft's own.
        """
        steps = self.draft.default_steps if steps is None else steps
        counts = at_least(min_particles, particles)
        grid = [self.smc(batch, n, k, (kept or {}).get(k)) for k in steps for n in counts]
        return max(grid, key=lambda one: one.tokens_per_second), grid
