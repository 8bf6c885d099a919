"""Count draft tokens in the `usage` of SGLang's OpenAI routes, where OpenAI's schema has them."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, create_model

from sglang_smc.state.metrics import META_PREFIX


class Details(BaseModel):
    """OpenAI's `completion_tokens_details`, of which SGLang has the first."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


def details_of(meta_infos: Iterable[Mapping[str, Any]], reasoning_tokens: int) -> Details:
    """Return the counts of a request's answers, by the `meta_info` of each.

    Proposed are the draft tokens of one chain in each round; accepted are those of them that the
    answer has. An answer without a round has none.
    """
    accepted = proposed = 0
    for info in meta_infos:
        accepted += info.get("spec_num_correct_drafts", 0)
        rounds = info.get(META_PREFIX + "rounds_ct", 0)
        proposed += round(rounds * info.get(META_PREFIX + "steps_mean", 0))
    return Details(
        reasoning_tokens=reasoning_tokens,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=proposed - accepted,
    )


def with_details(response: Any, meta_infos: Iterable[Mapping[str, Any]]) -> Any:
    """Return a response of an OpenAI route with these counts in its usage; an error as it is."""
    if not (isinstance(response, BaseModel) and "usage" in vars(response)):
        return response
    usage: Any = vars(response)["usage"]
    details = details_of(meta_infos, usage.reasoning_tokens or 0)
    own_usage = _copy(usage, completion_tokens_details=details)
    return _copy(response, usage=own_usage)


def add_details(body: dict[str, Any], meta_infos: Iterable[Mapping[str, Any]]) -> None:
    """Add these counts to the usage of a stream's chunk."""
    reasoning = body["usage"].get("reasoning_tokens") or 0
    counts = details_of(meta_infos, reasoning).model_dump()
    body["usage"]["completion_tokens_details"] = counts


def _copy(model: BaseModel, **changed: BaseModel) -> BaseModel:
    """Return a copy with another value, of a class that declares it: pydantic dumps no others."""
    (name,) = changed
    kind = _class_with(type(model), name, type(changed[name]))
    names = model.model_fields_set | {name}
    return kind.model_construct(_fields_set=names, **{**vars(model), **changed})


@cache
def _class_with(base: type[BaseModel], name: str, kind: type[BaseModel]) -> type[BaseModel]:
    """Return a class like ``base``, with a field of the type ``kind``."""
    fields: dict[str, Any] = {name: (kind, ...)}
    return create_model(base.__name__, __base__=base, **fields)
