"""Turn logits into the distributions p of the target model and q of the draft model.

The request's temperature, top-k, top-p and min-p apply to the target and to the draft alike
(`smc.filters`): p is the distribution that the output of the request should have.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from sglang_smc.smc.edits import restrict
from sglang_smc.smc.filters import KeptTokens

_TILE = 256  # tokens per partial sum of masses in the search for a token
_ENTRIES = 1 << 18  # logits that are processed at once, so that they stay in the cache


class SamplingRules(NamedTuple):
    """Sampling parameters of each request, ``[G]``, on the device of its logits."""

    temperature: torch.Tensor  # float32 > 0
    top_k: torch.Tensor  # int64 >= 1; anything >= V keeps all
    top_p: torch.Tensor  # float32 in (0, 1]
    min_p: torch.Tensor  # float32 in [0, 1]
    greedy: torch.Tensor  # bool: top_k is 1


class FilterKinds(NamedTuple):
    """Kinds of sampling rules that occur in a batch, as flags on the host."""

    filtered: bool  # some request uses top-k, top-p or min-p, and is not greedy
    greedy: bool  # some request takes the likeliest token, which needs no sort


class Draws(Protocol):
    """Operations that sample and score tokens: the functions of these names, or kernels."""

    @property
    def keep_tokens(self) -> Callable[..., KeptTokens]: ...

    @property
    def sample_and_score(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]: ...

    @property
    def score_tokens(self) -> Callable[..., torch.Tensor]: ...

    @property
    def log_probs(self) -> Callable[..., torch.Tensor]: ...

    @property
    def log_sums(self) -> Callable[..., torch.Tensor]: ...

    @property
    def row_sums(self) -> Callable[..., Any]: ...


class TokenDistribution(NamedTuple):
    """Next-token distributions of D draws: softmax of logits / temperature, masked and filtered.

    No tensor of the size of the logits is allocated before `log_probs` is called.
    """

    scores: torch.Tensor  # [R, V], any float type
    temperature: torch.Tensor  # [G] float32, each of D / G draws one after another
    rows: torch.Tensor | None = None  # [D] the row of scores that each draw uses; None: D = R
    log_mass: torch.Tensor | None = None  # [R] log of the mass masks leave of p; None: no mask
    greedy: torch.Tensor | None = None  # [G] bool: takes the likeliest token; None: no group does
    kept: KeptTokens | None = None  # of the R rows; None: no filter cuts any
    sums: Any = None  # of the R rows by `Draws.row_sums`; valid while the other fields stay

    @classmethod
    def of(
        cls,
        ops: Draws,
        logits: torch.Tensor,
        rules: SamplingRules,
        kinds: FilterKinds,
        allowed: torch.Tensor | None = None,
    ) -> "TokenDistribution":
        """Return the distributions of ``G * M`` rows of logits.

        Args:
            ops: finds the tokens that filters keep.
            logits: ``[G, M, V]``; ``-inf`` marks a token that is forbidden.
            rules: ``[G]`` each, one for the M rows of a request.
            kinds: of the batch.
            allowed: ``[G, M, V]`` bool mask, applied before the filters; None for no mask.
        """
        log_mass = None
        if allowed is not None:
            logits, log_mass = restrict(logits, allowed, rules.temperature.unsqueeze(1))
            log_mass = log_mass.flatten()
        scores = logits.flatten(0, 1)
        filters = rules.temperature, rules.top_k, rules.top_p, rules.min_p
        return cls(
            scores,
            rules.temperature,
            log_mass=log_mass,
            greedy=rules.greedy if kinds.greedy else None,
            kept=ops.keep_tokens(scores, *filters) if kinds.filtered else None,
        )

    @classmethod
    def of_log_probs(
        cls, log_p: torch.Tensor, rows: torch.Tensor | None = None
    ) -> "TokenDistribution":
        """Return the distribution of log-probabilities ``[R, V]``; draws may share a row."""
        return cls(log_p, torch.ones(1, device=log_p.device), rows)

    @property
    def num_draws(self) -> int:
        """Return the number of draws, D."""
        return len(self.scores if self.rows is None else self.rows)

    def summed(self, ops: Draws) -> "TokenDistribution":
        """Return this distribution, with each row's normaliser computed once for all its draws."""
        assert self.rows is None
        sums = ops.row_sums(self.scores, self.temperature, self.greedy, self.kept)
        return self._replace(sums=sums)

    def at(self, rows: torch.Tensor) -> "TokenDistribution":
        """Return the distributions at other ``rows`` ``[D]``, each a row of its draw's group."""
        return self._replace(rows=rows)

    def sample(self, ops: Draws, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample D tokens; return them and their log-probabilities in the shape of ``uniforms``."""
        tokens, log_p = ops.sample_and_score(
            self.scores, self.temperature, uniforms.flatten(), *self._cuts
        )
        return tokens.view_as(uniforms), log_p.view_as(uniforms)

    def score(self, ops: Draws, tokens: torch.Tensor) -> torch.Tensor:
        """Return log p of D tokens, in their shape, before masks renormalise it."""
        log_p = ops.score_tokens(self.scores, self.temperature, tokens.flatten(), *self._cuts)
        if self.log_mass is not None:
            log_p = log_p + self.log_masses()
        return log_p.view_as(tokens)

    def log_probs(self, ops: Draws) -> torch.Tensor:
        """Return the log-probabilities of all tokens at each draw, ``[D, V]`` float32."""
        return ops.log_probs(self.scores, self.temperature, *self._cuts)

    @property
    def _cuts(self) -> tuple[torch.Tensor | None, torch.Tensor | None, KeptTokens | None, Any]:
        """Return the arguments of `Draws` that select rows, kept tokens and normalisers."""
        return self.rows, self.greedy, self.kept, self.sums

    def to_power(self, ops: Draws, power: torch.Tensor) -> tuple["TokenDistribution", torch.Tensor]:
        """Return p^alpha normalised, and the log of its normaliser, for powers alpha ``[G]``.

        A token drawn from the normalised p^alpha has the normaliser as its importance weight,
        whichever token it is. The distribution is that of temperature T / alpha. Where alpha is 1
        nothing changes. The log of the normaliser is ``[D]`` float64.
        """
        heat = (self.temperature / power).float()
        raised = self._replace(temperature=heat, log_mass=None, sums=None)
        power = of_each_draw(power, self.num_draws)
        sums = [ops.log_sums(self.scores, one.temperature, *one._cuts) for one in (raised, self)]
        log_sum = torch.addcmul(sums[0], power, sums[1], value=-1)
        log_sum = log_sum.masked_fill_(power == 1.0, 0.0)
        return raised, log_sum if self.log_mass is None else log_sum + power * self.log_masses()

    def log_masses(self) -> torch.Tensor:
        """Return the log of the mass that masks leave of p, ``[D]`` float32; 0 without a mask."""
        if self.log_mass is None:
            return self.temperature.new_zeros(self.num_draws)
        return self.log_mass if self.rows is None else self.log_mass[self.rows]


def sample(log_p: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample one token per row by inverting the cumulative distribution.

    A token of probability zero is never drawn, whatever the uniform and however
    the sum was rounded.

    Args:
        log_p: ``[..., V]`` normalised log-probabilities.
        uniforms: ``[...]`` float64 in [0, 1).

    Returns:
        ``[...]`` int64 token ids.
    """
    padding = -log_p.shape[-1] % _TILE
    tiles = torch.nn.functional.pad(log_p.exp(), (0, padding)).unflatten(-1, (-1, _TILE))
    masses = tiles.sum(-1, dtype=torch.float64)  # [..., tiles]
    through = masses.cumsum(-1)
    target = uniforms * through[..., -1]  # [...], of as many draws as one row may serve
    tile = _find(through, target).unsqueeze(-1)  # [..., 1]
    before = (through - masses).expand(*target.shape, -1).gather(-1, tile).squeeze(-1)
    at_tile = tile.unsqueeze(-1).expand(*tile.shape, _TILE)
    inside = tiles.expand(*target.shape, -1, -1).gather(-2, at_tile).squeeze(-2)
    # Rounding may leave a negative rest, which would select a first token of mass zero.
    rest = (target - before).clamp_min(0.0)
    return tile.squeeze(-1) * _TILE + _find(inside.double().cumsum(-1), rest)


def _find(through: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index at which cumulative mass ``[..., J]`` exceeds a target ``[...]``."""
    below = (through <= target.unsqueeze(-1)).sum(-1)
    # The first index that reaches the total is the last of positive mass.
    last = (through < through[..., -1:]).sum(-1)
    return torch.minimum(below, last)


def token_log_probs(log_p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return ``log_p[..., token]``: ``[..., V]`` and ``[...]`` to ``[...]``."""
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class NextTokens(NamedTuple):
    """Distributions of the next (bonus) tokens of the G * N particles."""

    law: TokenDistribution  # at rows of p
    log_masses: torch.Tensor | None  # [G, N] log of the mass masks leave of p; None: no mask
    rejects: torch.Tensor | None = None  # [G, N] bool: the token is drawn from `left` instead
    left: TokenDistribution | None = None  # the residual distributions of verification

    def sample(self, ops: Draws, uniforms: torch.Tensor) -> torch.Tensor:
        """Sample the tokens ``[G, N]`` with ``uniforms`` ``[G, N]``."""
        tokens, _ = self.law.sample(ops, uniforms)
        if self.left is None or self.rejects is None:
            return tokens
        others, _ = self.left.sample(ops, uniforms)
        return torch.where(self.rejects, others, tokens)

    def unless(self, mine: torch.Tensor, other: "NextTokens") -> "NextTokens":
        """Return these distributions, with ``other`` in the groups ``mine`` ``[G]`` bool.

        Both read rows of one p; these verify, and the others may.
        """
        masses, rejects = self.log_masses, self.rejects
        if masses is not None and other.log_masses is not None:
            masses = torch.where(mine.unsqueeze(1), other.log_masses, masses)
        if rejects is not None:
            theirs = False if other.rejects is None else other.rejects
            rejects = torch.where(mine.unsqueeze(1), theirs, rejects)
        left = self.left
        if left is not None and other.left is not None:
            rows = _either(mine, other.left, left, first=len(left.scores))
            both = torch.cat([left.scores, other.left.scores])
            left = TokenDistribution.of_log_probs(both, rows)
        return NextTokens(
            law=self.law.at(_either(mine, other.law, self.law)),
            log_masses=masses,
            rejects=rejects,
            left=left,
        )


def _either(
    mine: torch.Tensor, yes: TokenDistribution, no: TokenDistribution, first: int = 0
) -> torch.Tensor:
    """Return the rows ``[G * N]`` of ``yes`` in the groups ``mine`` ``[G]``, else those of ``no``.

    The rows of ``yes`` are counted from ``first``.
    """
    assert yes.rows is not None and no.rows is not None
    rows = yes.rows.view(len(mine), -1) + first, no.rows.view(len(mine), -1)
    return torch.where(mine.unsqueeze(1), *rows).flatten()


def sample_and_score(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    rows: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    kept: KeptTokens | None = None,
    sums: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens, and return them with their log-probabilities.

    Args:
        logits: ``[R, V]``, any float type; ``-inf`` marks a forbidden token.
        temperature: ``[G]`` > 0, each of D / G draws one after another.
        uniforms: ``[D]`` float64 in [0, 1).
        rows: ``[D]`` int64, the row of logits that each draw uses; None is one draw per row, D = R.
        greedy: ``[G]`` bool: the likeliest token, of ties the first, at any temperature.
        kept: tokens that filters keep of the R rows; no other token is drawn.

    Returns:
        Tokens ``[D]`` int64 and their log-probabilities ``[D]`` float32: token 0 and NaN where a
        logit is NaN or ``inf``, or all are forbidden.
    """
    tokens = torch.empty_like(uniforms, dtype=torch.int64)  # [D]
    scores = torch.empty_like(uniforms, dtype=torch.float32)  # [D]
    for some, arguments in _parts(logits, temperature, len(tokens), rows, greedy):
        log_p = log_probs(logits, *arguments, kept)
        tokens[some] = sample(log_p, uniforms[some])
        scores[some] = token_log_probs(log_p, tokens[some])
    return tokens, scores


def score_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    kept: KeptTokens | None = None,
    sums: None = None,
) -> torch.Tensor:
    """Return log-probabilities ``[D]`` float32 of given tokens ``[D]``.

    The other arguments are those of `sample_and_score`.
    """
    scores = torch.empty_like(tokens, dtype=torch.float32)  # [D]
    for some, arguments in _parts(logits, temperature, len(tokens), rows, greedy):
        scores[some] = token_log_probs(log_probs(logits, *arguments, kept), tokens[some])
    return scores


def _parts(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    num_draws: int,
    rows: torch.Tensor | None,
    greedy: torch.Tensor | None,
) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]]:
    """Split the draws into parts with intermediate tensors that fit in the cache.

    Yields:
        The slice of draws, and its temperatures, rows and greedy flags.
    """
    size = max(1, _ENTRIES // logits.shape[1])
    if num_draws <= size:
        yield slice(None), (temperature, rows, greedy)
        return
    place = torch.arange(num_draws, device=logits.device) if rows is None else rows
    heat = of_each_draw(temperature, num_draws)
    flags = None if greedy is None else of_each_draw(greedy, num_draws)
    for first in range(0, num_draws, size):
        some = slice(first, first + size)
        yield some, (heat[some], place[some], None if flags is None else flags[some])


def log_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    rows: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    kept: KeptTokens | None = None,
    sums: None = None,
) -> torch.Tensor:
    """Return the log-probabilities of all tokens, ``[D, V]`` float32.

    The arguments are those of `sample_and_score`. ``-inf`` where a token is forbidden or filtered;
    NaN in a whole row where logits give no distribution.
    """
    used = (logits if rows is None else logits[rows]).float()
    log_p = torch.log_softmax(_tempered(used, temperature, rows, greedy, kept), dim=-1)
    if greedy is None:
        return log_p
    token = torch.arange(used.shape[1], device=used.device)
    is_likeliest = token == used.argmax(1, keepdim=True)
    point = torch.where(is_likeliest, 0.0, -torch.inf) + torch.where(log_p.isnan(), log_p, 0.0)
    return torch.where(of_each_draw(greedy, len(used)).unsqueeze(1), point, log_p)


def log_sums(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    rows: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    kept: KeptTokens | None = None,
    sums: None = None,
) -> torch.Tensor:
    """Return the log normalisers, log sum exp(logit / T), ``[D]`` float64.

    0 for a greedy group, NaN where a row gives no distribution; arguments as for `log_probs`.
    """
    used = (logits if rows is None else logits[rows]).float()
    scores = _tempered(used, temperature, rows, greedy, kept)
    largest = scores.amax(1)  # [D]
    total = (scores - largest.unsqueeze(1)).exp().sum(1).double().log() + largest
    if greedy is None:
        return total
    return torch.where(of_each_draw(greedy, len(used)) & ~total.isnan(), 0.0, total)


def row_sums(*_: object, **__: object) -> None:
    """Return None: the functions of this module sum each row as they read it."""


def _tempered(
    used: torch.Tensor,
    temperature: torch.Tensor,
    rows: torch.Tensor | None,
    greedy: torch.Tensor | None,
    kept: KeptTokens | None,
) -> torch.Tensor:
    """Return the kept float32 logits ``[D, V]`` over their temperature, which is 1 where greedy."""
    heat = temperature.float() if greedy is None else temperature.float().masked_fill(greedy, 1.0)
    scores = used / of_each_draw(heat, len(used)).unsqueeze(1)
    return scores if kept is None else scores.masked_fill(kept.at(rows).dropped(used), -torch.inf)


def of_each_draw(of_groups: torch.Tensor, num_draws: int) -> torch.Tensor:
    """Repeat each group's value for its draws: ``[G]`` to ``[D]``, D / G draws per group."""
    return of_groups.unsqueeze(1).expand(-1, num_draws // len(of_groups)).flatten()
