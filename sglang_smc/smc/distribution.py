"""Turn logits into the distributions p of the target model and q of the draft model.

The request's temperature, top-k, top-p and min-p apply to the target and to the draft alike
(`smc.filters`): p is the distribution that the output of the request should have.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from sglang_smc.smc.edits import restrict
from sglang_smc.smc.filters import KeptTokens, keep_tokens

_TILE = 256  # tokens per partial sum of masses in the search for a token
MOST_ENTRIES = 1 << 18  # logits that are processed at once, so that they stay in the cache


class TokenDistribution(NamedTuple):
    """Next-token distributions of D draws: softmax of logits / temperature, masked and filtered.

    No tensor of the size of the logits is allocated before `log_probs` is called. The kernels have
    a subclass of their own (`ops.triton_ops`).
    """

    scores: torch.Tensor  # [R, V], any float type; -inf marks a forbidden token
    temperature: torch.Tensor  # [G] > 0, each for D / G consecutive draws
    rows: torch.Tensor | None = None  # [D] the row of scores that each draw uses; None: D = R
    log_mass: torch.Tensor | None = None  # [D] log of the mass that masks leave; None: no mask
    greedy: torch.Tensor | None = None  # [G] bool: takes the likeliest token; None: no group does
    kept: KeptTokens | None = None  # of the R rows; None: no filter cuts any
    sums: Any = None  # of the R rows, by `summed`; valid while the other fields stay
    rejects: torch.Tensor | None = None  # of D draws: verification rejects, so `draw` uses `left`
    left: "TokenDistribution | None" = None  # the residual distributions of verification

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        greedy: torch.Tensor | None = None,
        filters: Sequence[torch.Tensor] | None = None,
        allowed: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> "TokenDistribution":
        """Return the distributions of rows of logits, M of each of G requests, `summed`.

        Args:
            logits: ``[G, ..., V]``; ``-inf`` marks a token that is forbidden.
            temperature: ``[G]``, of the M rows of a request.
            greedy: ``[G]`` bool: the likeliest token, of ties the first, at any temperature.
            filters: top-k, top-p and min-p as of `keep_tokens`; None where no request has any.
            allowed: ``[G, ..., V]`` bool mask, applied before the filters; None for no mask.
            rows: ``[G * M]`` int64 the row that each draw reads, of rows that are equal one of
                them; None: its own.
        """
        log_mass = None
        logits = logits.flatten(1, -2)  # [G, M, V]
        if allowed is not None:
            allowed = allowed.flatten(1, -2)
            logits, log_mass = restrict(logits, allowed, temperature.unsqueeze(1))
            log_mass = log_mass.flatten()
        scores = logits.flatten(0, 1)
        law = cls(scores, temperature, rows, log_mass, greedy)
        return law.summed() if filters is None else law.filtered(*filters)

    @classmethod
    def of_log_probs(
        cls, log_p: torch.Tensor, rows: torch.Tensor | None = None, num_groups: int = 1
    ) -> "TokenDistribution":
        """Return the distribution of log-probabilities ``[R, V]``; draws may share a row."""
        return cls(log_p, torch.ones(num_groups, device=log_p.device), rows)

    @property
    def num_draws(self) -> int:
        """Return the number of draws, D."""
        return len(self.scores if self.rows is None else self.rows)

    def summed(self) -> "TokenDistribution":
        """Return this distribution; kernels compute each row's normaliser here, once for all."""
        return self

    def filtered(
        self, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
    ) -> "TokenDistribution":
        """Return distributions with the tokens that filters keep, `summed`.

        Args:
            top_k, top_p, min_p: as of `keep_tokens`; top_k is 1 in greedy groups.
        """
        kept = keep_tokens(self.scores, self.temperature, top_k, top_p, min_p)
        return self._replace(kept=kept).summed()

    def sample(self, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample D tokens; return them and their log-probabilities in the shape of ``uniforms``.

        They are token 0 and NaN where a logit is NaN or ``inf``, or all tokens are forbidden.
        """
        tokens, log_p = self._sample(uniforms.flatten())
        return tokens.view_as(uniforms), log_p.view_as(uniforms)

    def draw(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Sample D tokens, after a rejection by verification from the residual, `left`."""
        tokens, _ = self.sample(uniforms)
        if self.left is None or self.rejects is None:
            return tokens
        others, _ = self.left.sample(uniforms)
        return torch.where(self.rejects.view_as(uniforms), others, tokens)

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return log p of D tokens, in their shape: renormalised under masks, as in `sample`."""
        return self._score(tokens.flatten()).view_as(tokens)

    def _sample(self, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample tokens with uniforms ``[D]``; return both ``[D]``, int64 and float32."""
        if self.rows is None and self.scores.numel() <= MOST_ENTRIES:
            log_p = self.log_probs()
            tokens = sample(log_p, uniforms)
            return tokens, log_p.gather(1, tokens.unsqueeze(1)).squeeze(1)
        tokens = torch.empty_like(uniforms, dtype=torch.int64)  # [D]
        scores = torch.empty_like(uniforms, dtype=torch.float32)  # [D]
        for some, part, row in self._parts():
            log_p = part.log_probs()
            tokens[some] = sample(log_p, uniforms[some], row)
            scores[some] = log_p[row, tokens[some]]
        return tokens, scores

    def _score(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities ``[D]`` float32 of tokens ``[D]``."""
        scores = torch.empty_like(tokens, dtype=torch.float32)  # [D]
        for some, part, row in self._parts():
            scores[some] = part.log_probs()[row, tokens[some]]
        return scores

    def _parts(self) -> Iterator[tuple[torch.Tensor, "TokenDistribution", torch.Tensor]]:
        """Yield draws ``[M]`` int64, p of their rows, and the place of each draw's row."""
        size = max(1, MOST_ENTRIES // self.scores.shape[1])
        draw = torch.arange(self.num_draws, device=self.scores.device)
        for some in draw.split(size):
            yield some, self if len(some) == len(draw) else self.at(some), draw[: len(some)]

    def at(self, draws: slice | torch.Tensor) -> "TokenDistribution":
        """Return the distributions of some of the draws, of their numbers ``[M]`` int64."""
        size = self.num_draws
        rows = self.rows
        greedy = self.greedy
        if rows is None:
            rows = torch.arange(size, device=self.scores.device)
        return self._replace(
            rows=rows[draws],
            temperature=of_each_draw(self.temperature, size)[draws],
            greedy=None if greedy is None else of_each_draw(greedy, size)[draws],
            log_mass=None if self.log_mass is None else self.log_mass[draws],
        )

    def log_probs(self) -> torch.Tensor:
        """Return the log-probabilities of all tokens at each draw, ``[D, V]`` float32.

        ``-inf`` where a token is forbidden or filtered; NaN in a whole row where logits give no
        distribution.
        """
        used, scores = self._tempered()
        log_p = torch.log_softmax(scores, dim=-1)
        if self.greedy is None:
            return log_p
        token = torch.arange(used.shape[1], device=used.device)
        is_likeliest = token == used.argmax(1, keepdim=True)
        point = torch.where(is_likeliest, 0.0, -torch.inf) + torch.where(log_p.isnan(), log_p, 0.0)
        return torch.where(of_each_draw(self.greedy, len(used)).unsqueeze(1), point, log_p)

    def log_sums(self) -> torch.Tensor:
        """Return the log normalisers, log sum exp(logit / T), ``[D]`` float64.

        0 for a greedy group, NaN where a row gives no distribution.
        """
        _, scores = self._tempered()
        largest = scores.amax(1)  # [D]
        total = (scores - largest.unsqueeze(1)).exp().sum(1).double().log() + largest
        if self.greedy is None:
            return total
        return torch.where(of_each_draw(self.greedy, len(total)) & ~total.isnan(), 0.0, total)

    def _tempered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 logits ``[D, V]``, and the kept ones over temperature, 1 where greedy."""
        used = (self.scores if self.rows is None else self.scores[self.rows]).float()
        temperature = self.temperature.float()
        if self.greedy is not None:
            temperature = temperature.masked_fill(self.greedy, 1.0)
        scores = used / of_each_draw(temperature, len(used)).unsqueeze(1)
        if self.kept is not None:
            scores = scores.masked_fill(self.kept.at(self.rows).dropped(used), -torch.inf)
        return used, scores

    def log_masses(self) -> torch.Tensor:
        """Return the log of the mass that masks leave of p, ``[D]``; 0 without a mask."""
        if self.log_mass is None:
            return self.temperature.new_zeros(self.num_draws)
        return self.log_mass

    def to_power(self, power: torch.Tensor) -> tuple["TokenDistribution", torch.Tensor]:
        """Return p^alpha normalised, and the log of its normaliser, for powers alpha ``[G]``.

        A token drawn from the normalised p^alpha has the normaliser as its importance weight,
        whichever token it is. The distribution is that of temperature T / alpha. Where alpha is 1
        nothing changes. The log of the normaliser is ``[D]`` float64.
        """
        temperature = (self.temperature / power).float()
        raised = self._replace(temperature=temperature, log_mass=None, sums=None)
        power = of_each_draw(power, self.num_draws)
        log_sum = torch.addcmul(raised.log_sums(), power, self.log_sums(), value=-1)
        log_sum = log_sum.masked_fill_(power == 1.0, 0.0)
        return raised, log_sum if self.log_mass is None else log_sum + power * self.log_mass

    def unless(self, mine: torch.Tensor, other: "TokenDistribution") -> "TokenDistribution":
        """Return these distributions, with ``other`` for groups ``mine`` ``[G]`` bool.

        Both read rows of one p. These have a residual if drafts were verified, as may the others.
        """

        def either(yes: torch.Tensor | None, no: torch.Tensor | None) -> torch.Tensor:
            assert yes is not None and no is not None
            where = mine.unsqueeze(1)
            return torch.where(where, yes.view(len(mine), -1), no.view(len(mine), -1)).flatten()

        masses = self.log_mass
        rejects = self.rejects
        left = self.left
        if masses is not None and other.log_mass is not None:
            masses = either(other.log_mass, masses)
        if rejects is not None and other.rejects is not None:
            rejects = either(other.rejects, rejects)
        elif rejects is not None:
            rejects = rejects.view(len(mine), -1).masked_fill(mine.unsqueeze(1), False)
        if left is not None and other.left is not None:
            assert other.left.rows is not None
            rows = either(other.left.rows + len(left.scores), left.rows)
            left = left.of_log_probs(torch.cat([left.scores, other.left.scores]), rows)
        rows = either(other.rows, self.rows)
        return self._replace(rows=rows, log_mass=masses, rejects=rejects, left=left)


def sample(
    log_p: torch.Tensor, uniforms: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Sample tokens by inverting cumulative distributions.

    A token of probability zero is never drawn, whatever the uniform and however
    the sum was rounded.

    Args:
        log_p: ``[R, V]`` normalised log-probabilities.
        uniforms: ``[D]`` float64 in [0, 1).
        rows: ``[D]`` int64: whose distribution each draw has; None: its own.

    Returns:
        ``[D]`` int64 token ids.
    """
    each = log_p.exp()
    if padding := -log_p.shape[1] % _TILE:
        each = torch.nn.functional.pad(each, (0, padding))
    tiles = each.unflatten(1, (-1, _TILE))
    masses = tiles.sum(2, dtype=torch.float64)  # [R, tiles]
    through = masses.cumsum(1)
    before = through - masses
    if rows is None:
        rows = torch.arange(len(uniforms), device=log_p.device)
    else:
        through = through[rows]
    target = uniforms * through[:, -1]  # [D]
    tile = _find(through, target)  # [D]
    # Rounding may leave a negative rest, which would select a first token of mass zero.
    rest = (target - before[rows, tile]).clamp_min(0.0)
    return tile * _TILE + _find(tiles[rows, tile].double().cumsum(1), rest)


def _find(through: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index at which cumulative mass ``[D, J]`` exceeds a target ``[D]``."""
    # The first index that reaches the total is the last of positive mass.
    is_before = (through <= target.unsqueeze(1)) & (through < through[:, -1:])
    return is_before.sum(1)


def of_each_draw(of_groups: torch.Tensor, num_draws: int) -> torch.Tensor:
    """Repeat each group's value for its draws: ``[G]`` to ``[D]``, D / G draws per group."""
    if len(of_groups) == num_draws:
        return of_groups
    return of_groups.unsqueeze(1).expand(-1, num_draws // len(of_groups)).flatten()
