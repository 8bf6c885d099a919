"""Particles and traces are made of token ids; where there is a tokenizer they are readable, too."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_smc.state.counters import META_PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PARTICLES = META_PREFIX + "particles"
_TRACE = META_PREFIX + "trace"


def add_texts(meta_info: dict[str, Any], tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Put into an answer what its particles read, and what each token of its trace does.

    A particle's text leaves special tokens out, as texts of answers do; a token's own does not.
    """
    if tokenizer is None:
        return
    for particle in meta_info.get(_PARTICLES) or ():
        particle["text"] = tokenizer.decode(particle["output_ids"], skip_special_tokens=True)
    trace = meta_info.get(_TRACE)
    if trace and "pieces" not in trace:  # SGLang looks at what ends a stream twice
        ids = sorted(_tokens_of(trace["rounds"]) | set(trace.get("emitted_after") or ()))
        trace["pieces"] = {str(one): tokenizer.decode([one]) for one in ids}


def _tokens_of(rounds: Iterable[Mapping[str, Any]]) -> set[int]:
    """All tokens that rounds name."""
    found: set[int] = set()
    for one in rounds:
        found.update(one.get("emitted_before") or (), one.get("begins") or ())
        found.update(one["emitted"], *one["drafted"])
        found.update(token for token in one["bonus"] if token is not None)
    return found
