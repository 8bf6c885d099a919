"""Take the steps of a round: propose, score, decide, extend, add a bonus token, measure, narrow.

docs/algorithm.md explains them. The library (`smc.round`) and a server (`sglang_smc.round.play`)
take them in this order, and run the target before `score`. With G requests (groups), N particles
each, K draft tokens per round, V tokens in the vocabulary:

    particle     a request's emitted tokens and a *tail* of tokens that are not emitted yet
    draft token  a token that is drawn from q
    column       the j-th draft token of all particles of a request
    weight       product of p / q since the last resampling, of each particle
    ESS          effective sample size: the number of equal weights with the same variance
    resampling   heavy particles are copied, light ones dropped: `ancestors`
    evidence     the factor by which a block of draft tokens multiplies the mean weight
    bonus token  one more token, from p, or after a rejection from the residual distribution
    narrow       draw the oldest tokens of tails by weight, and drop particles with others

No population is changed in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from sglang_smc.smc import deciding
from sglang_smc.smc.deciding import Decided, Decider, Drafts
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.edits import Edits
from sglang_smc.smc.fidelity import Path
from sglang_smc.smc.ledger import Slots
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import Narrowed, Population, Scores
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.settings import BatchSettings, Need
from sglang_smc.smc.trees import Trees, begin_trees
from sglang_smc.smc.weighing import Block, Decision


class Failure(IntEnum):
    """Code by which the device reports why a request cannot continue; 0 is none."""

    TARGET_LOGITS = 1
    DRAFT_LOGITS = 2


class Draft(Protocol):
    """Give logits of q for one draft token after another; see `proposers.base`."""

    def first_logits(self, last_two: torch.Tensor, at: Any) -> torch.Tensor: ...
    def next_logits(self, step: int, tokens: torch.Tensor, at: Any) -> torch.Tensor: ...
    def read_without_logits(self, last_two: torch.Tensor, at: Any) -> None: ...


class Rules(Protocol):
    """Read texts on the host, as structured output does; see `rules.registry.TextRules`."""

    def apply(
        self, logits: torch.Tensor, chains: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population
    ) -> torch.Tensor: ...
    def scores(self, like: torch.Tensor) -> Scores: ...


class Sharing(Protocol):
    """Give particles of equal texts one slot, and so one row of the models, column by column."""

    def begin(self, texts: torch.Tensor, lengths: torch.Tensor, ended: torch.Tensor) -> None:
        """Share the slot of the last token.

        Args:
            texts: ``[G, N, J]`` int64 the token before each tail, and the tail.
            lengths: ``[G, N]`` int64 of the tails.
            ended: ``[G, N]`` bool: which share none.
        """

    def follow(self, step: int, tokens: torch.Tensor) -> None:
        """Share the next slot among those that did before, and have equal ``tokens`` ``[G, N]``."""

    def rows(self, columns: slice) -> torch.Tensor | None:
        """Return the row that stands for each particle's token in ``columns`` of C slots.

        Returns:
            ``[G * N * C]`` int64, of as many rows; None where each has its own.
        """
        ...


class Matches(Protocol):
    """Draft from matches in earlier texts; see `proposers.ngram.CorpusMatches`."""

    def follow(self, drawn: torch.Tensor) -> "Matches": ...
    def distribution(self, allowed: TokenDistribution) -> TokenDistribution: ...


class Batch(NamedTuple):
    """Requests of one round, as its steps read them."""

    ops: Ops
    draft: Draft
    settings: BatchSettings  # with the seeds of this round
    needs: frozenset[Need]  # of some request
    deciders: Sequence[Decider]
    num_steps: int  # K: the most tokens that a request drafts
    output_lengths: torch.Tensor  # [G, N] int64, of each particle at the start of the round
    position: torch.Tensor  # [G, N] int64: keys the uniforms of decisions; new in each round
    last_two: torch.Tensor  # [G, N, 2] int64 the last two tokens of each particle, in order
    may_stratify: torch.Tensor  # [G, N] bool: may share uniforms; chains of one multi-draft may not
    extends: torch.Tensor | None  # [G] bool: whose particles are verified each; None: no group's
    # Where a sequence ends, of tokens [G, N, C] at positions in the output; `BatchSettings.ends`.
    ends: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    slots: Slots | None = None  # of the models' KV; None where they read whole texts
    sharing: Sharing | None = None  # of these slots; None: each particle has its own, as on a GPU
    rules: Rules | None = None  # where some request has one, as all that follow
    edits: Edits | None = None
    matches: Matches | None = None

    def distribution(
        self, temperature: torch.Tensor, greedy: torch.Tensor
    ) -> Callable[..., TokenDistribution]:
        """Return `TokenDistribution.of` for logits of p or q; ``greedy`` groups have points."""
        return partial(
            self.ops.distribution.of,
            temperature=temperature,
            greedy=greedy if Need.GREEDY in self.needs else None,
            filters=self.settings.filters if Need.FILTERS in self.needs else None,
        )

    @property
    def draft_has_read_all(self) -> bool:
        """Return whether the draft has read all tokens but the next one, at the end of the round.

        It does so in rounds without drafts, unless it reads those of single particles later.
        """
        return self.num_steps == 0 and self.last_two.shape[1] > 1

    def edited(
        self, logits: torch.Tensor, chains: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Edit logits, and return them with the mask of the requests' rules; see `Rules.apply`."""
        if self.edits is not None:
            self.ops.edit_logits(logits, self.edits, chains, first)
        return (logits, None) if self.rules is None else self.rules.apply(logits, chains, first)


def read_last(batch: Batch, population: Population) -> Drafts:
    """Let the draft read the last tokens, in a round that drafts none (K = 0)."""
    _begin_sharing(batch, population)
    batch.draft.read_without_logits(batch.last_two, batch.slots)
    nothing = population.texts[:, :, :0]  # [G, N, 0]
    return Drafts(nothing, nothing.float(), nothing.bool(), nothing.bool(), None)


def propose(batch: Batch, population: Population) -> Drafts:
    """Draw x_1..x_K ~ q, one after another, after each particle's last token."""
    column = torch.arange(batch.num_steps, device=population.texts.device)
    # [G, N, K], as uniforms [K, G, N] contiguous for each step
    positions = (batch.output_lengths + column.view(-1, 1, 1)).permute(1, 2, 0)
    _begin_sharing(batch, population)
    logits = batch.draft.first_logits(batch.last_two, batch.slots)  # [G, N, V]
    chains = _begin_chains(batch, population, positions, column)
    for step in range(batch.num_steps):
        if step > 0:
            logits = batch.draft.next_logits(step, chains.tokens[-1], batch.slots)
        chains.draw(step, logits)
    coins = batch.ops.uniforms(batch.settings.seeds, batch.position[:, :1], Purpose.WATCH)[:, 0]
    tokens = torch.stack(chains.tokens, dim=2)  # [G, N, K]
    ends = batch.ends(tokens, positions)
    if batch.rules is not None:
        ends = batch.rules.ends(ends, tokens, population)
    return Drafts(
        tokens=tokens,
        log_q=torch.stack(chains.log_q, dim=2),
        ends=ends,
        up_to_end=(ends.cumsum(2) == ends) & batch.settings.drafts(column, population.ended),
        q=chains.q if batch.needs & {Need.VERIFIES, Need.EXTENDS} else None,
        coins=coins,
        measured_q=chains.measured_q(coins),
    )


@dataclass(eq=False)
class GrowingChains:
    """Chains of draft tokens, which grow by one token of each at a time."""

    batch: Batch
    distribution: Callable[..., TokenDistribution]  # of logits of q
    uniforms: torch.Tensor  # [K, G, N] float64
    same_text: torch.Tensor  # [G, N, N] bool: whose texts are equal, an equivalence
    trees: Trees | None
    matches: Matches | None
    tokens: list[torch.Tensor] = field(default_factory=list)  # [G, N] int64 of each step
    log_q: list[torch.Tensor] = field(default_factory=list)  # [G, N] float32
    q: list[TokenDistribution] = field(default_factory=list)

    def draw(self, step: int, logits: torch.Tensor) -> None:
        """Draw the next token of each chain, from the draft's logits ``[G, N, V]``."""
        batch = self.batch
        last = self.tokens[-1] if self.tokens else None
        uniforms, self.same_text = batch.ops.stratify(self.uniforms[step], self.same_text, last)
        if last is not None and self.matches is not None:
            self.matches = self.matches.follow(last)
        allowed = None
        if batch.edits is not None or batch.rules is not None:
            logits, allowed = _edited_draft(batch, logits, self.tokens)
        rows = None if batch.sharing is None else batch.sharing.rows(slice(step + 1, step + 2))
        q = self.distribution(logits, allowed=allowed, rows=rows)
        if self.matches is not None:
            q = self.matches.distribution(q)
        tokens, log_q = q.sample(uniforms)
        if self.trees is not None:
            tokens, log_q = self.trees.grow(step, q, tokens, self.same_text)
        if batch.sharing is not None:
            batch.sharing.follow(step, tokens)
        self.tokens.append(tokens)
        self.log_q.append(log_q)
        self.q.append(q)

    def measured_q(self, coins: torch.Tensor) -> TokenDistribution:
        """Return q of the column that `fidelity.watch` measures, which ``coins`` ``[G]`` choose."""
        scores = self.batch.ops.keep_column(self.q, coins, self.batch.settings.num_steps)
        if self.matches is not None:  # the scores are log q itself
            return self.batch.ops.distribution.of_log_probs(scores, num_groups=len(coins))
        return self.distribution(scores.unflatten(0, self.tokens[0].shape))  # of [G * N, V]


def _begin_chains(
    batch: Batch, population: Population, positions: torch.Tensor, column: torch.Tensor
) -> GrowingChains:
    """Return chains without a token; ``positions`` ``[G, N, K]`` and ``column`` ``[K]`` int64."""
    settings = batch.settings
    trees = None
    greedy = settings.greedy
    if Need.TREES in batch.needs:
        ahead = settings.num_steps - 1 - column.unsqueeze(1)  # [K, G]
        branches = settings.branches
        trees = begin_trees(branches, ahead, positions.shape[1])
        greedy = greedy ^ branches  # trees draft more than the likeliest token
    uniforms = batch.ops.uniforms(settings.seeds, positions, Purpose.DRAFT)
    texts = population.texts[:, :, 1:]
    same_text = batch.ops.same_text(texts, population.lengths, batch.may_stratify)
    return GrowingChains(
        batch=batch,
        distribution=batch.distribution(settings.draft_temperature, greedy),
        uniforms=uniforms.permute(2, 0, 1).contiguous(),
        same_text=same_text,
        trees=trees,
        matches=batch.matches,
    )


def _begin_sharing(batch: Batch, population: Population) -> None:
    """Let particles of one text share the slot of its last token, where slots are shared."""
    if batch.sharing is not None:
        texts = population.texts[:, :, 1:]
        batch.sharing.begin(texts, population.lengths, population.ended)


def _edited_draft(
    batch: Batch, logits: torch.Tensor, drawn: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Edit the draft's logits ``[G, N, V]`` after the tokens drawn, as `Batch.edited` does."""
    chains = torch.stack(drawn, dim=2) if drawn else batch.last_two[:, :, :0]
    return batch.edited(logits.unsqueeze(2), chains, len(drawn))


def score(
    batch: Batch, drafts: Drafts, logits: torch.Tensor
) -> tuple[TokenDistribution, torch.Tensor]:
    """Score the draft tokens by the target's logits ``[G, N, K + 1, V]``.

    Row k follows the last token and x_1..x_k.

    Returns:
        p of the next token, of G * N * (K + 1) rows; and log p of the draft tokens, renormalised
        under masks, ``[G, N, K + 1]``, where the last column is that of token 0, to find a NaN.
    """
    logits, allowed = batch.edited(logits, drafts.tokens, 0)
    distribution = batch.distribution(batch.settings.temperature, batch.settings.greedy)
    rows = None if batch.sharing is None else batch.sharing.rows(slice(1, None))
    p = distribution(logits, allowed=allowed, rows=rows)
    return p, p.score(torch.nn.functional.pad(drafts.tokens, (0, 1)))


def revalue(batch: Batch, population: Population) -> Population:
    """Weigh by the latest potential values of the texts before the round.

    Potentials ran beside the models' passes; what is missing is waited for.
    """
    if batch.rules is None or Need.POTENTIALS not in batch.needs:
        return population
    return population.apply_potentials(batch.rules.scores(batch.output_lengths))


def failure_of_round(log_p: torch.Tensor, drafts: Drafts, live: torch.Tensor) -> torch.Tensor:
    """Return the failure codes ``[G]`` of a round in which logits gave no distribution.

    Args:
        log_p: ``[G, N, K + 1]`` log-probabilities of any token in each column; NaN where logits
            give no distribution, since its normaliser is NaN then.
        drafts: whose log-probabilities are NaN likewise.
        live: ``[G, N]`` bool: present, and not ended.
    """
    # The target's distribution is needed after each column, unless the sequence ends there.
    continues = drafts.up_to_end & ~drafts.ends
    needed = torch.cat([live.unsqueeze(2), continues], dim=2)  # [G, N, K + 1]
    is_broken = (log_p.isnan() & needed).flatten(1).any(1)
    return failure_codes(is_broken, (drafts.log_q.isnan() & drafts.up_to_end).flatten(1).any(1))


def failure_codes(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return the codes of flags ``[G]``; a failure of the target takes precedence."""
    code = torch.where(draft, int(Failure.DRAFT_LOGITS), 0)
    return torch.where(target, int(Failure.TARGET_LOGITS), code)


def decide(
    batch: Batch,
    population: Population,
    drafts: Drafts,
    p: TokenDistribution,
    log_p: torch.Tensor,
) -> Decided:
    """Weigh or verify the draft tokens, by each request's mode; p and log p are of `score`.

    Ancestors are drawn here, and copied by `extend`.
    """
    needs = batch.needs
    settings = batch.settings
    if population.scores is not None:
        settings = settings.without_steps(population.ended.all(1))
    uniforms = partial(batch.ops.uniforms, settings.seeds)
    block = Block(
        log_weights=population.log_weights,
        log_p=log_p[:, :, :-1],
        log_q=drafts.log_q,
        up_to_end=drafts.up_to_end,
        present=population.present,
        power=settings.power,
        num_steps=settings.num_steps,
        ess_threshold=settings.ess_threshold,
        resample_each_token=settings.resample_each_token,
        evidence_threshold=settings.evidence_threshold,
        scheme=settings.scheme,
        keep_uniforms=uniforms(batch.position[:, :1], Purpose.KEEP)[:, 0],
        uniforms=uniforms(batch.position, Purpose.RESAMPLE),
    )
    verifies = drafts.q is not None
    scored = deciding.Scored(
        population=population,
        drafts=drafts,
        p=p,
        log_p=log_p,
        block=block,
        weighs=settings.weighs,
        powered=Need.POWER in needs,
        accept_uniforms=uniforms(batch.position, Purpose.ACCEPT) if verifies else None,
        extends=batch.extends,
        greedy=settings.greedy if Need.TREES in needs else None,
        is_tree=settings.branches if verifies and Need.TREES in needs else None,
    )
    return deciding.decide(batch.deciders, scored, batch.ops)


def extend(batch: Batch, population: Population, drafts: Drafts, decision: Decision) -> Population:
    """Append the kept draft tokens, and make each particle a copy of its ancestor."""
    num_kept = decision.num_columns if batch.extends is None else decision.num_kept.amax(1)
    if batch.draft_has_read_all:
        unread = torch.zeros_like(num_kept, dtype=torch.bool)
    else:  # it does not read its own last token
        unread = num_kept == batch.num_steps
    if batch.slots is not None:
        batch.slots.descend(decision.ancestors)
    return population.extend(drafts.tokens, drafts.ends, decision)._replace(unread=unread)


def add_bonus(
    batch: Batch, population: Population, next_tokens: TokenDistribution, failure: torch.Tensor
) -> Population:
    """Append one token of ``next_tokens``, drawn after resampling so that copies can differ.

    Groups with a ``failure`` ``[G]`` other than 0 end.
    """
    ops = batch.ops
    settings = batch.settings
    needs = batch.needs
    if Need.POWER in needs or next_tokens.log_mass is not None:
        next_tokens, population = _weigh_bonus(batch, population, next_tokens)
    positions = population.output_lengths
    texts = population.texts[:, :, 1:]
    same_text = ops.same_text(texts, population.lengths, batch.may_stratify)
    own = ops.uniforms(settings.seeds, positions, Purpose.BONUS)
    uniforms, _ = ops.stratify(own, same_text)
    if needs & {Need.VERIFIES, Need.TREES}:
        # After verification all particles are copies of one, and must draw the same token.
        uniforms = torch.where(settings.weighs.unsqueeze(1), uniforms, own[:, :1])
    tokens = next_tokens.draw(uniforms).unsqueeze(2)  # [G, N, 1]
    ends = batch.ends(tokens, positions.unsqueeze(2))
    if batch.rules is not None:
        ends = batch.rules.ends(ends, tokens, population)
    return population.append_bonus(tokens.squeeze(2), ends.squeeze(2), failure)


def _weigh_bonus(
    batch: Batch, population: Population, next_tokens: TokenDistribution
) -> tuple[TokenDistribution, Population]:
    """Raise the bonus token's distribution to each power, and weigh by its normaliser."""
    weighs = batch.settings.weighs.unsqueeze(1)
    if Need.POWER in batch.needs:
        next_tokens, log_sum = next_tokens.to_power(batch.settings.power)
    else:
        log_sum = next_tokens.log_masses()
    log_sum = log_sum.double().view_as(population.log_weights)
    counts = weighs & ~population.ended
    if batch.extends is not None:  # whose decider has weighed it
        counts &= ~batch.extends.unsqueeze(1)
    stuck = (~weighs & (log_sum == -torch.inf)).any(1)
    return next_tokens, population._replace(
        log_weights=population.log_weights + torch.where(counts, log_sum, 0.0),
        # Verified sequences have no weights; -inf marks that no token may follow one.
        log_evidence=population.log_evidence.masked_fill(stuck, -torch.inf),
    )


def measure(
    batch: Batch,
    before: Population,
    after: Population,
    ancestors: torch.Tensor,
    p: TokenDistribution,
    drafts: Drafts,
) -> Population:
    """Add a round's distance to the target to its particles' sums; see `smc.fidelity.watch`."""
    if drafts.coins is None or drafts.measured_q is None:  # K = 0
        return after
    path = Path(
        coins=drafts.coins,
        num_steps=batch.settings.num_steps,
        measured=batch.settings.measured,
        ancestors=ancestors,
        starts=before.lengths,
        lengths=after.lengths,
        tails=after.tokens,
    )
    return after._replace(fidelity=batch.ops.watch(after.fidelity, path, p, drafts.measured_q))


def narrow(batch: Batch, population: Population) -> Narrowed:
    """Resample the tokens beyond the lag, and the whole tails of finished groups."""
    own = batch.settings
    end = population.narrow(own.seeds, own.lag, own.weighs, own.heaviest)
    if batch.slots is not None:
        batch.slots.descend(end.ancestors)
    return end
