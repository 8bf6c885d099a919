"""Bound the time of decoding from below: bytes to move and operations to compute.

Each pass of a model takes the longer of its memory and its compute time (Williams et al. 2009; for
SMC: section 3.1 of arXiv 2604.15672). Passes run one after another, so their times add up. Left out
are launch gaps, synchronization, sampling, activations and communication between devices: the
results are bounds, not predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.proposals import Draft, Round, Rows, forward
from sglang_smc.tools.plan.shapes import ModelShape

DEFAULT_PARTICLES = (4, 8, 16)
#: The largest batch at which plain decoding is compared.
LARGEST_BATCH = 1024


def ar_step(target: ModelShape, batch: int, context: float) -> Round:
    """Return the pass for one token of each of ``batch`` requests with ``context`` tokens."""
    _require_positive(batch=batch)
    rows = Rows(batch, 1, context, 0.0, shared_prefix=True)
    return Round((forward("decode", target, rows, 1, 1),))


def smc_round(
    target: ModelShape,
    draft: Draft,
    batch: int,
    num_particles: int,
    num_steps: int,
    context: float,
    tail: float = 0.0,
    shared_prefix: bool = True,
) -> Round:
    """Return the draft's passes over all particles, and a target pass over K + 1 tokens of each.

    ``context`` tokens are common to a request's particles, ``tail`` are each particle's own when
    the round starts. With one particle it is a round of speculative decoding with one chain.

    Raises ValueError for sizes below 1, and for a draft that does not fit.
    """
    _require_positive(batch=batch, num_particles=num_particles, num_steps=num_steps)
    rows = Rows(batch, num_particles, context, tail, shared_prefix)
    verify = forward("verify", target, rows, num_steps + 1, num_steps + 1)
    before, after = draft.passes(target, rows, num_steps)
    return Round((*before, verify, *after))


def at_least(least: int, particles: Iterable[int]) -> list[int]:
    """Return the numbers of particles that are ``least`` or more; raise ValueError without any."""
    allowed = [n for n in particles if n >= least]
    if not allowed:
        raise ValueError(f"No number of particles is {least} or more.")
    return allowed


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")


@dataclass(frozen=True)
class Estimate:
    """An upper bound of one setting's speed."""

    scenario: Scenario
    method: str  # AR, SD or SMC
    num_particles: int
    num_steps: int
    batch: int
    tokens: float  # per request and round

    @cached_property
    def round(self) -> Round:
        one = self.scenario
        length = one.context + one.tail  # of a method's single text
        if self.method == "AR":
            return ar_step(one.target, self.batch, length)
        sizes = self.batch, self.num_particles, self.num_steps
        if self.method == "SD":
            return smc_round(one.target, one.draft, *sizes, length)
        lengths = one.context, one.tail
        return smc_round(one.target, one.draft, *sizes, *lengths, one.shared_prefix)

    @cached_property
    def seconds(self) -> float:
        return self.round.seconds(self.scenario.device)

    @property
    def parts(self) -> tuple[float, float, float]:
        """Return the seconds of the draft, the target, and a head's pass over its columns."""
        found = self.round.seconds_by_pass(self.scenario.device)
        return found.get("draft", 0.0), found["verify"], found.get("follow", 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all requests together."""
        return self.batch * self.tokens / self.seconds

    @property
    def label(self) -> str:
        if self.method == "AR":
            return self.method
        particles = f" N={self.num_particles}" if self.method == "SMC" else ""
        return f"{self.method}{particles} K={self.num_steps}"

    @cached_property
    def times_ar(self) -> float:
        """Return the speed relative to plain decoding of the same batch."""
        return self.tokens_per_second / self.scenario.ar(self.batch).tokens_per_second

    @cached_property
    def plain_wins_from(self) -> int | None:
        """Return the smallest batch at which plain decoding is at least as fast.

        None if there is none up to `LARGEST_BATCH`, and for plain decoding itself.
        """
        batches = range(1, LARGEST_BATCH + 1) if self.method != "AR" else ()
        return next((batch for batch in batches if self.at(batch).times_ar <= 1), None)

    def at(self, batch: int) -> Estimate:
        """Return the estimate at another batch, all else equal."""
        return replace(self, batch=batch)

    def measured(self, tokens: float) -> Estimate:
        """Return the estimate at the mean number of tokens that a request commits in a round."""
        if not 1 <= tokens <= self.num_steps + 1:
            raise ValueError(
                f"tokens per pass are {tokens:g}; {self.num_steps} steps yield 1 to "
                f"{self.num_steps + 1}."
            )
        return replace(self, tokens=tokens)


@dataclass(frozen=True)
class Scenario:
    """A target and its draft on a device, and the length of their requests.

    The device should compute at `proposals.lowest_precision`.
    """

    target: ModelShape
    draft: Draft
    device: Device
    context: float
    tail: float = 0.0
    shared_prefix: bool = True

    def ar(self, batch: int) -> Estimate:
        """Return plain decoding."""
        return Estimate(self, "AR", 1, 0, batch, 1.0)

    def sd(self, batch: int, num_steps: int, acceptance: float) -> Estimate:
        """Return speculative decoding with this probability that a draft is accepted.

        A round has 1 + a + ... + a^K tokens: the drafts before the first rejected one, and one of
        the target's own (Leviathan et al., arXiv 2211.17192, equation 1).
        """
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance is {acceptance}; it must lie within 0 and 1.")
        tokens = sum(acceptance**accepted for accepted in range(num_steps + 1))
        return Estimate(self, "SD", 1, num_steps, batch, tokens)

    def smc(self, batch: int, n: int, k: int, kept: float | None = None) -> Estimate:
        """Return SMC; a round has the bonus token and ``kept`` drafts on average, K by default.

        Keeping all K is the paper's rule; cutting blocks at low evidence keeps fewer.
        """
        kept = k if kept is None else kept
        if not 0 <= kept <= k:
            raise ValueError(f"kept is {kept}; it must lie within 0 and the {k} steps.")
        return Estimate(self, "SMC", n, k, batch, kept + 1)

    def best(
        self,
        batch: int,
        particles: Iterable[int] = DEFAULT_PARTICLES,
        steps: Iterable[int] | None = None,
        *,
        min_particles: int = 1,
        kept: Mapping[int, float] | None = None,
    ) -> tuple[Estimate, list[Estimate]]:
        """Return the (N, K) with the most tokens per second, and all that were compared.

        Fewer particles are never slower, and never closer to the target: ``min_particles`` is the
        smallest N that the quality allows. ``kept`` holds the mean number of kept drafts by K; all
        K without it. ``steps`` defaults to the draft's own.
        """
        steps = self.draft.default_steps if steps is None else steps
        counts = at_least(min_particles, particles)
        grid = [self.smc(batch, n, k, (kept or {}).get(k)) for k in steps for n in counts]
        return max(grid, key=lambda estimate: estimate.tokens_per_second), grid
