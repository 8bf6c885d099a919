"""Entries of the request table, by keyword, and parameters of a request that asks for nothing."""

from types import SimpleNamespace
from typing import Any

from sglang_smc.options.request import RequestConfig
from sglang_smc.state.settings import Start

NEUTRAL: dict[str, Any] = {
    "custom_params": None,
    "temperature": 1.0,
    "top_k": 1 << 30,
    "top_p": 1.0,
    "min_p": 0.0,
    "max_new_tokens": 8,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "stop_strs": [],
    "stop_regex_strs": [],
}


def entry(
    row: int,
    config: RequestConfig | None = None,
    *,
    seed: int | None = None,
    stop_tokens: frozenset[int] = frozenset(),
    **params: Any,
) -> Start:
    """A request that asks for nothing but what is given."""
    asked: Any = SimpleNamespace(**{**NEUTRAL, **params})
    own = 100 + row if seed is None else seed
    return Start(row, own, asked, config or RequestConfig(), stop_tokens)
