"""Hold each request's options in device tables.

Temperature, top-k, top-p and min-p apply to p and q alike. One row of each table belongs to one
request, under its index in SGLang's `req_to_token_pool`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from sglang_smc.kv.transfer import on_device
from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.weighing import SCHEMES


class Start(NamedTuple):
    """Inputs of the device for starting a request, or starting it again."""

    row: int
    seed: int
    params: SamplingParams
    config: RequestConfig
    stop_tokens: frozenset[int]
    num_emitted: int = 0
    counters: Sequence[float] = ()
    least_temperature: float = 0.0  # of `proposers.base.DraftProposer`


class Column(NamedTuple):
    """The type of a setting in the tables, and its value for a request that starts."""

    dtype: torch.dtype
    value: Callable[[Start], Any]


def _last_position(of: Start) -> int:
    assert of.params.max_new_tokens is not None, (
        "SGLang's scheduler bounds it as a request comes in"
    )
    return of.params.max_new_tokens - 1


def _scheme(of: Start) -> int:
    return SCHEMES.index(of.config.resampling_method)


def _own_temperature(of: Start) -> float:
    return of.config.draft_temperature or of.params.temperature / of.config.drafted_power


def _least_temperature(of: Start) -> float:
    is_free = of.config.is_exact and of.config.draft_temperature is None
    return of.least_temperature if is_free else 0.0


def _draft_temperature(of: Start) -> float:
    return max(_own_temperature(of), _least_temperature(of) * (1 - 1 / of.config.num_particles))


class Settings(NamedTuple):
    """Settings of the G requests in a batch, each ``[G]`` but the last."""

    seeds: Annotated[Tensor, Column(torch.int64, lambda of: of.seed)]
    temperature: Annotated[Tensor, Column(torch.float32, lambda of: of.params.temperature)]
    top_k: Annotated[Tensor, Column(torch.int64, lambda of: of.params.top_k)]
    top_p: Annotated[Tensor, Column(torch.float32, lambda of: of.params.top_p)]
    min_p: Annotated[Tensor, Column(torch.float32, lambda of: of.params.min_p)]
    last_position: Annotated[Tensor, Column(torch.int64, _last_position)]  # of the output
    min_new_tokens: Annotated[Tensor, Column(torch.int64, lambda of: of.params.min_new_tokens)]
    greedy: Annotated[Tensor, Column(torch.bool, lambda of: of.params.top_k == 1)]
    # Stop tokens end the sequence, besides the length.
    may_stop: Annotated[Tensor, Column(torch.bool, lambda of: not of.params.ignore_eos)]
    num_particles: Annotated[Tensor, Column(torch.int64, lambda of: of.config.num_particles)]
    num_steps: Annotated[Tensor, Column(torch.int64, lambda of: of.config.num_steps)]
    # Rounds weigh and resample, else they verify; those that extend weigh verified chains.
    weighs: Annotated[Tensor, Column(torch.bool, lambda of: of.config.weighs)]
    extends: Annotated[Tensor, Column(torch.bool, lambda of: of.config.extends)]
    chains: Annotated[Tensor, Column(torch.int64, lambda of: of.config.num_chains)]  # a particle's
    ess_threshold: Annotated[Tensor, Column(torch.float64, lambda of: of.config.ess_threshold)]
    scheme: Annotated[Tensor, Column(torch.int64, _scheme)]  # index of the resampling method
    resample_each_token: Annotated[
        Tensor, Column(torch.bool, lambda of: of.config.resample_at == "token")
    ]
    heaviest: Annotated[Tensor, Column(torch.bool, lambda of: of.config.selection == "argmax")]
    lag: Annotated[Tensor, Column(torch.int64, lambda of: of.config.lag)]
    power: Annotated[Tensor, Column(torch.float64, lambda of: of.config.power)]
    measured: Annotated[  # fidelity is, where p is normalised and not greedy
        Tensor, Column(torch.bool, lambda of: of.config.is_normalized and of.params.top_k != 1)
    ]
    evidence_threshold: Annotated[  # infinite in mode exact
        Tensor, Column(torch.float64, lambda of: of.config.effective_evidence_threshold)
    ]
    draft_temperature: Annotated[Tensor, Column(torch.float32, _draft_temperature)]
    # Of a single chain; and of many chains of one multi-draft, at least.
    own_temperature: Annotated[Tensor, Column(torch.float32, _own_temperature)]
    least_temperature: Annotated[Tensor, Column(torch.float32, _least_temperature)]
    rows: Tensor  # int64, in the tables
    stop_table: Tensor  # [R, V] bool: stop tokens of all requests

    @property
    def stop_mask(self) -> Tensor:
        """Return the stop tokens, ``[G, V]`` bool; to test a few tokens, index `stop_table`."""
        return self.stop_table[self.rows]

    def bounded(self, num_particles: Tensor, num_steps: Tensor, is_exact: Tensor) -> "Settings":
        """Return the settings with N and K of `options.request.apply_budget`, each ``[G]`` int64.

        Args:
            is_exact: nonzero where a single particle is left, which is verified.
        """
        alone, least = is_exact > 0, self.least_temperature
        return self._replace(
            draft_temperature=self.own_temperature.maximum(least - least / num_particles),
            num_particles=num_particles,
            num_steps=num_steps,
            weighs=self.weighs & ~alone,
            extends=self.extends & ~alone,
            evidence_threshold=self.evidence_threshold.masked_fill(
                alone & ~(self.greedy & (num_particles > 1)), torch.inf
            ),
        )

    def without_steps(self, where: Tensor) -> "Settings":
        """Return the settings with K = 0 and no resampling in the groups ``where`` ``[G]`` bool.

        They have drafted nothing, since they only wait for values of potentials.
        """
        return self._replace(
            num_steps=self.num_steps.masked_fill(where, 0),
            ess_threshold=self.ess_threshold.masked_fill(where, 0.0),
        )

    @property
    def branches(self) -> Tensor:
        """Return the groups whose chains are a tree, where they draft any, ``[G]`` bool."""
        return self.greedy & (self.num_particles > 1)

    def of_chain(self, num_particles: int) -> Tensor:
        """Return each chain's number among those of its particle, ``[G, N]`` int64."""
        return torch.arange(num_particles, device=self.rows.device) % self.chains.unsqueeze(1)

    def of_same_chain(self, pairs: Tensor) -> Tensor:
        """Return those of the pairs ``[G, N, N]`` bool that are chains of one number."""
        own = self.of_chain(pairs.shape[1])
        return pairs & (own.unsqueeze(1) == own.unsqueeze(2))

    def of_first_chains(self, values: Tensor) -> Tensor:
        """Give all chains of a particle the value of its first: ``[G, N]`` to ``[G, N]``."""
        place = torch.arange(values.shape[1], device=values.device)
        return values.gather(1, place - self.of_chain(len(place)))

    @property
    def filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return top-k, top-p and min-p, ``[G]`` each."""
        return self.top_k, self.top_p, self.min_p

    def ends(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return whether the sequence ends with each token, ``[G, N, C]`` bool.

        Args:
            tokens: ``[G, N, C]``.
            positions: ``[G, N, C]`` each token's index in the output.
        """
        stops = self.stop_table[self.rows.view(-1, 1, 1), tokens] & self.may_stop.view(-1, 1, 1)
        return stops | (positions >= self.last_position.view(-1, 1, 1))


# Settings of one type are rows of one table, so that a round reads each table once.
_COLUMNS: dict[torch.dtype, dict[str, Callable[[Start], Any]]] = {}
for _name, _hint in get_type_hints(Settings, include_extras=True).items():
    for _column in get_args(_hint)[1:]:
        _COLUMNS.setdefault(_column.dtype, {})[_name] = _column.value


class RequestTable:
    """Table of the settings of all requests that hold a row of SGLang's request pool."""

    def __init__(self, num_rows: int, vocab_size: int, device: str) -> None:
        self._device = device
        self.vocab_size = vocab_size
        self._tables = {
            dtype: torch.zeros(len(names), num_rows, dtype=dtype, device=device)
            for dtype, names in _COLUMNS.items()
        }
        self._stop_mask = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)

    def gather(self, rows: Tensor) -> Settings:
        """Return the settings of the requests in ``rows`` ``[G]``."""
        found: dict[str, Tensor] = {}
        for dtype, names in _COLUMNS.items():
            values = self._tables[dtype].index_select(1, rows)  # [len(names), G]
            found |= zip(names, values.unbind(), strict=True)
        return Settings(**found, rows=rows, stop_table=self._stop_mask)

    def write(self, starts: list[Start]) -> None:
        rows = on_device(self._device, [start.row for start in starts])
        for dtype, columns in _COLUMNS.items():
            values = [[value(start) for start in starts] for value in columns.values()]
            self._tables[dtype][:, rows] = on_device(self._device, values, dtype)
        self._stop_mask.index_fill_(0, rows, False)
        pairs = [(start.row, token) for start in starts for token in sorted(start.stop_tokens)]
        if pairs:
            stop_rows, tokens = on_device(self._device, pairs).unbind(1)
            self._stop_mask[stop_rows, tokens] = tokens >= 0


def stop_tokens(
    request_tokens: Iterable[int] | None,
    model_tokens: Iterable[int] | None,
    tokenizer: Any | None,
    vocab_size: int,
) -> frozenset[int]:
    """Return every token that SGLang treats as an end: of request, model and tokenizer."""
    found = set(request_tokens or ()) | set(model_tokens or ())
    if tokenizer is not None:
        found |= {tokenizer.eos_token_id} | set(tokenizer.additional_stop_token_ids or ())
    return frozenset(token for token in found if token is not None and 0 <= token < vocab_size)


def is_greedy(req: Req) -> bool:
    return req.sampling_params.top_k == 1


def uses_filters(req: Req) -> bool:
    """Return whether a request uses top-k, top-p or min-p, and is not greedy."""
    params = req.sampling_params
    assert req.vocab_size is not None, "SGLang's scheduler sets it on each request"
    cuts = params.top_k < req.vocab_size or params.top_p < 1.0 or params.min_p > 0.0
    return cuts and not is_greedy(req)
