"""Exact laws of short outputs, by enumeration, to hold samples against, and of filters."""

from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from sglang_smc_tools.testing.statistics import goodness_of_fit

ALL = 1 << 30  # SGLang's top_k for "no top-k"
Sequence = tuple[int, ...]
Law = dict[Sequence, float]
NextProbs = Callable[[Sequence], torch.Tensor]  # output so far -> [V]


def next_probs(path: str, prompt: list[int], **asked: Any) -> NextProbs:
    """Next-token distribution of a checkpoint under `rules`, remembered per prefix."""
    from transformers import AutoModelForCausalLM

    # Torch's own attention would leave a cap on scores out.
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    memory: dict[Sequence, torch.Tensor] = {}

    @torch.no_grad()
    def probs(output: Sequence) -> torch.Tensor:
        if output not in memory:
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
            memory[output] = sorted_law(logits, rules(**asked))[0].exp()
        return memory[output]

    return probs


def enumerate_law(max_new_tokens: int, eos: int, choose: Callable[[int], NextProbs]) -> Law:
    """Probability of every output; ``choose(position)`` names the model that draws there."""
    law: Law = {}
    frontier: Law = {(): 1.0}
    while frontier:
        longer: Law = {}
        for output, mass in frontier.items():
            probs = choose(len(output))(output)
            for token in probs.nonzero().flatten().tolist():
                extended = (*output, token)
                ended = token == eos or len(extended) == max_new_tokens
                (law if ended else longer)[extended] = mass * float(probs[token])
        frontier = longer
    return law


def p_value(samples: Iterable[Sequence], law: Law) -> float:
    """Chi-square p-value of samples under a law; rare outputs share one cell."""
    counts = Counter(samples)
    impossible = set(counts) - set(law)
    assert not impossible, f"outputs of probability zero: {sorted(impossible)[:5]}"
    return goodness_of_fit(counts.elements(), law).p_value


# --- The law that filters leave, by sorting: what `keep_tokens` finds without a sort


class SamplingRules(NamedTuple):
    """Sampling parameters of each request, ``[G]``."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    greedy: torch.Tensor


def rules(
    temperature: float = 1.0, top_k: int = ALL, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRules:
    """Those of one request."""
    asked = (torch.tensor([x]) for x in (temperature, top_k, top_p, min_p, top_k == 1))
    return SamplingRules(*asked)


PLAIN = {"temperatures": 1.0, "top_ks": ALL, "top_ps": 1.0, "min_ps": 0.0}


def sampling(size: int, **limits: Any) -> Any:
    """Return SGLang's sampling parameters of ``size`` requests that sample alike."""
    given = PLAIN | limits
    info: dict[str, Any] = {name: torch.full((size,), value) for name, value in given.items()}
    info["temperatures"] = info["temperatures"].view(-1, 1)
    for name in ("top_k", "top_p", "min_p"):
        info[f"need_{name}_sampling"] = f"{name}s" in limits
    return SimpleNamespace(**info)


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
