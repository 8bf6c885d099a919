"""Compute tokens per pass of SGLang's single-chain rules from the target's own answers.

Both rules keep the target's distribution, so its own answers x serve. A token of a text equals the
drafted one with probability k: for a sample of q, min(1, q(x) / p(x)); for the likeliest token, 1
if x is that token and 0 otherwise (SGLang accepts it with p(x), and else samples another). A round
that starts behind one token of a text ends with the first token that was not kept, or with the
bonus token behind the K-th. So the mean number of rounds follows from these probabilities alone,
and no round is run. The start of a round matters for heads: q reads the target's states up
to there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from answers import prompt_ids
from drafts.grid import LIKELIEST, NUM_STEPS, SAMPLED, Proposal
from fidelity.measure import Record
from study import PAIR, bar

if TYPE_CHECKING:
    import torch

#: By rule: the mean number of rounds of each answer.
Rounds = dict[str, np.ndarray]
#: Counts the rounds that a proposal takes for answers at a temperature; {} if q is unknown.
Counter = Callable[[Proposal, Sequence[Record], float], Rounds]
#: Returns the logits of q ``[A, K, V]`` behind A anchors of a text.
Law = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def expected_rounds(keep: np.ndarray) -> float:
    """Return the mean number of rounds of an answer behind its first token.

    Args:
        keep: ``[A, K]`` for a round behind each token but the last: the probability that each
            draft is kept, given that those before are. Entries beyond the text are ignored.
    """
    left, steps = keep.shape
    ahead = np.zeros(left + 1)  # expected rounds from each token on
    for anchor in reversed(range(left)):
        most = min(steps, left - anchor)
        reached = np.concatenate([[1.0], np.cumprod(keep[anchor, :most]), [0.0]])
        ends = np.minimum(anchor + 1 + np.arange(most + 1), left)
        ahead[anchor] = 1 + (-np.diff(reached) * ahead[ends]).sum()
    return float(ahead[0])


def count(proposal: Proposal, answers: Sequence[Record], temperature: float) -> Rounds:
    """Return the mean rounds of each answer by rule, computed with the plain models."""
    if proposal.kind == "ngram":
        return {}
    found: dict[str, list[float]] = {SAMPLED: [], LIKELIEST: []}
    target, tokenizer = _target()
    law = _law(proposal)
    for text in bar(iterable=answers, desc=f"chains of the {proposal.name}", unit="answer"):
        prompt, answer = prompt_ids(tokenizer, text.index), text.output_ids
        keeps = chances(target, law, prompt, answer, temperature) if len(answer) > 1 else {}
        for rule, rounds in found.items():
            rounds.append(expected_rounds(keeps[rule]) if keeps else 0.0)
    return {rule: np.array(values) for rule, values in found.items()}


def chances(
    target: Any, law: Law, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> dict[str, np.ndarray]:
    """Return the keep probabilities ``[A, K]`` by rule, for an answer of two tokens or more."""
    import torch

    ids = torch.tensor([*prompt, *answer])
    anchors = torch.arange(len(prompt), len(ids) - 1)  # [A]
    places = (anchors.unsqueeze(1) + 1 + torch.arange(NUM_STEPS)).clamp_max(len(ids) - 1)
    with torch.inference_mode():
        log_p = (target(ids.unsqueeze(0)).logits[0].double() / temperature).log_softmax(-1)
        logits = law(ids, anchors).double()
        log_q = (logits / temperature).log_softmax(-1)
        drafted = ids[places]  # [A, K]
        of_q = log_q.gather(2, drafted.unsqueeze(2)).squeeze(2)
        sampled = (of_q - log_p[places - 1, drafted]).clamp_max(0).exp()
        likeliest = logits.argmax(-1).eq(drafted)
    return {SAMPLED: sampled.numpy(), LIKELIEST: likeliest.double().numpy()}


@lru_cache(maxsize=1)
def _target() -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    return _model("target"), AutoTokenizer.from_pretrained(PAIR / "target")


def _model(name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32).eval()


def _law(proposal: Proposal) -> Law:
    """Return the draft distribution of a proposal that has a checkpoint."""
    assert proposal.folder is not None
    if proposal.kind == "model":
        return model_law(_model(proposal.folder))
    target, _ = _target()
    return head_law(proposal.kind == "dflash", PAIR / proposal.folder, target)


def model_law(model: Any) -> Law:
    """Return a language model's distribution, which does not depend on the round's start."""

    def law(ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        import torch

        logits = model(ids.unsqueeze(0)).logits[0]
        places = anchors.unsqueeze(1) + torch.arange(NUM_STEPS)
        return logits[places.clamp_max(len(ids) - 1)]

    return law


def head_law(is_block: bool, folder: Path, target: Any) -> Law:
    """Return a head's distribution, computed by its training code."""
    from sglang_smc.tools.distill.checkpoints import load_dflash, load_eagle3

    source = target.config._name_or_path
    head = (load_dflash if is_block else load_eagle3)(folder, source).eval()
    embed = target.get_input_embeddings()

    def features(ids: torch.Tensor) -> torch.Tensor:
        import torch

        states = target(ids, output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1] for layer in head.shape.layer_ids], -1)

    def block(ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        import torch

        text, at = ids.unsqueeze(0), anchors.unsqueeze(0)
        mask = embed(torch.tensor(head.mask_token_id))
        return target.lm_head(head(embed(text[:, anchors]), mask, features(text), at))[0]

    def chain(ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        text = ids.unsqueeze(0)
        logits = head(embed(text), features(text), anchors.unsqueeze(0), NUM_STEPS)[0]
        every = logits.new_full((*logits.shape[:2], target.config.vocab_size), float("-inf"))
        return every.index_copy(2, head.hot, logits)

    return (lambda ids, at: block(ids, at)[:, :NUM_STEPS]) if is_block else chain
