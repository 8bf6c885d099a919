"""What may follow a cut: mode smc, and variants of it for the study `cuts`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from fidelity.simulate import Block, Kept, Uniforms, verify

from sglang_smc.smc import rounds
from sglang_smc.smc.evidence import covered_columns
from sglang_smc.smc.stratify import stratified
from sglang_smc.smc.weights import accumulate, effective_sample_size, normalized
from sglang_smc.tokens.distribution import sample

ESS_THRESHOLD = 0.5
LARGEST_FACTOR = 2.0  # of a capped weight
COMPANIONS = 32  # sets of sibling chains that a residual averages over


@dataclass(frozen=True)
class Weigh:
    """Mode smc at an evidence threshold c."""

    evidence_threshold: float

    def siblings(self, same_text: torch.Tensor) -> torch.Tensor:
        return same_text

    def keep(self, block: Block, uniforms: Uniforms) -> Kept:
        size, count = block.log_weights.shape
        running = accumulate(block.log_weights, self.gains(block)).transpose(1, 2)
        covered = self.covered(running, block.num_steps, uniforms(size))
        weights = rounds.column_of(running, covered)  # [G, N]
        ess = effective_sample_size(weights)
        numbers = uniforms(size, count)
        low = ess < ESS_THRESHOLD * count
        found = rounds.resample(weights, low, block.present, numbers, "systematic")
        law = self.next_law(block, running, covered, uniforms)
        group = torch.arange(size).unsqueeze(1)
        pairs = found.ancestors.unsqueeze(2), found.ancestors.unsqueeze(1)
        same = block.same_at(covered)[group.unsqueeze(2), pairs[0], pairs[1]]
        numbers = stratified(uniforms(size, count), same)
        following = sample(law[group, found.ancestors], numbers)
        return Kept(covered, found.ancestors, found.log_weights, following)

    def gains(self, block: Block) -> torch.Tensor:
        """What each column adds to the log weights, ``[G, N, K]``."""
        return torch.where(block.before_end, block.drafted_p.double() - block.drafted_q, 0.0)

    def covered(
        self, running: torch.Tensor, num_steps: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """How many columns of ``[G, K + 1, N]`` log weights are kept, ``[G]``."""
        return covered_columns(running, self._thresholds(numbers), num_steps, numbers)

    def next_law(
        self, block: Block, running: torch.Tensor, covered: torch.Tensor, uniforms: Uniforms
    ) -> torch.Tensor:
        """Logs ``[G, N, V]``, up to a constant, of what next tokens are drawn from."""
        return block.log_p_at(covered)

    def _thresholds(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, self.evidence_threshold)


class CapWeight(Weigh):
    """No drafted token multiplies a weight by more than `LARGEST_FACTOR`."""

    def gains(self, block: Block) -> torch.Tensor:
        return super().gains(block).clamp_max(math.log(LARGEST_FACTOR))


class CapColumn(Weigh):
    """Evidence is capped at 1 after every column, as block verification caps its chance."""

    def covered(
        self, running: torch.Tensor, num_steps: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        evidence = running.logsumexp(2)
        capped = [torch.zeros_like(evidence[:, 0])]
        for gained in evidence.diff(dim=1).unbind(1):
            capped.append((capped[-1] + gained).clamp_max(0.0))
        return covered_columns(
            torch.stack(capped, 1).unsqueeze(2), self._thresholds(numbers), num_steps, numbers
        )


class Residual(Weigh):
    """Behind a cut p less what the text's m chains would have brought: their drafts independent.

    With evidence r so far and e of the next column, the m chains bring x to the output as often as
    p(x) E[min(1, r e / c) / e] / min(1, r / c), the mean over the others where one has drawn x.
    """

    def siblings(self, same_text: torch.Tensor) -> torch.Tensor:
        return torch.eye(same_text.shape[1], dtype=torch.bool).expand_as(same_text)

    def next_law(
        self, block: Block, running: torch.Tensor, covered: torch.Tensor, uniforms: Uniforms
    ) -> torch.Tensor:
        size, count, steps = block.tokens.shape
        group = torch.arange(size)
        log_p = block.log_p_at(covered).flatten(0, 1)  # [G * N, V]
        log_q = block.log_q[group, :, covered.clamp_max(steps - 1)].flatten(0, 1)
        siblings = block.same_at(covered).sum(2).flatten()  # [G * N] m
        total = running.logsumexp(2)
        reach = (total[group, covered] - total[:, 0]).exp() / self.evidence_threshold
        reach = reach.repeat_interleave(count).float()
        brought = _brought(log_p, log_q, siblings, reach, uniforms)
        left = log_p.exp() * (1 - brought).clamp_min(0.0)
        cut = (covered < steps).repeat_interleave(count) & (left.sum(1) > 0)
        return torch.where(cut.unsqueeze(1), left.log(), log_p).unflatten(0, (size, count))


def _brought(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    siblings: torch.Tensor,
    reach: torch.Tensor,
    uniforms: Uniforms,
) -> torch.Tensor:
    """The share ``[B, V]`` of each token's p that m chains bring, by drawing the m - 1 others.

    Args:
        log_p, log_q: ``[B, V]`` of the column.
        siblings: ``[B]`` m.
        reach: ``[B]`` evidence of the columns before, over c.
    """
    others = int(siblings.max()) - 1
    log_w = log_p - log_q
    drawn = sample(log_q.unsqueeze(1), uniforms(len(log_q), COMPANIONS * others))
    weights = log_w.gather(1, drawn).exp().unflatten(1, (COMPANIONS, others))
    there = torch.arange(others) < (siblings - 1).view(-1, 1, 1)
    beside = (weights * there).sum(2)  # [B, COMPANIONS]
    evidence = log_w.exp().unsqueeze(1) + beside.unsqueeze(2)
    inverse = siblings.view(-1, 1, 1) / evidence  # 1 / e: [B, COMPANIONS, V]
    reach = reach.view(-1, 1, 1)
    return (torch.minimum(inverse, reach) / reach.clamp_max(1.0)).mean(1)


@dataclass(frozen=True)
class VerifyAtCut(Weigh):
    """Where the block is cut, exact verification of the chains of one text, if that is longer."""

    any_text: bool  # a text drawn by weight; else only where the population has one

    def siblings(self, same_text: torch.Tensor) -> torch.Tensor:
        alone = torch.eye(same_text.shape[1], dtype=torch.bool).expand_as(same_text)
        return torch.where(self._may(same_text).view(-1, 1, 1), alone, same_text)

    def keep(self, block: Block, uniforms: Uniforms) -> Kept:
        weighed = super().keep(block, uniforms)
        verified = self._verified(block, uniforms)
        column = torch.arange(block.tokens.shape[2])
        group = torch.arange(len(block.tokens))
        winner = verified.ancestors[:, 0]
        through = column < verified.num_columns.unsqueeze(1)
        ended = (block.ends[group, winner] & through).any(1)
        reach = torch.where(ended, block.num_steps, verified.num_columns)
        # A text that has ended is not verified, and has no columns before its end.
        alive = block.before_end[group, winner, 0]
        longer = self._may(block.same_text) & alive & (reach > weighed.num_columns)
        return rounds.choose(longer, verified, weighed)

    def _may(self, same_text: torch.Tensor) -> torch.Tensor:
        return same_text.flatten(1).all(1) | self.any_text

    def _verified(self, block: Block, uniforms: Uniforms) -> Kept:
        """Exact verification of the chains of one text, drawn by weight."""
        size, count, _ = block.tokens.shape
        group = torch.arange(size)
        text = rounds.draw(normalized(block.log_weights), uniforms(size))
        mine = block.same_text[group, text]  # [G, N]
        order = mine.long().argsort(dim=1, descending=True, stable=True)
        first = [of[group.unsqueeze(1), order] for of in block[2:]]
        ordered = Block(block.log_weights, block.same_text, *first)
        found = verify(ordered, uniforms, mine.sum(1))
        behind = ordered.log_p[group, found.winner, found.num_columns]
        left = found.residuals[found.left].log()
        law = torch.where(found.rejects.unsqueeze(1), left, behind)
        winner = order[group, found.winner]
        return Kept(
            found.num_columns,
            winner.unsqueeze(1).expand(-1, count),
            torch.zeros_like(block.log_weights),
            sample(law, uniforms(size)).unsqueeze(1).expand(-1, count),
        )
