"""Bound the time of decoding from below: bytes to move and operations to compute.

Each pass of a model takes the longer of its memory and its compute time (Williams et al. 2009; for
SMC: section 3.1 of arXiv 2604.15672). Passes run one after another, so their times add up. Left out
are launch gaps, synchronization, sampling, activations and communication between devices: the
results are bounds, not predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.passes import Round, Rows, forward
from sglang_smc.tools.plan.proposals import Draft, Proposal
from sglang_smc.tools.plan.shapes import ModelShape

DEFAULT_PARTICLES = (4, 8, 16)
#: The largest batch at which plain decoding is compared.
LARGEST_BATCH = 1024


def ar_step(target: ModelShape, batch: int, context: float) -> Round:
    """Return the pass for one token of each of ``batch`` requests with ``context`` tokens."""
    _require_positive(batch=batch)
    rows = Rows(batch, 1, context, 0.0, shared_prefix=True)
    return Round((forward("decode", target, rows, 1, 1),))


def sd_round(
    target: ModelShape, draft: Proposal, batch: int, num_steps: int, context: float
) -> Round:
    """Return a round of speculative decoding with one chain: an SMC round of one particle."""
    return smc_round(target, draft, batch, 1, num_steps, context)


def smc_round(
    target: ModelShape,
    draft: Proposal,
    batch: int,
    num_particles: int,
    num_steps: int,
    context: float,
    tail: float = 0.0,
    shared_prefix: bool = True,
) -> Round:
    """Return the draft's passes over all particles, and a target pass over K + 1 tokens of each.

    ``context`` tokens are common to a request's particles, ``tail`` are each particle's own when
    the round starts.

    Raises ValueError for sizes below 1, and for a draft that does not fit.
    """
    _require_positive(batch=batch, num_particles=num_particles, num_steps=num_steps)
    rows = Rows(batch, num_particles, context, tail, shared_prefix)
    verify = forward("verify", target, rows, num_steps + 1, num_steps + 1)
    beside = Draft.of(draft).passes(target, rows, num_steps)
    before = [one for one in beside if one.name == "draft"]
    after = [one for one in beside if one.name == "follow"]
    return Round((*before, verify, *after))


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")


def sd_tokens(acceptance: float, num_steps: int) -> float:
    """Return the tokens per round of speculative decoding at this probability of acceptance.

    1 + a + ... + a^K: the drafts before the first rejected one, and one of the target's own
    (Leviathan et al., arXiv 2211.17192, equation 1).
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance is {acceptance}; it must lie within 0 and 1.")
    return sum(acceptance**accepted for accepted in range(num_steps + 1))


def smc_tokens(num_steps: int, kept: float | None = None) -> float:
    """Return the tokens per SMC round: the bonus and ``kept`` drafts on average, K by default.

    Keeping all K is the paper's rule; cutting blocks at low evidence keeps fewer.
    """
    kept = num_steps if kept is None else kept
    if not 0 <= kept <= num_steps:
        raise ValueError(f"kept is {kept}; it must lie within 0 and the {num_steps} steps.")
    return kept + 1


class Estimate(NamedTuple):
    """An upper bound of one setting's speed on a device."""

    method: str  # AR, SD or SMC
    num_particles: int
    num_steps: int
    batch: int
    tokens: float  # per request and round
    round: Round
    device: Device

    @property
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
    def bound(self) -> str:
        return self.round.bound(self.device)

    @property
    def label(self) -> str:
        if self.method == "AR":
            return self.method
        particles = f" N={self.num_particles}" if self.method == "SMC" else ""
        return f"{self.method}{particles} K={self.num_steps}"

    def measured(self, tokens: float) -> Estimate:
        """Return the estimate at the mean number of tokens that a request commits in a round."""
        if not 1 <= tokens <= self.num_steps + 1:
            raise ValueError(
                f"tokens per pass are {tokens:g}; {self.num_steps} steps yield 1 to "
                f"{self.num_steps + 1}."
            )
        return self._replace(tokens=tokens)


class Scenario(NamedTuple):
    """A target and its draft on a device, and the length of their requests."""

    target: ModelShape
    draft: Proposal
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

    def smc(self, batch: int, n: int, k: int, kept: float | None = None) -> Estimate:
        lengths = self.context, self.tail, self.shared_prefix
        one = smc_round(self.target, self.draft, batch, n, k, *lengths)
        return Estimate("SMC", n, k, batch, smc_tokens(k, kept), one, self.device)

    def plain_wins_from(self, at: Callable[[int], Estimate]) -> int | None:
        """Return the smallest batch at which plain decoding is at least as fast as ``at(batch)``.

        None if there is none up to `LARGEST_BATCH`.
        """
        for batch in range(1, LARGEST_BATCH + 1):
            if self.ar(batch).tokens_per_second >= at(batch).tokens_per_second:
                return batch
        return None

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
        steps = Draft.of(self.draft).default_steps if steps is None else steps
        allowed = [n for n in particles if n >= min_particles]
        if not allowed:
            raise ValueError(f"No number of particles is {min_particles} or more.")
        grid = [self.smc(batch, n, k, (kept or {}).get(k)) for k in steps for n in allowed]
        return max(grid, key=lambda estimate: estimate.tokens_per_second), grid


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
) -> Estimate:
    """Return the cost of a round of N particles and K steps; see `Scenario`.

    The device should compute at `proposals.lowest_precision`.
    """
    scenario = Scenario(target, draft, device, context, tail, shared_prefix)
    return scenario.smc(batch, num_particles, num_steps)
