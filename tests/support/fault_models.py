"""Tiny models that are healthy but for a few tokens, which spoil the requests that have them.

Requests come to such a token by their prompts, or at a high temperature: at 1 and below nobody
ever draws one. Healthy and sick requests can so share a server.
"""

from pathlib import Path
from typing import Any

import torch
from tiny_models import make_tiny_model
from transformers import LlamaForCausalLM

VOCAB = 64
# Behind a token of NaN all logits are NaN; right behind one of infinity, one of them is infinite.
TARGET_NAN, TARGET_INF, DRAFT_NAN, DRAFT_INF = RARE = (63, 62, 61, 60)
OVERFLOWS = 7  # the token whose logit is infinite
# dimensions of the residual stream that no layer writes to
_CONSTANT = 0
_SIGNAL = 1
_RARE_LOGIT = -60.0


def fault_pair(folder: Path) -> tuple[str, str]:
    """Return a target and a draft over one vocabulary, which break at `RARE` tokens."""
    return (
        _save(folder / "target", 1, nan=TARGET_NAN, infinite=TARGET_INF),
        _save(folder / "draft", 2, nan=DRAFT_NAN, infinite=DRAFT_INF),
    )


def _save(path: Path, seed: int, *, nan: int, infinite: int) -> str:
    made: dict[str, Any] = {"vocab_size": VOCAB, "scale": 0.3, "seed": seed}
    model = LlamaForCausalLM.from_pretrained(make_tiny_model(path, **made), dtype=torch.float32)
    embeddings = model.model.embed_tokens.weight
    head = model.lm_head.weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[[_CONSTANT, _SIGNAL]] = 0.0
            layer.mlp.down_proj.weight[[_CONSTANT, _SIGNAL]] = 0.0
        embeddings[:, _CONSTANT] = 3.0
        embeddings[:, _SIGNAL] = 0.0
        head[:, [_CONSTANT, _SIGNAL]] = 0.0
        head[list(RARE), _CONSTANT] = _RARE_LOGIT
        # The norm leaves at most sqrt(hidden) of the signal, here over 2: more than float32.
        embeddings[infinite, _SIGNAL] = 100.0
        head[OVERFLOWS, _SIGNAL] = 3e38
        embeddings[nan] = torch.nan
    model.save_pretrained(path)
    return str(path)
