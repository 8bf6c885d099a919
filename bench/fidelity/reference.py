"""SMC speculative decoding as the paper states it, on plain Hugging Face models.

One problem at a time with N rows, no serving engine and none of its memory tricks: something to
hold an engine against. p is the target and q the draft, both at the request's temperature.

1. Read the prompt; draw the first token from p. All N particles share it.
2. Draft K tokens a particle from q, and score all K + 1 positions with p in one pass.
3. log w += log p - log q, up to and including a particle's EOS. After that its weight is frozen,
   and it remains a candidate.
4. Where the effective sample size is below tau N: bank the mean weight in log Z-hat, resample, make
   weights equal. ``block`` looks after K columns; ``token`` at the first column where it is so low,
   and drops the columns behind it.
5. One more token from p for each particle, and back to 2, until all have ended.
6. Draw one particle by weight: the answer.

Paper: arXiv 2604.15672. Needs p > 0 wherever q > 0, as temperature alone ensures.

Stratified draws. Particles with one text draw their next tokens from one law, so their uniforms may
be spread evenly over [0, 1): member r of m gets (u + r / m) mod 1, with one fresh u for each text.
Each is uniform by itself, so weights do not change; together they vary less.

Conditional SMC (Andrieu, Doucet, Holenstein 2010): given a ``retained`` text x, one particle
follows x, and everything else is drawn as in an SMC run given that this particle's line of descent
is x. With s the law of a run's answer, E[1 / Z-hat | x] = s(x) / p(x) over such runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.weights import effective_sample_size, log_mean_exp, normalized
from sglang_smc.tokens.distribution import sample, token_log_probs

#: Resampling steps drawn at once when one is sought that keeps the retained particle.
_TRIALS = 64


@dataclass(frozen=True)
class Setting:
    """How to run it; the words are those of the server's flags."""

    num_particles: int
    num_steps: int
    resample_at: str = "block"
    ess_threshold: float = 0.5
    resampling_method: str = "systematic"
    stratified: bool = True


class Outcome(NamedTuple):
    """What a run gives."""

    tokens: list[int]  # the answer, up to and including EOS or the limit
    log_evidence: float  # log Z-hat in nats, final weights included; E[Z-hat] = 1
    num_rounds: int
    num_resampled: int  # rounds that resampled
    mean_ess: float  # over rounds, before resampling; 1 to N, NaN without a round


class Rows(Protocol):
    """A model while it reads N texts of one length behind one prompt."""

    def log_probs(self, texts: torch.Tensor, columns: int, temperature: float) -> torch.Tensor:
        """Log-probabilities of what follows each of the last ``columns`` tokens of the texts.

        The prompt's end counts as a token. Since the last call the texts may have lost tokens at
        their end and gained others, all of which the new ``columns`` cover, but for what the
        model has not been shown yet.

        Args:
            texts: ``[N, T]`` int64, T >= 0.

        Returns:
            ``[N, columns, V]`` float64.
        """
        ...

    def reorder(self, ancestors: torch.Tensor) -> None:
        """Row i goes on as row ``ancestors[i]``, ``[N]`` int64."""
        ...


class Model(Protocol):
    """A language model."""

    def read(self, prompt_ids: Sequence[int], num_rows: int) -> Rows:
        """Begin ``num_rows`` texts behind a prompt."""
        ...


class HuggingFace:
    """A causal language model of transformers."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module

    def read(self, prompt_ids: Sequence[int], num_rows: int) -> Rows:
        """Run the prompt once, for all rows."""
        return _CachedRows(self.module, prompt_ids, num_rows)


class _CachedRows:
    """Rows with a KV cache. It holds the prompt but for its end, which stands before the texts."""

    def __init__(self, module: PreTrainedModel, prompt_ids: Sequence[int], num_rows: int) -> None:
        self.module = module
        self.cache = DynamicCache(config=module.config)
        *common, last = prompt_ids
        self.prompt_end = torch.full((num_rows, 1), last)
        self.num_common = len(common)
        if common:
            self._feed(torch.tensor([common]), 1)
            self.cache.batch_repeat_interleave(num_rows)

    def log_probs(self, texts: torch.Tensor, columns: int, temperature: float) -> torch.Tensor:
        tokens = torch.cat([self.prompt_end, texts], dim=1)
        self.cache.crop(self.num_common + tokens.shape[1] - columns)
        held = self.cache.get_seq_length() - self.num_common
        return (self._feed(tokens[:, held:], columns).double() / temperature).log_softmax(-1)

    def reorder(self, ancestors: torch.Tensor) -> None:
        self.cache.batch_select_indices(ancestors)

    def _feed(self, tokens: torch.Tensor, columns: int) -> torch.Tensor:
        return self.module(
            input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=columns
        ).logits


@dataclass(frozen=True)
class Models:
    """A target and its draft, with their tokenizer."""

    target: Model
    draft: Model
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, folder: Path) -> Models:
        """The checkpoints ``target`` and ``draft`` in a folder, in float32."""
        target, draft = (
            AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
            for name in ("target", "draft")
        )
        tokenizer = AutoTokenizer.from_pretrained(folder / "target")
        return cls(HuggingFace(target), HuggingFace(draft), tokenizer)

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Chat messages as the token ids that an answer follows."""
        chat = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return chat["input_ids"]

    def text(self, tokens: list[int]) -> str:
        """An answer's text, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@torch.inference_mode()
def run(
    models: Models,
    prompt_ids: Sequence[int],
    setting: Setting,
    temperature: float,
    generator: torch.Generator,
    *,
    max_new_tokens: int = 160,
    retained: list[int] | None = None,
) -> Outcome:
    """One SMC run, or a conditional one given the text ``retained``.

    Args:
        retained: a complete answer, up to and including EOS or ``max_new_tokens`` long. The run
            still ends with a draw by weight, so its answer may be another one; from x ~ p it is
            again a sample of p (particle Gibbs).
    """
    smc = _Run(models, prompt_ids, setting, temperature, generator, max_new_tokens, retained)
    while not bool(smc.ended().all()):
        smc.round()
    return smc.outcome()


@torch.inference_mode()
def ancestral(
    model: Model,
    prompt_ids: Sequence[int],
    eos: int,
    temperature: float,
    generator: torch.Generator,
    *,
    max_new_tokens: int = 160,
) -> list[int]:
    """An exact sample of one model, token by token, up to and including EOS or the limit."""
    rows = model.read(prompt_ids, 1)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and eos not in tokens:
        log_probs = rows.log_probs(torch.tensor([tokens], dtype=torch.int64), 1, temperature)
        uniform = torch.rand(1, dtype=torch.float64, generator=generator)
        tokens.append(int(sample(log_probs[:, 0], uniform)))
    return tokens


class _Run:
    """The particles of one run.

    texts        [N, T] int64; what stands behind a particle's EOS or the limit means nothing
    log_weights  [N] float64
    slot         where the retained particle is, in a conditional run
    """

    def __init__(
        self,
        models: Models,
        prompt_ids: Sequence[int],
        setting: Setting,
        temperature: float,
        generator: torch.Generator,
        max_new_tokens: int,
        retained: list[int] | None,
    ) -> None:
        num_particles = setting.num_particles
        self.target = models.target.read(prompt_ids, num_particles)
        self.draft = models.draft.read(prompt_ids, num_particles)
        self.eos = models.tokenizer.eos_token_id
        self.setting, self.temperature, self.generator = setting, temperature, generator
        self.limit, self.retained = max_new_tokens, retained
        self.slot = int(torch.randint(num_particles, (), generator=generator))
        self.log_weights = torch.zeros(num_particles, dtype=torch.float64)
        self.log_evidence, self.num_resampled = 0.0, 0
        self.ess: list[float] = []
        self.texts = self._first_tokens()

    def round(self) -> None:
        """Draft, score, weigh, resample where needed, and add a token of the target's."""
        K, before = self.setting.num_steps, self.texts.shape[1]
        log_q = self._propose()
        log_p = self.target.log_probs(self.texts, K + 1, self.temperature)
        running = self._weigh(log_p, log_q)
        columns, low = self._stop(running)
        self.texts = self.texts[:, : before + columns]
        self.log_weights = running[:, columns]
        next_log_p = log_p[:, columns]
        if low:
            ancestors = self._resample()
            next_log_p = next_log_p[ancestors]
        self._append(self._draw(next_log_p))

    def ended(self) -> torch.Tensor:
        """Which texts are complete, ``[N]`` bool."""
        at_limit = self.texts.shape[1] >= self.limit
        return self.texts.eq(self.eos).any(1) | at_limit

    def outcome(self) -> Outcome:
        """One particle drawn by weight, and what the run tells of itself."""
        chosen = int(normalized(self.log_weights).multinomial(1, generator=self.generator))
        tokens = self.texts[chosen, : self.limit].tolist()
        if self.eos in tokens:
            tokens = tokens[: tokens.index(self.eos) + 1]
        num_rounds = len(self.ess)
        mean_ess = sum(self.ess) / num_rounds if num_rounds else float("nan")
        log_evidence = self.log_evidence + float(log_mean_exp(self.log_weights))
        return Outcome(tokens, log_evidence, num_rounds, self.num_resampled, mean_ess)

    def _first_tokens(self) -> torch.Tensor:
        """One token from p for all, ``[N, 1]``."""
        self.texts = torch.empty(self.setting.num_particles, 0, dtype=torch.int64)
        log_p = self.target.log_probs(self.texts, 1, self.temperature)[:, 0]
        return self._draw(log_p)[self.slot].expand(self.setting.num_particles).unsqueeze(1)

    def _propose(self) -> torch.Tensor:
        """Append K tokens from q; their log q, ``[N, K]``."""
        drawn = []
        for _ in range(self.setting.num_steps):
            log_q = self.draft.log_probs(self.texts, 1, self.temperature)[:, 0]
            tokens = self._draw(log_q)
            drawn.append(token_log_probs(log_q, tokens))
            self._append(tokens)
        return torch.stack(drawn, dim=1)

    def _weigh(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """Log-weights after 0 to K drafted tokens ``[N, K + 1]``; no gain behind the end."""
        K, length = self.setting.num_steps, self.texts.shape[1]
        scored = token_log_probs(log_p[:, :-1], self.texts[:, -K:])
        has_eos = self.texts.eq(self.eos).cumsum(1)[:, -K - 1 : -1] > 0  # before each draft
        at_limit = torch.arange(length - K, length) >= self.limit
        gains = torch.where(has_eos | at_limit, 0.0, scored - log_q)
        return torch.cat([self.log_weights.unsqueeze(1), gains], dim=1).cumsum(1)

    def _stop(self, running: torch.Tensor) -> tuple[int, bool]:
        """How many columns to keep of ``[N, K + 1]`` weights, and whether to resample there."""
        K, N = self.setting.num_steps, self.setting.num_particles
        ess = effective_sample_size(running.T).tolist()  # [K + 1]
        looked_at = range(1, K + 1) if self.setting.resample_at == "token" else [K]
        low = [column for column in looked_at if ess[column] < self.setting.ess_threshold * N]
        columns = low[0] if low else K
        self.ess.append(ess[columns])
        return columns, bool(low)

    def _resample(self) -> torch.Tensor:
        """Bank the mean weight and draw ancestors ``[N]``."""
        self.log_evidence += float(log_mean_exp(self.log_weights))
        self.num_resampled += 1
        weights = normalized(self.log_weights)
        if self.retained is None:
            ancestors = SCHEMES[self.setting.resampling_method](
                weights, self._uniforms(len(weights))
            )
        else:
            ancestors = self._resample_retained(weights)
        self.texts = self.texts[ancestors]
        self.log_weights = torch.zeros_like(weights)
        self.target.reorder(ancestors)
        self.draft.reorder(ancestors)
        return ancestors

    def _resample_retained(self, weights: torch.Tensor) -> torch.Tensor:
        """Ancestors given that the retained particle is one of them, and its new slot.

        Its line goes through a given slot of a given draw with probability (offspring / N) times
        (1 / offspring), so a draw is accepted in proportion to its offspring. With x ~ p, N draws
        are needed on average whatever the weights, as its slot then follows the weights.
        """
        N = len(weights)
        scheme = SCHEMES[self.setting.resampling_method]
        while True:
            draws = scheme(weights.expand(_TRIALS, N), self._uniforms(_TRIALS, N))
            offspring = (draws == self.slot).sum(1)
            accept = (self._uniforms(_TRIALS) * N < offspring).nonzero().flatten()
            if len(accept):
                break
        ancestors = draws[accept[0]]
        slots = (ancestors == self.slot).nonzero().flatten()
        self.slot = int(slots[torch.randint(len(slots), (), generator=self.generator)])
        return ancestors

    def _draw(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Each text's next token, ``[N, V]`` to ``[N]``; the retained text's is what it says."""
        at = self.texts.shape[1]
        if self.retained is None or at >= len(self.retained):
            return sample(log_probs, self._points(None))
        token = self.retained[at]
        tokens = sample(log_probs, self._points(self._point_within(log_probs[self.slot], token)))
        tokens[self.slot] = token  # whatever was rounded
        return tokens

    def _point_within(self, log_probs: torch.Tensor, token: int) -> torch.Tensor:
        """A uniform point of the inverse distribution function that gives ``token``."""
        probs = log_probs.exp()
        return probs[:token].sum() + probs[token] * self._uniforms(1)[0]

    def _points(self, retained_point: torch.Tensor | None) -> torch.Tensor:
        """A uniform for each particle, ``[N]``; with one text, if stratified, spread evenly."""
        N = self.setting.num_particles
        same = torch.eye(N, dtype=torch.bool)
        if self.setting.stratified:
            same = (self.texts.unsqueeze(1) == self.texts).all(-1)  # [N, N]
        share = same.tril(-1).sum(1) / same.sum(1).double()  # r / m
        shift = self._uniforms(N)[same.long().argmax(1)]  # that of the first with this text
        if retained_point is not None:
            shift[same[self.slot]] = retained_point - share[self.slot]
        return (shift + share) % 1.0

    def _append(self, tokens: torch.Tensor) -> None:
        self.texts = torch.cat([self.texts, tokens.unsqueeze(1)], dim=1)

    def _uniforms(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=self.generator)
