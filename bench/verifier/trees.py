"""Draw trees of a draft, and compute the tokens that each rule is expected to keep of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from pair import task
from real.prompts import prompts
from study import PAIR, bar
from transformers import AutoModelForCausalLM, AutoTokenizer
from verifier.cells import PAIRS, VerifierCell

from sglang_smc.smc import verification
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc_tools.distill.checkpoints import load_head
from sglang_smc_tools.real.models import CACHE, checkpoint

ANSWER_TOKENS = 96  # of which a context has a part
NUM_TEXTS = 8  # of the target, for the bound

#: Constants of `smc.verification` that a rule changes.
RULES: dict[str, dict[str, Any]] = {
    "shares by bins": {},
    "a quarter of the bins": {"NUM_BINS": 16, "BINS_PER_NAT": 2},
    "first rates": {"NUM_STEPS": 0},
    "ten steps": {"NUM_STEPS": 10, "SPEED": 0.8},
}


class Models:
    """A target and a draft in plain torch."""

    def __init__(self, pair: str) -> None:
        names = [f"coder-{name}" if pair == "coder" else name for name in PAIRS[pair]]
        self.is_real = pair == "coder"
        folders = [checkpoint(name) if self.is_real else PAIR / name for name in names]
        dtype = torch.bfloat16 if self.is_real else torch.float32

        def load(folder: Any) -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

        self.tokenizer = AutoTokenizer.from_pretrained(folders[0])
        self.target = load(folders[0])
        self.head = load_head(folders[1], folders[0]).eval() if pair == "head" else None
        self.draft = None if self.head is not None else load(folders[1])

    @torch.no_grad()
    def contexts(self, count: int, temperature: float) -> Iterator[torch.Tensor]:
        """Yield ``count`` contexts ``[L]``, of prompts of all kinds in turn."""
        chance = random.Random(count)
        for prompt in self._prompts(count):
            torch.manual_seed(chance.getrandbits(32))
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            ids = torch.tensor([prompt])
            text = self.target.generate(ids, max_new_tokens=ANSWER_TOKENS, **how)[0]
            yield text[: chance.randrange(len(prompt), max(len(prompt) + 1, len(text) - 8))]

    def _prompts(self, count: int) -> list[list[int]]:
        if self.is_real:
            return prompts(CACHE / "question.jsonl", self.tokenizer, count)
        chats = [task.messages(task.held_out(8_000_000 + index)) for index in range(count)]
        told = {"add_generation_prompt": True, "return_dict": False}
        return [self.tokenizer.apply_chat_template(chat, **told) for chat in chats]


class Texts:
    """What two models say behind a context."""

    def __init__(self, models: Models, context: torch.Tensor) -> None:
        self.models = models
        self.context = context
        self._read = {name: self._begin(name) for name in ("target", "draft")}

    @torch.no_grad()
    def _begin(self, name: str) -> Any:
        model = getattr(self.models, name)
        return model and model(self.context[None, :-1], use_cache=True).past_key_values

    @torch.no_grad()
    def logits(self, name: str, chains: torch.Tensor) -> torch.Tensor:
        """Return the logits behind the context and each token of chains ``[R, J]``, with J + 1."""
        if name == "draft" and self.models.head is not None:
            return self._head_logits(chains)
        cache = copy.deepcopy(self._read[name])
        cache.batch_repeat_interleave(len(chains))
        last = self.context[-1:].expand(len(chains), 1)
        read = torch.cat([last, chains], 1)
        return getattr(self.models, name)(read, past_key_values=cache).logits.float()

    def _head_logits(self, chains: torch.Tensor) -> torch.Tensor:
        head = self.models.head
        target = self.models.target
        texts = torch.cat([self.context.expand(len(chains), -1), chains], 1)  # [R, L]
        states = target(texts, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in head.layer_ids], -1)
        anchor = torch.full((len(texts), 1), len(self.context) - 1)
        embedded = target.get_input_embeddings()(texts)
        found = head(embedded, features, anchor, chains.shape[1] + 1)[:, 0].float()
        every = found.new_full((*found.shape[:2], len(target.lm_head.weight)), -torch.inf)
        return every.index_copy(2, head.hot, found)

    def drawn(self, name: str, count: int, cell: VerifierCell, temperature: float) -> torch.Tensor:
        """Return texts of K tokens that a model draws, ``[count, K]``."""
        texts = self.context.new_empty(count, 0)
        for _ in range(cell.num_steps):
            log_q = log_probs(self.logits(name, texts)[:, -1], temperature)
            tokens = torch.multinomial(log_q.exp(), 1)
            texts = torch.cat([texts, tokens], 1)
        return texts


def log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log-probabilities of logits ``[..., V]``, in their shape."""
    return (logits / temperature).log_softmax(-1)


def expected(texts: Texts, cell: VerifierCell) -> dict[str, float]:
    """Return the expected tokens of a round by each rule, for one drawn tree, and its nodes."""
    n = cell.num_particles
    k = cell.num_steps
    chains = texts.drawn("draft", n, cell, cell.draft_temperature)  # [N, K]
    log_q = log_probs(texts.logits("draft", chains)[:, :k], cell.draft_temperature)
    log_p = log_probs(texts.logits("target", chains), cell.temperature)
    ends = chains == texts.models.tokenizer.eos_token_id
    lengths = (ends.cumsum(1) == ends).sum(1)  # [N]

    def tokens(count: int) -> float:
        tree = verification.grow(chains[None, :count], lengths[None, :count])
        p = TokenDistribution.of_log_probs(log_p[:count].flatten(0, 1))
        q = [TokenDistribution.of_log_probs(of[:count]) for of in log_q.unbind(1)]
        return float(verification.descend(tree, p, q).shares.sum())

    found = {"one chain": tokens(1)}
    for name, constants in RULES.items():
        with mock.patch.multiple(verification, **constants) if constants else nullcontext():
            found[name] = tokens(n)
    nodes = {tuple(chain[:j]) for chain in chains.tolist() for j in range(1, k + 1)}
    return found | {"bound": bound(texts, cell), "nodes": 1.0 + len(nodes)}


def bound(texts: Texts, cell: VerifierCell) -> float:
    """Estimate what no lossless rule exceeds, of N chains that are drawn.

    A text y of j tokens is accepted at most as often as the target writes it, and as it is drafted:
    1 + sum_j E_p[min(1, (1 - (1 - q(y))^N) / p(y))], over texts of the target.
    """
    drawn = texts.drawn("target", NUM_TEXTS, cell, cell.temperature)
    places = drawn.unsqueeze(2)
    by_target, by_draft = (
        log_probs(texts.logits(name, drawn)[:, :-1], temperature).gather(2, places).double()
        for name, temperature in (("target", cell.temperature), ("draft", cell.draft_temperature))
    )
    # [R, K, 1]
    log_p = by_target.cumsum(1)
    log_q = by_draft.cumsum(1)
    is_drafted = -torch.expm1(cell.num_particles * torch.log1p(-log_q.exp()))
    return 1.0 + float((is_drafted / log_p.exp()).clamp_max(1.0).mean(0).sum())


@lru_cache(1)
def models_of(pair: str) -> Models:
    """Load a pair; one is in memory at a time."""
    return Models(pair)


@lru_cache(1)
def contexts_of(pair: str, count: int, temperature: float) -> list[torch.Tensor]:
    """Return the contexts of all cells of a temperature."""
    contexts = models_of(pair).contexts(count, temperature)
    return list(bar(iterable=contexts, total=count, desc="contexts"))


def expected_of(cell: VerifierCell, context: torch.Tensor, seed: int) -> dict[str, float]:
    """Return what `expected` does behind a context ``[L]``, of a tree drawn with this seed."""
    torch.manual_seed(seed)
    return expected(Texts(models_of(cell.pair), context), cell)
