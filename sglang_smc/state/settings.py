"""Hold each request's options in device tables.

One row of each table belongs to one request, under its index in SGLang's `req_to_token_pool`.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import Tensor

from sglang_smc.kv.transfer import on_device
from sglang_smc.options.request import RequestConfig
from sglang_smc.smc.settings import DTYPES, BatchSettings
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


def _last_position(of: Start) -> int:
    assert of.params.max_new_tokens is not None, (
        "SGLang's scheduler bounds it as a request comes in"
    )
    return of.params.max_new_tokens - 1


def _own_temperature(of: Start) -> float:
    return of.config.draft_temperature or of.params.temperature / of.config.drafted_power


def _least_temperature(of: Start) -> float:
    is_free = of.config.is_exact and of.config.draft_temperature is None
    return of.least_temperature if is_free else 0.0


def _draft_temperature(of: Start) -> float:
    return max(_own_temperature(of), _least_temperature(of) * (1 - 1 / of.config.num_particles))


_OF_PARAMS = "temperature", "top_k", "top_p", "min_p", "min_new_tokens"
# The value of each setting for a request that starts: that of its options, unless listed here.
_VALUES: dict[str, Callable[[Start], Any]] = {
    **{name: attrgetter(f"config.{name}") for name in DTYPES},
    **{name: attrgetter(f"params.{name}") for name in _OF_PARAMS},
    "seeds": lambda of: of.seed,
    "last_position": _last_position,
    "greedy": lambda of: of.params.top_k == 1,
    "may_stop": lambda of: not of.params.ignore_eos,
    "scheme": lambda of: SCHEMES.index(of.config.resampling_method),
    "resample_each_token": lambda of: of.config.resample_at == "token",
    "heaviest": lambda of: of.config.selection == "argmax",
    "measured": lambda of: of.config.is_normalized and of.params.top_k != 1,
    "evidence_threshold": lambda of: of.config.effective_evidence_threshold,
    "draft_temperature": _draft_temperature,
    "own_temperature": _own_temperature,
    "least_temperature": _least_temperature,
}
# Settings of one type are rows of one table, so that a round reads each table once.
_COLUMNS: dict[torch.dtype, list[str]] = {}
for _name, _dtype in DTYPES.items():
    _COLUMNS.setdefault(_dtype, []).append(_name)


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

    def gather(self, rows: Tensor) -> BatchSettings:
        """Return the settings of the requests in ``rows`` ``[G]``."""
        found: dict[str, Tensor] = {}
        size = len(rows)
        for dtype, names in _COLUMNS.items():
            # Each begins at a multiple of 16 bytes: for others kernels are compiled once more.
            room = torch.empty(len(names), -(-size // 16) * 16, dtype=dtype, device=rows.device)
            values = room[:, :size]  # [len(names), G]
            torch.index_select(self._tables[dtype], 1, rows, out=values)
            found |= zip(names, values.unbind(), strict=True)
        return BatchSettings(**found, rows=rows, stop_table=self._stop_mask)

    def write(self, starts: list[Start]) -> None:
        rows = on_device(self._device, [start.row for start in starts])
        for dtype, columns in _COLUMNS.items():
            values = [[_VALUES[name](start) for start in starts] for name in columns]
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
