"""What each request asked for, as device tables, and the distributions that follow.

The same rules shape p and q: temperature, top-k, top-p, min-p, and no end of text
before `min_new_tokens`. One row of each table belongs to one request, under its
index in SGLang's `req_to_token_pool`.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.distribution import SamplingRules, TokenDistribution, likeliest_only, log_probs
from sglang_smc.smc.masking import restrict
from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.rounds import WeightRules

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams


class RequestSpec(NamedTuple):
    """One request's settings on the host, ready to be written to the tables."""

    row: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int
    min_new_tokens: int
    ignore_eos: bool
    stop_tokens: frozenset[int]
    config: RequestConfig


class Settings(NamedTuple):
    """The settings of the G requests in a batch."""

    seeds: torch.Tensor  # [G] int64
    temperature: torch.Tensor  # [G] float32
    top_k: torch.Tensor  # [G] int64
    top_p: torch.Tensor  # [G] float32
    min_p: torch.Tensor  # [G] float32
    max_new_tokens: torch.Tensor  # [G] int64
    min_new_tokens: torch.Tensor  # [G] int64
    ignore_eos: torch.Tensor  # [G] bool
    num_particles: torch.Tensor  # [G] int64 N
    num_steps: torch.Tensor  # [G] int64 K
    weighs: torch.Tensor  # [G] bool: its rounds weigh and resample; else they verify
    ess_threshold: torch.Tensor  # [G] float64 tau
    scheme: torch.Tensor  # [G] int64 index of the resampling method in SCHEMES
    at_token: torch.Tensor  # [G] bool: resample at the first column whose ESS is low
    heaviest: torch.Tensor  # [G] bool: answer with the heaviest particle
    power: torch.Tensor  # [G] float64 alpha
    normalized: torch.Tensor  # [G] bool: its target's next-token probabilities sum to 1
    evidence_threshold: torch.Tensor  # [G] float64 c; infinite where all is verified
    draft_temperature: torch.Tensor  # [G] float32
    stop_mask: torch.Tensor  # [G, V] bool: tokens that end the text

    @property
    def weight_rules(self) -> WeightRules:
        """The settings that steer the weights."""
        return WeightRules(
            self.num_steps, self.ess_threshold, self.at_token, self.evidence_threshold
        )

    def bounded(
        self, num_particles: torch.Tensor, num_steps: torch.Tensor, is_exact: torch.Tensor
    ) -> "Settings":
        """Settings with what `options.budget.apply_budget` leaves of N and K, each ``[G]`` int64.

        Args:
            is_exact: not 0 where one particle is left, which is verified.
        """
        alone = is_exact > 0
        return self._replace(
            num_particles=num_particles,
            num_steps=num_steps,
            weighs=self.weighs & ~alone,
            evidence_threshold=self.evidence_threshold.masked_fill(alone, torch.inf),
        )

    def log_probs(
        self, logits: torch.Tensor, positions: torch.Tensor, *, filtered: bool, draft: bool = False
    ) -> torch.Tensor:
        """The distribution of the next token, by the rules of each request.

        Args:
            logits: ``[G, M, V]``.
            positions: ``[G, M]`` index of the output token that each row decides.
            filtered: whether any request uses top-k, top-p or min-p.
            draft: the logits are the draft's, which may have a temperature of its own.

        Returns:
            ``[G, M, V]`` float32.
        """
        legal = self.without_early_ends(logits, positions)
        temperature = self.draft_temperature if draft else self.temperature
        rules = SamplingRules(
            *(
                rule.unsqueeze(1)  # [G, 1]: one rule for the M rows of a request
                for rule in (temperature, self.top_k, self.top_p, self.min_p)
            )
        )
        return log_probs(legal, rules, filtered=filtered)

    def distribution(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        kinds: "FilterKinds",
        *,
        allowed: torch.Tensor | None = None,
        draft: bool = False,
    ) -> TokenDistribution:
        """What the next tokens of ``G * M`` rows of logits are drawn from.

        Nothing is worked out yet where no rule cuts tokens.

        Args:
            logits: ``[G, M, V]``.
            positions: ``[G, M]`` index of the output token that each row decides.
            kinds: of the batch.
            allowed: ``[G, M, V]`` bool, by the rules of texts. Filters act within it.
            draft: the logits are the draft's, which may have a temperature of its own.
        """
        temperature, log_mass = self.draft_temperature if draft else self.temperature, None
        if allowed is not None:
            logits = self.without_early_ends(logits, positions)
            logits, log_mass = restrict(logits, allowed, temperature.unsqueeze(1))
            log_mass = log_mass.flatten()
        if kinds.filtered or kinds.early:
            log_p = self.log_probs(logits, positions, filtered=kinds.cuts, draft=draft)
            return TokenDistribution.of_log_probs(log_p.flatten(0, 1))._replace(log_mass=log_mass)
        if kinds.greedy:
            logits = likeliest_only(logits, (self.top_k == 1).unsqueeze(1))
        return TokenDistribution(logits.flatten(0, 1), temperature, log_mass=log_mass)

    def without_early_ends(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits that end no text before `min_new_tokens`; shapes as for `distribution`."""
        too_early = (positions < self.min_new_tokens.unsqueeze(1)).unsqueeze(2)
        return logits.masked_fill(too_early & self.stop_mask.unsqueeze(1), -torch.inf)

    def ends(self, tokens: torch.Tensor, output_lengths: torch.Tensor) -> torch.Tensor:
        """Does the text end with this token? ``[G, M]`` bool.

        Args:
            tokens: ``[G, M]``.
            output_lengths: ``[G, M]`` output tokens up to and including this one.
        """
        stops = self.stop_mask.gather(1, tokens) & ~self.ignore_eos.unsqueeze(1)
        return stops | (output_lengths >= self.max_new_tokens.unsqueeze(1))


class FilterKinds(NamedTuple):
    """Which rules for tokens occur in a batch, known to the host."""

    filtered: bool  # some request uses top-k, top-p or min-p, and is not greedy
    greedy: bool  # some request takes the likeliest token, which needs no sort
    early: bool  # some request has tokens that it must not end before

    @classmethod
    def of(cls, reqs: "list[Req]") -> "FilterKinds":
        """The kinds of filters that these requests have."""
        params = [(req.sampling_params, req.vocab_size) for req in reqs]
        return cls(
            filtered=any(_uses_filters(one, vocab_size) for one, vocab_size in params),
            greedy=any(one.top_k == 1 for one, _ in params),
            early=any(one.min_new_tokens > 0 for one, _ in params),
        )

    @property
    def cuts(self) -> bool:
        """Whether some request's rules cut tokens at any position."""
        return self.filtered or self.greedy


# Settings of one type are rows of one table, so that a round reads each table once.
_COLUMNS = {
    torch.int64: (
        "seeds",
        "top_k",
        "max_new_tokens",
        "min_new_tokens",
        "num_particles",
        "num_steps",
        "scheme",
    ),
    torch.float32: ("temperature", "top_p", "min_p", "draft_temperature"),
    torch.float64: ("ess_threshold", "power", "evidence_threshold"),
    torch.bool: ("ignore_eos", "weighs", "at_token", "heaviest", "normalized"),
}


class RequestTable:
    """Settings of all requests that hold a row of SGLang's request pool."""

    def __init__(self, num_rows: int, vocab_size: int, device: str) -> None:
        self._device = device
        self.vocab_size = vocab_size
        self._tables = {
            dtype: torch.zeros(len(names), num_rows, dtype=dtype, device=device)
            for dtype, names in _COLUMNS.items()
        }
        self._stop_mask = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)

    def gather(self, rows: torch.Tensor) -> Settings:
        """The settings of the requests in ``rows`` ``[G]``."""
        found: dict[str, torch.Tensor] = {}
        for dtype, names in _COLUMNS.items():
            values = self._tables[dtype].index_select(1, rows)  # [len(names), G]
            found |= zip(names, values.unbind(), strict=True)
        return Settings(**found, stop_mask=self._stop_mask[rows])

    def write(self, specs: list[RequestSpec]) -> None:
        """Store the settings of new requests."""
        rows = self._column([spec.row for spec in specs])
        values = [_values(spec) for spec in specs]
        for dtype, names in _COLUMNS.items():
            columns = [self._column([value[name] for value in values]).to(dtype) for name in names]
            self._tables[dtype][:, rows] = torch.stack(columns)
        self._stop_mask[rows] = False
        pairs = [(spec.row, token) for spec in specs for token in sorted(spec.stop_tokens)]
        if pairs:
            stop_rows, tokens = self._column(pairs).unbind(1)
            self._stop_mask[stop_rows, tokens] = True

    def _column(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values).to(self._device, non_blocking=True)


def _values(spec: RequestSpec) -> dict[str, Any]:
    """One request's entry in each column but the mask."""
    config = spec.config
    return {
        **spec._asdict(),
        "seeds": spec.seed,
        "num_particles": config.num_particles,
        "num_steps": config.num_steps,
        "weighs": config.weighs,
        "ess_threshold": config.ess_threshold,
        "scheme": list(SCHEMES).index(config.resampling_method),
        "at_token": config.resample_at == "token",
        "heaviest": config.selection == "argmax",
        "power": config.power,
        "normalized": config.is_normalized,
        "evidence_threshold": config.covering,
        "draft_temperature": config.draft_temperature or spec.temperature,
    }


def stop_tokens(
    request_tokens: Iterable[int] | None,
    model_tokens: Iterable[int] | None,
    tokenizer: Any | None,
    vocab_size: int,
) -> frozenset[int]:
    """Every token that SGLang takes for an end: the request's, the model's, the tokenizer's."""
    found = set(request_tokens or ()) | set(model_tokens or ())
    if tokenizer is not None:
        found |= {tokenizer.eos_token_id} | set(tokenizer.additional_stop_token_ids or ())
    return frozenset(token for token in found if token is not None and 0 <= token < vocab_size)


def _uses_filters(params: "SamplingParams", vocab_size: int) -> bool:
    cuts = params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
    return cuts and params.top_k != 1
