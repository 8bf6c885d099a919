"""Compare answers of a server with SMC with those of one without speculation."""

import re
from typing import Any

import pytest

NEAR = 2e-4
#: Lists of meta_info with an entry for each token.
LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
#: Times and names of one answer, what the cache held, and what speculation has beside its answers.
OWN = re.compile(
    "id|response_id|created|created_at|completed_at|.*_ts|.*time|.*latency|.*duration|.*_wait"
    "|.*throughput|spec_.*|cached_tokens.*|prompt_tokens_details|input_tokens_details"
    "|cache_read_input_tokens|completion_tokens_details"
)


def shown(answer: Any) -> Any:
    """An answer without what is its own."""
    if isinstance(answer, dict):
        return {name: shown(of) for name, of in answer.items() if not OWN.fullmatch(name)}
    if isinstance(answer, (list, tuple)):
        return [shown(of) for of in answer]
    return answer


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer of a stream's increments, each with an entry for each of its tokens."""
    whole = {**chunks[-1], "meta_info": dict(chunks[-1]["meta_info"])}
    sizes = [len(chunk["output_ids"]) for chunk in chunks]
    for name in LISTS:
        parts = [chunk["meta_info"][name] for chunk in chunks]
        assert sizes == [0] or [len(part) for part in parts] == sizes, name
        whole["meta_info"][name] = [entry for part in parts for entry in part]
    whole["output_ids"] = [token for chunk in chunks for token in chunk["output_ids"]]
    return {**whole, "text": "".join(chunk["text"] for chunk in chunks)}


def assert_same(own: Any, stock: Any, where: str) -> None:
    """The same fields, and values but for rounding."""
    if isinstance(stock, dict):
        assert isinstance(own, dict) and own.keys() == stock.keys(), where
        for name, value in stock.items():
            assert_same(own[name], value, f"{where}.{name}")
    elif isinstance(stock, list):
        assert isinstance(own, list) and len(own) == len(stock), (where, own, stock)
        for place, value in enumerate(stock):
            assert_same(own[place], value, f"{where}[{place}]")
    elif isinstance(stock, float):
        assert own == pytest.approx(stock, abs=NEAR), where
    else:
        assert own == stock, where
