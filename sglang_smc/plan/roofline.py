"""How long decoding takes at least: the bytes that must be moved and the operations computed.

Each pass of a model reads its weights once (of experts those that its tokens visit), reads and
writes KV, and writes and reads its logits; it takes as long as the slower of its traffic and its
arithmetic (Williams et al. 2009; the use for SMC is section 3.1 of arXiv 2604.15672). Passes follow
each other, so their times add up. Left out are launch gaps, synchronization, sampling, activations
and communication between devices: the results are bounds, not predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_smc.plan.devices import Device
from sglang_smc.plan.shapes import ModelShape

#: Logits are written in float32 and read once, to draw from and score them.
LOGIT_BYTES = 2 * 4
DEFAULT_PARTICLES = (4, 8, 16)
DEFAULT_STEPS = (4, 8, 16)
#: Batches up to here are searched for the one from which plain decoding is as fast.
LARGEST_BATCH = 1024


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

    name: str  # decode, draft or verify
    weights: float
    kv: float
    logits: float
    flops: float

    @property
    def cost(self) -> Cost:
        return Cost(self.weights + self.kv + self.logits, self.flops)


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
    """A pass over ``num_tokens`` new tokens of each row, with logits of the last ``num_logits``."""
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
        weights=shape.bytes_read(rows.count * num_tokens),
        kv=kv + states,
        logits=LOGIT_BYTES * shape.vocab_size * logits,
        flops=flops,
    )


def ar_step(target: ModelShape, batch: int, context: float) -> Round:
    """One token of each of ``batch`` requests with ``context`` tokens before it."""
    _require_positive(batch=batch)
    rows = Rows(batch, 1, context, 0.0, shared_prefix=True)
    return Round((forward("decode", target, rows, 1, 1),))


def sd_round(
    target: ModelShape, draft: ModelShape, batch: int, num_steps: int, context: float
) -> Round:
    """Classical speculative decoding with one chain: an SMC round of one particle."""
    return smc_round(target, draft, batch, 1, num_steps, context)


def smc_round(
    target: ModelShape,
    draft: ModelShape,
    batch: int,
    num_particles: int,
    num_steps: int,
    context: float,
    tail: float = 0.0,
    shared_prefix: bool = True,
) -> Round:
    """K draft passes over all particles, then one target pass over K + 1 tokens of each.

    ``context`` tokens are common to a request's particles, ``tail`` are each particle's own when
    the round starts. The first draft pass takes two tokens: the last round's last draft, whose KV
    the draft still lacks, and the bonus token.
    """
    _require_positive(batch=batch, num_particles=num_particles, num_steps=num_steps)
    rows = Rows(batch, num_particles, context, tail, shared_prefix)
    passes = []
    drafting = rows
    for num_tokens in (2, *[1] * (num_steps - 1)):
        passes.append(forward("draft", draft, drafting, num_tokens, 1))
        drafting = drafting._replace(tail=drafting.tail + num_tokens)
    passes.append(forward("verify", target, rows, num_steps + 1, num_steps + 1))
    return Round(tuple(passes))


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")


def sd_tokens(acceptance: float, num_steps: int) -> float:
    """Tokens a round of speculative decoding yields, each draft kept with this probability.

    1 + a + ... + a^K: the drafts before the first that is refused, and one of the target's own
    (Leviathan et al., arXiv 2211.17192, equation 1).
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance is {acceptance}; it must lie within 0 and 1.")
    return sum(acceptance**accepted for accepted in range(num_steps + 1))


def smc_tokens(num_steps: int, kept: float | None = None) -> float:
    """Tokens an SMC round yields: the drafts ``kept`` on average, all K by default, and the bonus.

    All K is the paper's rule; cutting blocks at low evidence keeps fewer.
    """
    kept = num_steps if kept is None else kept
    if not 0 <= kept <= num_steps:
        raise ValueError(f"kept is {kept}; it must lie within 0 and the {num_steps} steps.")
    return kept + 1


class Estimate(NamedTuple):
    """The most that one setting yields on a device."""

    method: str  # AR, SD or SMC
    num_particles: int
    num_steps: int
    batch: int
    tokens: float  # of one request in one round
    round: Round
    device: Device

    @property
    def seconds(self) -> float:
        return self.round.seconds(self.device)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all requests together."""
        return self.batch * self.tokens / self.seconds

    @property
    def bound(self) -> str:
        return self.round.bound(self.device)

    @property
    def label(self) -> str:
        if self.method == "AR":
            return self.method
        particles = f" N={self.num_particles}" if self.method == "SMC" else ""
        return f"{self.method}{particles} K={self.num_steps}"


class Scenario(NamedTuple):
    """Two models on a device, and the length of their requests."""

    target: ModelShape
    draft: ModelShape
    device: Device
    context: float
    tail: float = 0.0
    shared_prefix: bool = True

    def ar(self, batch: int) -> Estimate:
        step = ar_step(self.target, batch, self.context + self.tail)
        return Estimate("AR", 1, 0, batch, 1.0, step, self.device)

    def sd(self, batch: int, num_steps: int, acceptance: float) -> Estimate:
        context = self.context + self.tail
        one = sd_round(self.target, self.draft, batch, num_steps, context)
        tokens = sd_tokens(acceptance, num_steps)
        return Estimate("SD", 1, num_steps, batch, tokens, one, self.device)

    def smc(
        self, batch: int, num_particles: int, num_steps: int, kept: float | None = None
    ) -> Estimate:
        one = smc_round(
            self.target,
            self.draft,
            batch,
            num_particles,
            num_steps,
            self.context,
            self.tail,
            self.shared_prefix,
        )
        tokens = smc_tokens(num_steps, kept)
        return Estimate("SMC", num_particles, num_steps, batch, tokens, one, self.device)

    def plain_wins_from(self, at: Callable[[int], Estimate]) -> int | None:
        """The smallest batch at which plain decoding is at least as fast as ``at(batch)``.

        None where there is none up to `LARGEST_BATCH`.
        """
        for batch in range(1, LARGEST_BATCH + 1):
            if self.ar(batch).tokens_per_second >= at(batch).tokens_per_second:
                return batch
        return None


class Plan(NamedTuple):
    """The fastest setting, and all that were looked at."""

    best: Estimate
    grid: list[Estimate]
    plain_wins_from: int | None  # the smallest batch at which AR is as fast as ``best``


def best_settings(
    target: ModelShape,
    draft: ModelShape,
    device: Device,
    batch: int,
    context: float,
    particles: Iterable[int] = DEFAULT_PARTICLES,
    steps: Iterable[int] = DEFAULT_STEPS,
    *,
    min_particles: int = 1,
    max_particles: int | None = None,
    tail: float = 0.0,
    shared_prefix: bool = True,
    kept: Mapping[int, float] | None = None,
) -> Plan:
    """The (N, K) of the most tokens per second.

    Fewer particles are never slower, and never nearer to the target: ``min_particles`` says how
    many the quality needs. ``kept`` gives the drafts kept on average, by K; all K without it.
    """
    top = float("inf") if max_particles is None else max_particles
    allowed = [n for n in particles if min_particles <= n <= top]
    scenario = Scenario(target, draft, device, context, tail, shared_prefix)
    kept = kept or {}
    grid = [scenario.smc(batch, n, k, kept.get(k)) for k in steps for n in allowed]
    if not grid:
        raise ValueError(f"No number of particles lies within {min_particles} and {top}.")
    best = max(grid, key=lambda estimate: estimate.tokens_per_second)
    n, k = best.num_particles, best.num_steps
    wins = scenario.plain_wins_from(lambda size: scenario.smc(size, n, k, kept.get(k)))
    return Plan(best, grid, wins)
