"""Train a tiny mixture of experts and its draft on text, and read which experts a token visits."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import study
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from sglang_smc_tools.plan.experts import Experts

#: Bytes of a source file that are read: long ones are tables.
MOST_BYTES = 40_000
#: Of so many files, one is held out.
HELD_OUT = 8
LENGTH = 256
BATCH = 8
LEARNING_RATE = 3e-3
WARM_UP = 30
VOCAB = 4096
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2 * LENGTH,
    "tie_word_embeddings": True,
}
MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.0,  # that of all layers together leaves each of them unbalanced
}
#: Weight of the load-balancing loss, a mean over layers.
BALANCE = 0.01
DENSE: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 384}


class LibraryTexts(NamedTuple):
    """Tokens of Python's standard library, file by file."""

    train: torch.Tensor  # [T] int64
    held_out: torch.Tensor  # [H] int64


def texts() -> LibraryTexts:
    """Return the library's sources, in tokens of a vocabulary that is trained on them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_text(errors="replace")[:MOST_BYTES] for path in sorted(folder.glob("*.py"))]
    held_out = files[::HELD_OUT]
    train = [text for index, text in enumerate(files) if index % HELD_OUT]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(train, vocab_size=VOCAB, show_progress=False)

    def tokens(of: Sequence[str]) -> torch.Tensor:
        return torch.tensor(list(chain.from_iterable(tokenizer.encode(text).ids for text in of)))

    return LibraryTexts(tokens(train), tokens(held_out))


def mixture() -> Any:
    """Return the target with random weights."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **MIXTURE)).eval()


def dense() -> Any:
    """Return the draft with random weights."""
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **DENSE)).eval()


def train(model: Any, tokens: torch.Tensor, num_steps: int, name: str) -> None:
    """Train a model in place on random pieces of text, ``tokens`` ``[T]``."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / num_steps)
    )
    model.train()
    for _ in study.bar(iterable=range(num_steps), desc=f"training {name}"):
        pieces = some_pieces(tokens, BATCH, LENGTH, generator)
        out = model(input_ids=pieces, labels=pieces)
        loss = out.loss
        if isinstance(model, Qwen3MoeForCausalLM):
            loss = loss + BALANCE * unbalanced(out.router_logits, model.config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def unbalanced(routed: Sequence[torch.Tensor], config: Any) -> torch.Tensor:
    """Return the load-balancing loss of Switch Transformers, in the mean of layers.

    Args:
        routed: of each layer the router's logits, ``[tokens, experts]``.
    """
    count = config.num_experts
    most = config.num_experts_per_tok
    each = [torch.as_tensor(load_balancing_loss_func((one,), count, most)) for one in routed]
    return torch.stack(each).mean()


def some_pieces(
    tokens: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Return random pieces of a text, ``[count, length]`` int64."""
    starts = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


@torch.inference_mode()
def nats(model: Any, tokens: torch.Tensor) -> float:
    """Return a model's loss a token on pieces of a text, without that of its router."""
    pieces = some_pieces(tokens, 32, LENGTH, torch.Generator().manual_seed(2))
    log_p = model(input_ids=pieces).logits[:, :-1].log_softmax(-1)
    return -float(log_p.gather(2, pieces[:, 1:, None]).mean())


@torch.inference_mode()
def chains(
    draft: Any, text: torch.Tensor, num_chains: int, num_steps: int, temperature: float
) -> torch.Tensor:
    """Return independent samples of the draft after a text ``[L]``, ``[N, K]`` int64."""
    drawn = text.expand(num_chains, -1)
    cache = None
    for _ in range(num_steps):
        read = drawn if cache is None else drawn[:, -1:]
        out = draft(input_ids=read, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        q = (out.logits[:, -1] / temperature).softmax(-1)
        drawn = torch.cat([drawn, torch.multinomial(q, 1)], 1)
    return drawn[:, len(text) :]


@torch.inference_mode()
def visits(target: Any, texts: torch.Tensor) -> np.ndarray:
    """Return whether tokens of texts ``[B, L]`` visit experts, ``[B, L, layers, experts]``."""
    each = target(input_ids=texts).router_logits  # of each layer, [B L, experts]
    of_layers = torch.stack([logits.unflatten(0, texts.shape) for logits in each], 2)
    best = of_layers.topk(target.config.num_experts_per_tok, -1).indices
    return torch.zeros_like(of_layers, dtype=torch.bool).scatter(-1, best, True).numpy()


def experts() -> Experts:
    """Return the target's experts, as the planner has them."""
    return Experts(
        count=MIXTURE["num_experts"],
        per_token=MIXTURE["num_experts_per_tok"],
        size=MIXTURE["moe_intermediate_size"],
        dense_layers=0,
        shared=0.0,
    )
