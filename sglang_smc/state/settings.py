"""Hold each request's options in device tables.

Temperature, top-k, top-p and min-p apply to p and q alike. One row of each table belongs to one
request, under its index in SGLang's `req_to_token_pool`.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_smc.kv.transfer import on_device
from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.weighing import SCHEMES

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams


class TableEntry(NamedTuple):
    """Source of one row of the tables; it references the request's options, without a copy."""

    row: int
    seed: int
    params: "SamplingParams"
    config: RequestConfig
    stop_tokens: frozenset[int]


class Settings(NamedTuple):
    """Settings of the G requests in a batch."""

    seeds: torch.Tensor  # [G] int64
    temperature: torch.Tensor  # [G] float32
    top_k: torch.Tensor  # [G] int64
    top_p: torch.Tensor  # [G] float32
    min_p: torch.Tensor  # [G] float32
    last_position: torch.Tensor  # [G] int64 of an output token
    min_new_tokens: torch.Tensor  # [G] int64
    greedy: torch.Tensor  # [G] bool: top_k is 1
    may_stop: torch.Tensor  # [G] bool: stop tokens end the sequence, besides the length
    num_particles: torch.Tensor  # [G] int64 N
    num_steps: torch.Tensor  # [G] int64 K
    weighs: torch.Tensor  # [G] bool: its rounds weigh and resample; else they verify drafts
    extends: torch.Tensor  # [G] bool: they verify each particle's own chain, and resample
    ess_threshold: torch.Tensor  # [G] float64 tau
    scheme: torch.Tensor  # [G] int64 index of the resampling method in SCHEMES
    resample_each_token: torch.Tensor  # [G] bool: resample at the first column with a low ESS
    heaviest: torch.Tensor  # [G] bool: answer with the heaviest particle
    lag: torch.Tensor  # [G] int64: bound on tails before a round
    power: torch.Tensor  # [G] float64 alpha
    measured: torch.Tensor  # [G] bool: fidelity is, where p is normalised and not greedy
    evidence_threshold: torch.Tensor  # [G] float64 c; infinite in mode exact
    draft_temperature: torch.Tensor  # [G] float32
    rows: torch.Tensor  # [G] int64 in the tables
    stop_table: torch.Tensor  # [R, V] bool: stop tokens of all requests

    @property
    def stop_mask(self) -> torch.Tensor:
        """Return the stop tokens, ``[G, V]`` bool; to test a few tokens, index `stop_table`."""
        return self.stop_table[self.rows]

    def bounded(
        self, num_particles: torch.Tensor, num_steps: torch.Tensor, is_exact: torch.Tensor
    ) -> "Settings":
        """Return the settings with N and K of `options.request.apply_budget`, each ``[G]`` int64.

        Args:
            is_exact: nonzero where a single particle is left, which is verified.
        """
        alone = is_exact > 0
        return self._replace(
            num_particles=num_particles,
            num_steps=num_steps,
            weighs=self.weighs & ~alone,
            extends=self.extends & ~alone,
            evidence_threshold=self.evidence_threshold.masked_fill(alone, torch.inf),
        )

    @property
    def filters(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return top-k, top-p and min-p, ``[G]`` each."""
        return self.top_k, self.top_p, self.min_p

    def ends(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return whether the sequence ends with each token, ``[G, N, C]`` bool.

        Args:
            tokens: ``[G, N, C]``.
            positions: ``[G, N, C]`` each token's index in the output.
        """
        stops = self.stop_table[self.rows.view(-1, 1, 1), tokens] & self.may_stop.view(-1, 1, 1)
        return stops | (positions >= self.last_position.view(-1, 1, 1))


# Settings of one type are rows of one table, so that a round reads each table once.
_COLUMNS = {
    torch.int64: (
        "seeds",
        "top_k",
        "last_position",
        "min_new_tokens",
        "num_particles",
        "num_steps",
        "scheme",
        "lag",
    ),
    torch.float32: ("temperature", "top_p", "min_p", "draft_temperature"),
    torch.float64: ("ess_threshold", "power", "evidence_threshold"),
    torch.bool: (
        "greedy",
        "may_stop",
        "weighs",
        "extends",
        "resample_each_token",
        "heaviest",
        "measured",
    ),
}


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

    def gather(self, rows: torch.Tensor) -> Settings:
        """Return the settings of the requests in ``rows`` ``[G]``."""
        found: dict[str, torch.Tensor] = {}
        for dtype, names in _COLUMNS.items():
            values = self._tables[dtype].index_select(1, rows)  # [len(names), G]
            found |= zip(names, values.unbind(), strict=True)
        return Settings(**found, rows=rows, stop_table=self._stop_mask)

    def write(self, entries: list[TableEntry]) -> None:
        """Store the settings of new requests."""
        rows = on_device(self._device, [entry.row for entry in entries])
        values = [_values(entry) for entry in entries]
        for dtype, names in _COLUMNS.items():
            columns = [[value[name] for value in values] for name in names]
            self._tables[dtype][:, rows] = on_device(self._device, columns, dtype)
        self._stop_mask[rows] = False
        pairs = [(entry.row, token) for entry in entries for token in sorted(entry.stop_tokens)]
        if pairs:
            stop_rows, tokens = on_device(self._device, pairs).unbind(1)
            self._stop_mask[stop_rows, tokens] = True


def _values(entry: TableEntry) -> dict[str, Any]:
    """Return one request's value for each column except the stop mask."""
    params, config = entry.params, entry.config
    assert params.max_new_tokens is not None, "SGLang's scheduler bounds it as a request comes in"
    return {
        "seeds": entry.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "greedy": params.top_k == 1,
        "last_position": params.max_new_tokens - 1,
        "min_new_tokens": params.min_new_tokens,
        "may_stop": not params.ignore_eos,
        "num_particles": config.num_particles,
        "num_steps": config.num_steps,
        "weighs": config.weighs,
        "extends": config.extends,
        "ess_threshold": config.ess_threshold,
        "scheme": list(SCHEMES).index(config.resampling_method),
        "resample_each_token": config.resample_at == "token",
        "heaviest": config.selection == "argmax",
        "lag": config.lag,
        "power": config.power,
        "measured": config.is_normalized and params.top_k != 1,
        "evidence_threshold": config.effective_evidence_threshold,
        "draft_temperature": config.draft_temperature or params.temperature / config.drafted_power,
    }


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


def is_greedy(req: "Req") -> bool:
    """Return whether a request takes the likeliest token."""
    return req.sampling_params.top_k == 1


def uses_filters(req: "Req") -> bool:
    """Return whether a request uses top-k, top-p or min-p, and is not greedy."""
    params = req.sampling_params
    assert req.vocab_size is not None, "SGLang's scheduler sets it on each request"
    cuts = params.top_k < req.vocab_size or params.top_p < 1.0 or params.min_p > 0.0
    return cuts and not is_greedy(req)
