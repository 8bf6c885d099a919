"""Break verification, SGLang's own on a CPU or that of SMC, as a plugin of servers under audit.

Its folder on PYTHONPATH makes SGLang load it, and `AUDIT_FAULT` names the fault: those that
speculative decoding has been shipped with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from functools import partial, wraps
from importlib import import_module
from typing import Any

import msgspec
import torch

if __package__:
    from . import kv_faults
else:  # as servers load it
    import kv_faults

#: As tests import it, and as servers load it.
HOOKS = ("baselines." if __package__ else "") + "cpu_speculation.hooks"
Tokens = Callable[..., torch.Tensor]
_probs: list[torch.Tensor] = []  # of the last round's nodes


def greedy(sample: Tokens, original: Any, **how: Any) -> torch.Tensor:
    """Verify against the likeliest token, whatever the temperature."""
    logits = how["next_token_logits"]
    return logits.argmax(-1).view(how["batch_size"], how["verify_width"])


def temperature(sample: Tokens, original: Any, **how: Any) -> torch.Tensor:
    """Sample the target's tokens at temperature 1."""
    info = copy(how["sampling_info"])
    info.temperatures = torch.ones_like(info.temperatures)
    return sample(original, **{**how, "sampling_info": info})


def filters(sample: Tokens, original: Any, **how: Any) -> torch.Tensor:
    """Sample the target's tokens without top-k, top-p and min-p."""
    info = copy(how["sampling_info"])
    info.need_top_k_sampling = info.need_top_p_sampling = info.need_min_p_sampling = False
    return sample(original, **{**how, "sampling_info": info})


def bonus(sample: Tokens, original: Any, **how: Any) -> torch.Tensor:
    """Take the likeliest token behind a whole draft."""
    tokens = sample(original, **how)
    tokens[:, -1] = greedy(sample, original, **how)[:, -1]
    return tokens


def likely(sample: Tokens, original: Any, **how: Any) -> torch.Tensor:
    """Accept each drafted token of probability 0.3 or more; it needs the tokens, see `accept`."""
    _probs[:] = [torch.softmax(how["next_token_logits"], -1)]
    return sample(original, **how)


def accept(verify: Callable[..., Any], original: Any, *tensors: Any, **how: Any) -> Any:
    """Let the target's tokens be the drafted ones where these are likely; of chains."""
    if not _probs:  # a batch of temperature 0
        return verify(original, *tensors, **how)
    candidates = how["candidates"]
    predicted = how["target_predict"]
    drafted = candidates[:, 1:].long()
    probs = _probs.pop().view(*candidates.shape, -1)[:, :-1]
    is_likely = probs.gather(2, drafted.unsqueeze(2)).squeeze(2) >= 0.3
    predicted[:, :-1] = torch.where(is_likely, drafted, predicted[:, :-1].long())
    return verify(original, *tensors, **how)


# --- SMC's own


def ratio(verified: Any, scored: Any, *shape: Any) -> Any:
    """Compare p with q at temperature 1."""
    drafts = scored.drafts
    q = [x._replace(temperature=torch.ones_like(x.temperature), sums=None) for x in drafts.q]
    return verified(scored._replace(drafts=drafts._replace(q=q)), *shape)


def residual(verified: Any, *given: Any) -> Any:
    """Sample from p behind a rejected token."""
    found = verified(*given)
    return found._replace(rejects=torch.zeros_like(found.rejects))


def argmax(law: Any) -> None:
    """Draft likeliest tokens, and take them for samples of q."""
    sample = law.sample
    draw = law.draw

    def likeliest(self: Any, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.log_probs().argmax(-1).view(uniforms.shape)
        return tokens, self.score(tokens)

    def drawn(self: Any, uniforms: torch.Tensor) -> torch.Tensor:
        law.sample = sample
        tokens = draw(self, uniforms)
        law.sample = likeliest
        return tokens

    law.sample = likeliest
    law.draw = drawn


STOCK = {each.__name__: each for each in (greedy, temperature, filters, bonus, likely)}
KV = (*kv_faults.NAMES, "swapped", "sibling")
OWN = {each.__name__: each for each in (ratio, residual, argmax)}


def register() -> None:
    """Install the fault that is named, if one is."""
    name = os.environ.get("AUDIT_FAULT")
    if name in STOCK:
        _break_stock(name)
    elif name in KV:
        kv_faults.install(name)
    elif name == "argmax":
        from sglang_smc.smc.distribution import TokenDistribution

        argmax(TokenDistribution)
    elif name:
        from sglang_smc.smc import deciding

        deciding._verified = partial(OWN[name], deciding._verified)


def _break_stock(name: str) -> None:
    speculation = import_module(HOOKS)
    broken = {"sample_target": STOCK[name], "verify_trees": accept}
    for index, patch in enumerate(speculation.PATCHES):
        own = patch.function
        if fault := broken.get(own.__name__):
            # SGLang asks for a function's name.
            faulty = wraps(own)(partial(fault, own))
            speculation.PATCHES[index] = msgspec.structs.replace(patch, function=faulty)
