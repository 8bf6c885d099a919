"""Read how sure a draft is: along an answer, and behind a token that the target rejects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

#: Tokens of a chain that are read behind a rejected one.
BEHIND = 12
#: Rejected tokens of an answer behind which chains are read.
MOST_REJECTED = 14
#: A token may be rejected where it is accepted with less than this probability.
CERTAIN = 0.95
#: Decimal digits of a stored entropy.
DIGITS = 3


def load(folder: Path) -> Any:
    """Return the draft model of a folder in bfloat16."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def entropies(
    draft: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    accepted: np.ndarray,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Return the entropies of a draft's next token, in nats.

    Args:
        accepted: ``[L]`` the probability that each token of the answer is accepted if drafted.
        seed: of the places and the rejected chains.

    Returns:
        ``along``: before each token of the answer. ``behind``: by the place of a rejected token,
        those of the `BEHIND` tokens after it.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[*prompt, *answer]])
    read = draft(ids, use_cache=True, logits_to_keep=len(answer) + 1)
    log_q = _log_probs(read.logits[0, :-1], temperature)  # [L, V]
    places = _rejected(accepted, seed)
    found = {"along": _rounded(_entropy(log_q)), "behind": {}}
    if not places:
        return found
    other = log_q[places].exp()  # [R, V]
    other[torch.arange(len(places)), torch.tensor(answer)[places]] = 0.0
    token = torch.multinomial(other, 1, generator=generator)  # [R, 1]
    cache = read.past_key_values
    cache.batch_repeat_interleave(len(places))
    lengths = torch.tensor(places).unsqueeze(1) + len(prompt)  # [R, 1] before the rejected token
    mask = torch.arange(ids.shape[1]) < lengths  # [R, length of the cache]
    seen = torch.ones(len(places), 1, dtype=torch.bool)
    each = []
    for step in range(BEHIND):
        mask = torch.cat([mask, seen], 1)
        where = {"attention_mask": mask.long(), "position_ids": lengths + step}
        logits = draft(token, past_key_values=cache, **where).logits[:, -1]
        log_q = _log_probs(logits, temperature)
        each.append(_entropy(log_q))
        token = torch.multinomial(log_q.exp(), 1, generator=generator)
    behind = torch.stack(each, 1)  # [R, BEHIND]
    found["behind"] = {str(place): _rounded(one) for place, one in zip(places, behind, strict=True)}
    return found


def _rejected(accepted: np.ndarray, seed: int) -> list[int]:
    """Return places where a token may be rejected, the likeliest first to be among them."""
    places = np.flatnonzero(accepted < CERTAIN)
    if len(places) > MOST_REJECTED:
        chance = 1.0 - accepted[places]
        draw = np.random.default_rng(seed)
        places = draw.choice(places, MOST_REJECTED, replace=False, p=chance / chance.sum())
    return sorted(places.tolist())


def _log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.float() / temperature).log_softmax(-1)


def _entropy(log_q: torch.Tensor) -> torch.Tensor:
    return -(log_q.exp() * log_q).sum(-1)


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]
