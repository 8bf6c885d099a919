"""The law that filters leave, by sorting: what `keep_tokens` finds without a sort."""

import torch

from sglang_smc.smc.distribution import SamplingRules

ALL = 1 << 30  # SGLang's top_k for "no top-k"


def rules(
    temperature: float = 1.0, top_k: int = ALL, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRules:
    """Those of one request."""
    asked = (torch.tensor([x]) for x in (temperature, top_k, top_p, min_p, top_k == 1))
    return SamplingRules(*asked)


def sorted_law(logits: torch.Tensor, asked: SamplingRules) -> torch.Tensor:
    """Log-probabilities ``[..., V]`` float32 under rules that broadcast to ``[...]``."""
    log_p = torch.log_softmax(logits.float() / asked.temperature.float().unsqueeze(-1), dim=-1)
    kept = log_p.masked_fill(~_kept_tokens(log_p.exp(), asked), -torch.inf)
    return kept - torch.logsumexp(kept, dim=-1, keepdim=True)


def _kept_tokens(probs: torch.Tensor, asked: SamplingRules) -> torch.Tensor:
    """Mask ``[..., V]`` of the tokens that top-k, top-p and min-p leave."""
    # Stable: among equal logits the lowest id ranks first, as argmax chooses.
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1])
    mass_before = ordered.double().cumsum(-1) - ordered
    top_p = asked.top_p.double().unsqueeze(-1)
    in_top_k = rank < asked.top_k.unsqueeze(-1)
    in_top_p = (mass_before <= top_p) | (top_p >= 1.0)
    above_min_p = ordered >= ordered[..., :1] * asked.min_p.unsqueeze(-1)
    keep = in_top_k & in_top_p & above_min_p
    return torch.zeros_like(keep).scatter(-1, ids, keep)
