"""From logits to the distributions p and q that a request asked for.

Temperature, top-k, top-p and min-p act on the target and on the draft alike, so
p is what the client wants to sample from and q lives under the same rules. The
filters follow SGLang's sampler: temperature first, then top-k and top-p on the
same probabilities ("joint" order), min-p relative to the largest one.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from sglang_smc.smc.masking import restrict


class SamplingRules(NamedTuple):
    """Sampling parameters of each row of logits, on the same device."""

    temperature: torch.Tensor  # > 0; greedy is top_k = 1
    top_k: torch.Tensor  # >= 1; anything >= V keeps all
    top_p: torch.Tensor  # in (0, 1]
    min_p: torch.Tensor  # in [0, 1]


class FilterKinds(NamedTuple):
    """Which rules for tokens occur in a batch, known to the host."""

    filtered: bool  # some request uses top-k, top-p or min-p, and is not greedy
    greedy: bool  # some request takes the likeliest token, which needs no sort


class Draws(Protocol):
    """Who draws and scores tokens: `sample_and_score` and `score_tokens`, or kernels."""

    @property
    def sample_and_score(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]: ...

    @property
    def score_tokens(self) -> Callable[..., torch.Tensor]: ...


class TokenDistribution(NamedTuple):
    """What each of D draws is drawn from: logits over a temperature.

    Where rules cut tokens, the scores are log-probabilities already, and the temperature is 1.
    """

    scores: torch.Tensor  # [R, V], any float type
    temperature: torch.Tensor  # [G] float32, each of D / G draws one after another
    rows: torch.Tensor | None = None  # [D] the row of scores that each draw uses; None: D = R
    log_mass: torch.Tensor | None = None  # [R] log of what masks leave of p; None: all of it

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        rules: SamplingRules,
        kinds: FilterKinds,
        allowed: torch.Tensor | None = None,
    ) -> "TokenDistribution":
        """What ``G * M`` rows of logits are drawn from, not worked out where no rule cuts tokens.

        Args:
            logits: ``[G, M, V]``; ``-inf`` marks a token that is forbidden.
            rules: ``[G]`` each, one for the M rows of a request.
            kinds: of the batch.
            allowed: ``[G, M, V]`` bool. Filters act within it.
        """
        log_mass = None
        if allowed is not None:
            logits, log_mass = restrict(logits, allowed, rules.temperature.unsqueeze(1))
            log_mass = log_mass.flatten()
        if kinds.filtered:
            of_rows = SamplingRules(*(rule.unsqueeze(1) for rule in rules))  # [G, 1]
            log_p = log_probs(logits, of_rows)
            return cls.of_log_probs(log_p.flatten(0, 1))._replace(log_mass=log_mass)
        if kinds.greedy:
            logits = likeliest_only(logits, (rules.top_k == 1).unsqueeze(1))
        return cls(logits.flatten(0, 1), rules.temperature, log_mass=log_mass)

    @classmethod
    def of_log_probs(
        cls, log_p: torch.Tensor, rows: torch.Tensor | None = None
    ) -> "TokenDistribution":
        """The distribution of log-probabilities ``[R, V]``; a row may serve several draws."""
        return cls(log_p, torch.ones(1, device=log_p.device), rows)

    @property
    def num_draws(self) -> int:
        """The number of draws, D."""
        return len(self.scores if self.rows is None else self.rows)

    def sample(self, ops: Draws, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probabilities, both of the shape of ``uniforms``, D in all."""
        tokens, log_p = ops.sample_and_score(
            self.scores, self.temperature, uniforms.flatten(), self.rows
        )
        return tokens.view_as(uniforms), log_p.view_as(uniforms)

    def score(self, ops: Draws, tokens: torch.Tensor) -> torch.Tensor:
        """Log p of tokens, D in all, in their shape, before masks renormalise it."""
        log_p = ops.score_tokens(self.scores, self.temperature, tokens.flatten(), self.rows)
        if self.log_mass is not None:
            log_p = log_p + self.log_masses()
        return log_p.view_as(tokens)

    def at(self, rows: torch.Tensor) -> "TokenDistribution":
        """The same scores, read at other ``rows`` ``[D]``."""
        return self._replace(rows=rows)

    def log_probs(self) -> torch.Tensor:
        """Log-probabilities of all tokens at each draw, ``[D, V]`` float32."""
        scores = self.scores if self.rows is None else self.scores[self.rows]
        return tempered(scores, of_each_draw(self.temperature, len(scores)))

    def to_power(self, power: torch.Tensor) -> tuple["TokenDistribution", torch.Tensor]:
        """p^alpha over its sum, and the log of the sum, for powers ``[D]``: what a draw weighs."""
        log_p, log_sum = power_law(self.log_probs(), power)
        return TokenDistribution.of_log_probs(log_p), log_sum + power * self.log_masses()

    def where(self, mine: torch.Tensor, other: "TokenDistribution") -> "TokenDistribution":
        """This distribution in the groups ``mine`` ``[G]`` bool, ``other`` in the others."""
        of_draws = of_each_draw(mine, self.num_draws)
        log_p = torch.where(of_draws.unsqueeze(1), self.log_probs(), other.log_probs())
        log_mass = torch.where(of_draws, self.log_masses(), other.log_masses())
        return TokenDistribution.of_log_probs(log_p)._replace(log_mass=log_mass)

    def log_masses(self) -> torch.Tensor:
        """What masks leave of p at each draw, ``[D]`` float32 logs; 0 where there is none."""
        if self.log_mass is None:
            return self.temperature.new_zeros(self.num_draws)
        return self.log_mass if self.rows is None else self.log_mass[self.rows]


def log_probs(logits: torch.Tensor, rules: SamplingRules, *, filtered: bool = True) -> torch.Tensor:
    """Normalised log-probabilities under a request's rules.

    Args:
        logits: ``[..., V]``, any float type; ``-inf`` marks a forbidden token. NaN, ``inf`` or
            nothing but ``-inf`` gives no law: all of the row is NaN.
        rules: one entry a row, or any shape that broadcasts to ``[...]``.
        filtered: False promises that no row uses top-k, top-p or min-p, and saves the sort.

    Returns:
        ``[..., V]`` float32; ``-inf`` where the token is cut.
    """
    log_p = tempered(logits, rules.temperature)
    if not filtered:
        return log_p
    kept = log_p.masked_fill(~_kept_tokens(log_p.exp(), rules), -torch.inf)
    return kept - torch.logsumexp(kept, dim=-1, keepdim=True)


def power_law(log_p: torch.Tensor, power: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next-token law of a target p^alpha on texts, and its weight.

    A token drawn from p^alpha over its sum needs that sum as its weight, whichever token it is.

    Args:
        log_p: ``[..., V]`` normalised.
        power: alpha, any shape that broadcasts to ``[...]``; where it is 1 nothing changes.

    Returns:
        ``[..., V]`` normalised log-probabilities and the logs of the sums, ``[...]`` float64.
    """
    raised = log_p.double() * power.unsqueeze(-1)
    # 0 * -inf: a token that p excludes stays excluded.
    raised = raised.masked_fill(log_p == -torch.inf, -torch.inf)
    log_sum = torch.logsumexp(raised, dim=-1)
    plain = power == 1.0
    log_sum = torch.where(plain, 0.0, log_sum)
    return torch.where(plain.unsqueeze(-1), log_p.double(), raised - log_sum.unsqueeze(-1)), log_sum


def likeliest_only(logits: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Forbid all tokens but the likeliest, of several the first, in some rows.

    Args:
        logits: ``[..., V]``.
        where: bool, any shape that broadcasts to ``[...]``.
    """
    likeliest = logits.argmax(-1, keepdim=True)  # [..., 1]
    token = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(where.unsqueeze(-1) & (token != likeliest), -torch.inf)


def sample(log_p: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token a row by inverting the cumulative distribution.

    A token of probability zero is never drawn, whatever the uniform and however
    the sum was rounded.

    Args:
        log_p: ``[..., V]`` normalised log-probabilities.
        uniforms: ``[...]`` float64 in [0, 1).

    Returns:
        ``[...]`` int64 token ids.
    """
    cumulative = log_p.double().exp().cumsum(-1)  # [..., V]
    total = cumulative[..., -1:]
    below = (cumulative <= uniforms.unsqueeze(-1) * total).sum(-1)
    # The first index that reaches the total is the last token with any mass.
    last = (cumulative < total).sum(-1)
    return torch.minimum(below, last)


def token_log_probs(log_p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Pick ``log_p[..., token]``: ``[..., V]`` and ``[...]`` to ``[...]``."""
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def sample_and_score(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens of requests that use no filter, and say how probable they were.

    Args:
        logits: ``[R, V]``, any float type; ``-inf`` marks a forbidden token.
        temperature: ``[G]`` > 0, each of D / G draws one after another.
        uniforms: ``[D]`` float64 in [0, 1).
        rows: ``[D]`` int64, the row of logits that each draw uses; None is one draw a row, D = R.

    Returns:
        Tokens ``[D]`` int64 and their log-probabilities ``[D]`` float32: token 0 and NaN where a
        logit is NaN or ``inf``, or all are forbidden.
    """
    used = logits if rows is None else logits[rows]
    log_p = tempered(used, of_each_draw(temperature, len(used)))
    tokens = sample(log_p, uniforms)
    return tokens, token_log_probs(log_p, tokens)


def score_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities ``[D]`` float32 of given tokens ``[D]``; else as `sample_and_score`."""
    used = logits if rows is None else logits[rows]
    return token_log_probs(tempered(used, of_each_draw(temperature, len(used))), tokens)


def of_each_draw(of_groups: torch.Tensor, num_draws: int) -> torch.Tensor:
    """Give each of D draws what its group has: ``[G]`` to ``[D]``, D / G draws a group."""
    return of_groups.unsqueeze(1).expand(-1, num_draws // len(of_groups)).flatten()


def tempered(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Normalised log-probabilities ``[..., V]`` float32 at a temperature ``[...]``, unfiltered."""
    return torch.log_softmax(logits.float() / temperature.float().unsqueeze(-1), dim=-1)


def _kept_tokens(probs: torch.Tensor, rules: SamplingRules) -> torch.Tensor:
    """Mask ``[..., V]`` of the tokens that top-k, top-p and min-p leave."""
    # Stable: among equal logits the lowest id ranks first, as argmax chooses.
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    mass_before = ordered.double().cumsum(-1) - ordered
    top_p = rules.top_p.double().unsqueeze(-1)
    in_top_k = rank < rules.top_k.unsqueeze(-1)
    in_top_p = (mass_before <= top_p) | (top_p >= 1.0)
    above_min_p = ordered >= ordered[..., :1] * rules.min_p.unsqueeze(-1)
    keep = in_top_k & in_top_p & above_min_p
    return torch.zeros_like(keep).scatter(-1, ids, keep)
