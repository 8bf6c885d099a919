"""Exact laws of short outputs on tiny models, by enumeration, to hold samples against."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

Sequence = tuple[int, ...]
Law = dict[Sequence, float]
NextProbs = Callable[[Sequence], torch.Tensor]  # output so far -> [V] float64


def next_probs(
    path: str, prompt: list[int], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> NextProbs:
    """Next-token distribution of a checkpoint, in float64, remembered per prefix."""
    # Torch's own attention would leave a cap on scores out.
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    memory: dict[Sequence, torch.Tensor] = {}

    @torch.no_grad()
    def probs(output: Sequence) -> torch.Tensor:
        if output not in memory:
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
            memory[output] = filtered(torch.softmax(logits / temperature, -1), top_k, top_p)
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


def p_value(samples: Iterable[Sequence], law: Law, smallest_expected: float = 8.0) -> float:
    """Chi-square p-value of samples under a law; rare outputs share one cell."""
    counts = Counter(samples)
    impossible = set(counts) - set(law)
    assert not impossible, f"outputs of probability zero: {sorted(impossible)[:5]}"
    size = counts.total()
    common = [output for output, mass in law.items() if mass * size >= smallest_expected]
    observed = [counts[output] for output in common]
    expected = [law[output] * size for output in common]
    observed.append(size - sum(observed))
    expected.append(size - sum(expected))
    if expected[-1] < smallest_expected:  # too thin to stand alone: join the smallest cell
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    return float(chisquare(observed, expected).pvalue)


def filtered(probs: torch.Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> torch.Tensor:
    """Filter a law by all of them on the same probabilities, as SGLang's sampler does."""
    ordered, ids = probs.sort(descending=True, stable=True)
    keep = (ordered.cumsum(0) - ordered <= top_p) & (ordered >= min_p * ordered[0])
    if top_k:
        keep[top_k:] = False
    kept = torch.zeros_like(probs).index_put((ids,), ordered * keep)
    return kept / kept.sum()
