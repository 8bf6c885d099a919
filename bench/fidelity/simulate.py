"""Whole answers of many problems at once, on plain models: what the studies of rules share.

No engine: two checkpoints, and rounds made of the pure functions of `sglang_smc.smc`. A `Rule` says
what a round keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.smc import exact, mixed, rounds
from sglang_smc.smc.stratify import still_same, stratified
from sglang_smc.smc.weights import normalized
from sglang_smc.tokens.distribution import TokenDistribution, sample, token_log_probs

Uniforms = Callable[..., torch.Tensor]  # a shape to float64 in [0, 1)


class Rows(Protocol):
    """A model while it reads texts of different lengths, a row each."""

    def log_probs(self, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Log-probabilities ``[B, T, V]`` float32 of what follows each token.

        Args:
            tokens: ``[B, T]`` int64; they replace what the rows had from ``starts`` on.
            starts: ``[B]`` int64 positions of the first ones.
        """
        ...

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i goes on as row ``rows[i]``; there may be more or fewer than before."""
        ...


class Model(Protocol):
    """A language model at a temperature."""

    def rows(self, count: int, length: int) -> Rows:
        """``count`` empty rows with room for ``length`` tokens."""
        ...


class Llama:
    """A Llama of transformers. Its own caches hold texts of one length, these any."""

    def __init__(self, module: Any, temperature: float) -> None:
        self.module, self.temperature = module, temperature

    def rows(self, count: int, length: int) -> Rows:
        return _LlamaRows(self.module, self.temperature, count, length)


class _LlamaRows:
    """Keys and values of each layer, ``[B, heads, length, size]``."""

    def __init__(self, module: Any, temperature: float, count: int, length: int) -> None:
        config = module.config
        shape = count, config.num_key_value_heads, length, config.head_dim
        self.module, self.temperature = module, temperature
        self.cache = [[torch.empty(shape) for _ in "kv"] for _ in module.model.layers]
        self.used = 0  # columns that hold anything

    @torch.inference_mode()
    def log_probs(self, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        model = self.module.model
        positions = starts.unsqueeze(1) + torch.arange(tokens.shape[1])  # [B, T]
        length = int(positions.max()) + 1
        self._use(length)
        # What stands behind a row's end is never seen, and overwritten before it would be.
        seen = torch.arange(length) <= positions.unsqueeze(2)  # [B, T, length]
        hidden = model.embed_tokens(tokens)
        turns = model.rotary_emb(hidden, positions)
        for layer, cache in zip(model.layers, self.cache, strict=True):
            read = layer.input_layernorm(hidden)
            hidden = hidden + _attend(layer.self_attn, cache, read, turns, positions, seen)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits = self.module.lm_head(model.norm(hidden))
        return (logits / self.temperature).log_softmax(-1)

    def reorder(self, rows: torch.Tensor) -> None:
        self.cache = [[self._copied(part, rows) for part in layer] for layer in self.cache]

    def _copied(self, part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Only what is used: most of the time would go into copies."""
        copied = part.new_empty(len(rows), *part.shape[1:])
        copied[:, :, : self.used] = part[rows, :, : self.used]
        return copied

    def _use(self, length: int) -> None:
        """Begin new columns: what is not seen must be a number nevertheless."""
        for part in (part for layer in self.cache for part in layer):
            part[:, :, self.used : length] = 0.0
        self.used = max(self.used, length)


def _attend(
    layer: Any,
    cache: list[torch.Tensor],
    hidden: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Write the keys and values of ``hidden`` ``[B, T, D]`` to the cache, and attend to it."""
    projected = (layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden))
    query, key, value = (p.unflatten(2, (-1, layer.head_dim)).transpose(1, 2) for p in projected)
    query, key = apply_rotary_pos_emb(query, key, *turns)
    row = torch.arange(len(hidden)).unsqueeze(1)
    for part, new in zip(cache, (key, value), strict=True):
        part[row, :, positions] = new.transpose(1, 2)
    keys, values = (part[:, :, : seen.shape[2]] for part in cache)
    # Query heads that share a key head stand one after the other: as more queries of that head.
    size, heads, columns, width = query.shape
    grouped = query.reshape(size, keys.shape[1], -1, width)
    mask = seen.repeat(1, grouped.shape[2] // columns, 1).unsqueeze(1)
    found = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    found = found.reshape(size, heads, columns, width).transpose(1, 2).flatten(2)
    return layer.o_proj(found)


class Pair(NamedTuple):
    """What is simulated."""

    target: Model
    draft: Model
    eos: int


class Block(NamedTuple):
    """What a round has drafted behind G populations of N texts, and scored."""

    log_weights: torch.Tensor  # [G, N] float64 before it
    same_text: torch.Tensor  # [G, N, N] bool: whose texts are the same before it
    tokens: torch.Tensor  # [G, N, K] int64
    ends: torch.Tensor  # [G, N, K] bool: the text ends with this token
    before_end: torch.Tensor  # [G, N, K] bool: up to the text's end
    log_p: torch.Tensor  # [G, N, K + 1, V] float32
    log_q: torch.Tensor  # [G, N, K, V] float32

    @property
    def drafted_p(self) -> torch.Tensor:
        """Log p of the drafted tokens, ``[G, N, K]``."""
        return token_log_probs(self.log_p[:, :, :-1], self.tokens)

    @property
    def drafted_q(self) -> torch.Tensor:
        """Log q of the drafted tokens, ``[G, N, K]``."""
        return token_log_probs(self.log_q, self.tokens)

    @property
    def present(self) -> torch.Tensor:
        """All particles, ``[G, N]`` bool."""
        return torch.ones_like(self.log_weights, dtype=torch.bool)

    @property
    def num_steps(self) -> torch.Tensor:
        """K for each group, ``[G]`` int64."""
        return torch.full((len(self.tokens),), self.tokens.shape[2])

    def same_at(self, num_columns: torch.Tensor) -> torch.Tensor:
        """Whose texts are still the same after so many columns ``[G]``, ``[G, N, N]`` bool."""
        equal = self.tokens.unsqueeze(1) == self.tokens.unsqueeze(2)  # [G, N, N, K]
        dropped = torch.arange(self.tokens.shape[2]) >= num_columns.view(-1, 1, 1, 1)
        return self.same_text & (equal | dropped).all(3)

    def log_p_at(self, num_columns: torch.Tensor) -> torch.Tensor:
        """What follows each particle's kept columns, ``[G, N, V]``."""
        return self.log_p[torch.arange(len(num_columns)), :, num_columns]


class Kept(NamedTuple):
    """What a rule makes of a block."""

    num_columns: torch.Tensor  # [G] int64
    ancestors: torch.Tensor  # [G, N] int64
    log_weights: torch.Tensor  # [G, N] float64
    next_tokens: torch.Tensor  # [G, N] int64: behind the kept columns of the ancestors


class Rule(Protocol):
    """What a round keeps."""

    def siblings(self, same_text: torch.Tensor) -> torch.Tensor:
        """Which particles' drafts are stratified, an equivalence ``[G, N, N]`` bool."""
        ...

    def keep(self, block: Block, uniforms: Uniforms) -> Kept:
        """Decide."""
        ...


@dataclass(frozen=True)
class Verify:
    """Modes exact (c = infinity) and mixed."""

    evidence_threshold: float = torch.inf

    def siblings(self, same_text: torch.Tensor) -> torch.Tensor:
        return torch.eye(same_text.shape[1], dtype=torch.bool).expand_as(same_text)

    def keep(self, block: Block, uniforms: Uniforms) -> Kept:
        size, count = block.log_weights.shape
        found = verify(block, uniforms)
        kept = mixed.keep(
            found,
            torch.cat([block.drafted_p, block.log_p[:, :, -1, :1]], 2),
            block.drafted_q,
            block.before_end,
            block.ends,
            block.present,
            block.num_steps,
            torch.full((size,), self.evidence_threshold, dtype=torch.float64),
            uniforms(size),
            uniforms(size),
        )
        law = torch.where(
            kept.rejects.unsqueeze(1),
            found.residuals[found.left].log(),
            block.log_p.flatten(0, 2)[kept.row],
        )
        return Kept(
            kept.num_columns,
            kept.winner.unsqueeze(1).expand(-1, count),
            torch.zeros_like(block.log_weights),
            sample(law, uniforms(size)).unsqueeze(1).expand(-1, count),
        )


def verify(
    block: Block, uniforms: Uniforms, num_chains: torch.Tensor | None = None
) -> exact.Verified:
    """Exact verification of each group's chains, which begin at one text and are independent."""
    p = TokenDistribution.of_log_probs(block.log_p.flatten(0, 2))
    q = [TokenDistribution.of_log_probs(column.flatten(0, 1)) for column in block.log_q.unbind(2)]
    numbers = uniforms(*block.tokens.shape)
    return exact.verify(TORCH, block.tokens, block.ends, p, q, numbers, num_chains=num_chains)


class Answer(NamedTuple):
    """One answer."""

    tokens: list[int]  # up to and including its end, or the limit
    num_rounds: int  # passes of the target behind that which gave the first token


def answers(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    rule: Rule,
    num_particles: int,
    num_steps: int,
    *,
    seed: int = 0,
    limit: int = 160,
) -> list[Answer]:
    """An answer of at most ``limit`` tokens to each prompt, by rounds of ``rule``."""
    generator = torch.Generator().manual_seed(seed)
    run = Simulation(pair, prompts, rule, num_particles, num_steps, limit, generator)
    while len(run.which):
        run.round()
    return [run.done[index] for index in range(len(prompts))]


class Simulation:
    """Populations of N texts behind their prompts.

    which        [G] int64: the prompts that are still answered
    texts        [G, N, limit + K + 1] int64; what stands behind an end means nothing
    lengths      [G] int64 tokens of these
    log_weights  [G, N] float64
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Sequence[int]],
        rule: Rule,
        num_particles: int,
        num_steps: int,
        limit: int,
        generator: torch.Generator,
    ) -> None:
        self.rule, self.num_steps, self.limit, self.eos = rule, num_steps, limit, pair.eos
        self.uniforms = partial(torch.rand, dtype=torch.float64, generator=generator)
        self.done: dict[int, Answer] = {}
        self.num_rounds = 0
        size, longest = len(prompts), max(map(len, prompts))
        self.which = torch.arange(size)
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
        length = longest + limit + num_steps + 1
        self.target, self.draft = (model.rows(size, length) for model in pair[:2])
        first = self._first_tokens(prompts, longest)
        shape = size, num_particles, limit + num_steps + 1
        self.texts = torch.zeros(shape, dtype=torch.int64)
        self.texts[:, :, 0] = first.unsqueeze(1)
        self.lengths = torch.ones_like(first)
        self.log_weights = torch.zeros(shape[:2], dtype=torch.float64)
        self.same_text = torch.ones(size, num_particles, num_particles, dtype=torch.bool)
        self._retire(torch.arange(size).unsqueeze(1).expand(-1, num_particles))

    def round(self) -> None:
        """Draft, score, keep, and go on behind that."""
        self.num_rounds += 1
        block = self._block()
        kept = self.rule.keep(block, self.uniforms)
        self._extend(block, kept)
        size, count = kept.ancestors.shape
        self._retire(torch.arange(size).unsqueeze(1) * count + kept.ancestors)

    def _first_tokens(self, prompts: Sequence[Sequence[int]], longest: int) -> torch.Tensor:
        """Read the prompts, and draw one token from p for each, ``[G]``."""
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
        starts = torch.zeros(len(prompts), dtype=torch.int64)
        self.draft.log_probs(padded, starts)
        log_p = self.target.log_probs(padded, starts)
        return sample(log_p[torch.arange(len(prompts)), self.prompt_lengths - 1], self._draw())

    def _draw(self) -> torch.Tensor:
        return self.uniforms(len(self.which))

    def _block(self) -> Block:
        """K tokens from q for each particle, and what p says to them."""
        size, count = self.log_weights.shape
        starts = (self.prompt_lengths + self.lengths - 1).repeat_interleave(count)  # [G * N]
        at = (self.lengths - 1).view(-1, 1, 1).expand(-1, count, 1)
        tokens, log_qs = [self.texts.gather(2, at).flatten()], []
        siblings = self.rule.siblings(self.same_text)
        for step in range(self.num_steps):
            log_q = self.draft.log_probs(tokens[-1].unsqueeze(1), starts + step)
            log_qs.append(log_q[:, 0].unflatten(0, (size, count)))
            drawn = sample(log_qs[-1], stratified(self.uniforms(size, count), siblings))
            siblings = still_same(siblings, drawn)
            tokens.append(drawn.flatten())
        self.draft.log_probs(tokens[-1].unsqueeze(1), starts + self.num_steps)
        log_p = self.target.log_probs(torch.stack(tokens, 1), starts)
        drafted = torch.stack(tokens[1:], 1).unflatten(0, (size, count))
        ends = drafted == self.eos
        ended_before = self._ended().unsqueeze(2) | (ends.cumsum(2) - ends.long() > 0)
        beyond = self.lengths.unsqueeze(1) + torch.arange(self.num_steps) >= self.limit
        return Block(
            self.log_weights,
            self.same_text,
            drafted,
            ends,
            ~ended_before & ~beyond.unsqueeze(1),
            log_p.unflatten(0, (size, count)),
            torch.stack(log_qs, 2),
        )

    def _extend(self, block: Block, kept: Kept) -> None:
        """Hand texts down to descendants, with the kept columns and a token more."""
        _, count, columns = block.tokens.shape
        pairs = kept.ancestors.unsqueeze(2).expand(-1, -1, count)
        same = block.same_at(kept.num_columns).gather(1, pairs).gather(2, pairs.transpose(1, 2))
        self.same_text = still_same(same, kept.next_tokens)
        inherit = kept.ancestors.unsqueeze(2)
        self.texts = self.texts.gather(1, inherit.expand_as(self.texts))
        tokens = block.tokens.gather(1, inherit.expand_as(block.tokens))
        # Drafts that are dropped are overwritten, now or later.
        places = (self.lengths.unsqueeze(1) + torch.arange(columns)).unsqueeze(1)
        self.texts.scatter_(2, places.expand_as(tokens), tokens)
        behind = (self.lengths + kept.num_columns).view(-1, 1, 1).expand(-1, count, 1)
        self.texts.scatter_(2, behind, kept.next_tokens.unsqueeze(2))
        self.lengths = self.lengths + kept.num_columns + 1
        self.log_weights = kept.log_weights

    def _ended(self) -> torch.Tensor:
        """Which texts have come to an end, ``[G, N]`` bool."""
        inside = torch.arange(self.texts.shape[2]) < self.lengths.view(-1, 1, 1)
        return (self.texts.eq(self.eos) & inside).any(2)

    def _retire(self, rows: torch.Tensor) -> None:
        """Note the answers of groups whose texts have all ended, and go on with the others.

        Args:
            rows: ``[G, N]`` of the models, that particles go on from.
        """
        over = self._ended().all(1) | (self.lengths >= self.limit)
        winner = rounds.draw(normalized(self.log_weights), self._draw())
        for group in over.nonzero().flatten().tolist():
            end = min(int(self.lengths[group]), self.limit)
            tokens = self.texts[group, winner[group], :end].tolist()
            if self.eos in tokens:
                tokens = tokens[: tokens.index(self.eos) + 1]
            self.done[int(self.which[group])] = Answer(tokens, self.num_rounds)
        self.target.reorder(rows[~over].flatten())
        self.draft.reorder(rows[~over].flatten())
        for name in ("which", "prompt_lengths", "texts", "lengths", "log_weights", "same_text"):
            setattr(self, name, getattr(self, name)[~over])
