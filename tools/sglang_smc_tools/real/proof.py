"""Prove a converted checkpoint: its perplexity of a text, and its answer, are as recorded.

A wrong permutation, norm or missing <bos> leaves a model that runs, and says rubbish.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from sglang_smc.command.program import ScriptError

#: bfloat16 differs by this much, relatively, between processors; the least fault by far more.
TOLERANCE = 0.02


class Proof(NamedTuple):
    """State what a model must do."""

    text: str
    perplexity: float  # of the text's tokens, after its first
    prompt: str  # a chat's first message, or a beginning for a model without a chat template
    answer: str  # how the likeliest answer begins


def prove(folder: Path, proof: Proof) -> str:
    """Return what was measured; raise ScriptError where it is not what was recorded."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        perplexity = perplexity_of(model, tokenizer(proof.text, return_tensors="pt").input_ids)
        answer = answer_of(model, tokenizer, proof)
    told = f"perplexity {perplexity:.3f}, answer {answer!r}"
    near = math.isclose(perplexity, proof.perplexity, rel_tol=TOLERANCE)
    if not near or answer != proof.answer:
        raise ScriptError(
            f"{folder} is not the model that its file holds: {told}; recorded are "
            f"{proof.perplexity:.3f} and {proof.answer!r}. Another release of transformers or gguf "
            "may read the file otherwise; pyproject.toml names those that are tried."
        )
    return told


def perplexity_of(model: Any, ids: Any) -> float:
    """Return the perplexity of tokens ``[1, L]`` after the first."""
    return math.exp(model(input_ids=ids, labels=ids).loss)


def answer_of(model: Any, tokenizer: Any, proof: Proof) -> str:
    """Return as much of the likeliest answer as is recorded."""
    ids = tokenizer(proof.prompt, return_tensors="pt").input_ids
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": proof.prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    length = len(tokenizer(proof.answer, add_special_tokens=False).input_ids)
    found = model.generate(ids, do_sample=False, max_new_tokens=length)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
