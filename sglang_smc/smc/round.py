"""Play rounds of SMC speculative decoding over any two models: the library.

    rounds = Round(target, proposer, num_steps=4, stop_tokens=(2,), max_new_tokens=64)
    answer = rounds.run(prompt, num_particles=8, seed=1)

or round after round, of many prompts at once:

    state = rounds.begin(prompts, num_particles=8)
    while not state.population.ended.all():
        state, decision = rounds.step(state, seeds)

`sglang_smc.library` makes a `Round` of two Hugging Face models.

A server's round (`sglang_smc.round.play`) takes the same `steps`, with KV slots, logit edits, rules
that read text, and tokens that are emitted before a text has ended; its texts are the same.
"""

import html
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from sglang_smc.smc import steps
from sglang_smc.smc.deciding import Decider, Plain, Weigh
from sglang_smc.smc.fidelity import NAMES
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import NO_TAIL, Narrowed, Population
from sglang_smc.smc.settings import BatchSettings, Need
from sglang_smc.smc.steps import Batch
from sglang_smc.smc.weighing import SCHEMES, Decision, normalized

_NEEDS = frozenset({Need.VERIFIES, Need.EXTENDS, Need.POWER})  # of any decider


class Proposer(Protocol):
    """Provide logits of q, from which drafts are sampled."""

    def next_logits(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[R, V]`` of the token that follows each text.

        Args:
            texts: ``[R, L]`` int64, of which only the first ``lengths`` ``[R]`` tokens count.
        """
        ...


class Target(Protocol):
    """Provide logits of p, of which answers should be samples."""

    def chain_logits(
        self, texts: torch.Tensor, lengths: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        """Return the logits ``[R, C, V]`` behind each of the last ``num_columns`` tokens of texts.

        The other arguments are as for `Proposer.next_logits`.
        """
        ...


class Tokenizer(Protocol):
    """Convert between texts and tokens."""

    def encode(self, prompt: Any) -> list[int]:
        """Return the tokens of a prompt, in whatever form the caller of `Round.run` gives it."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the text of an answer's tokens."""
        ...


class Answer(NamedTuple):
    """N weighted samples of the target's answer to one prompt, and one that is drawn from them."""

    tokens: list[list[int]]  # of each particle
    texts: list[str] | None  # of each particle; None without a tokenizer
    weights: torch.Tensor  # [N] float64, normalised; equal where the decider verifies
    drawn: int  # the particle that is drawn by weight: the answer
    log_evidence: float  # log Z-hat, an estimate of the log of the target's normaliser
    ess: list[float]  # effective sample size of each round, before resampling, from 1 to N

    @property
    def text(self) -> str:
        """Return the text that is drawn; raise ValueError without a tokenizer."""
        if self.texts is None:
            raise ValueError("The round has no tokenizer; read `tokens`, or give it one.")
        return self.texts[self.drawn]

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds, of one pass of the target each."""
        return len(self.ess)

    @property
    def tokens_per_pass(self) -> float:
        """Return the tokens of the drawn answer over the target's passes."""
        return len(self.tokens[self.drawn]) / self.num_rounds

    def _repr_html_(self) -> str:
        """Return the particles as a table for a notebook, the heaviest first."""
        shown = self.texts or [str(tokens) for tokens in self.tokens]
        order = self.weights.argsort(descending=True).tolist()
        rows = "".join(
            f"<tr><td>{self.weights[place]:.3f}</td>"
            f"<td style='text-align:left'>{html.escape(shown[place])}</td></tr>"
            for place in order
        )
        figures = f"log Z {self.log_evidence:.2f}, {self.tokens_per_pass:.2f} tokens a target pass"
        return f"<table><tr><th>weight</th><th>{figures}</th></tr>{rows}</table>"


class State(NamedTuple):
    """Particles between rounds."""

    prompts: torch.Tensor  # [G, P] int64
    population: Population  # whose tails are all that was generated

    def texts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the texts of all particles ``[G * N, L]``, and their lengths ``[G * N]``."""
        tails = self.population.texts[:, :, 1:]
        lengths = self.population.lengths
        prompts = self.prompts[:, :-1].unsqueeze(1).expand(-1, tails.shape[1], -1)
        texts = torch.cat([prompts, tails], 2).flatten(0, 1)
        return texts, (lengths + self.prompts.shape[1]).flatten()

    def grown(self, tokens: torch.Tensor) -> "State":
        """Return the particles with all of ``tokens`` ``[G, N, J]`` appended."""
        counts = torch.full_like(self.population.lengths, tokens.shape[2])
        return self._replace(population=self.population.append(tokens, counts))


@dataclass(frozen=True)
class Round:
    """Rounds of requests with the same options."""

    target: Target
    proposer: Proposer
    decider: Decider = field(default_factory=Weigh)
    num_steps: int = 4  # K: draft tokens of a round
    max_new_tokens: int = 64
    stop_tokens: tuple[int, ...] = ()
    temperature: float = 1.0
    draft_temperature: float | None = None  # None: that of the target
    power: float = 1.0  # the target distribution is raised to it
    ess_threshold: float = 0.5
    evidence_threshold: float = 0.5  # c; infinite: verification alone decides
    resample_each_token: bool = False
    scheme: str = "systematic"  # of `SCHEMES`
    ops: Ops = field(default_factory=Ops)
    tokenizer: Tokenizer | None = None  # for `run`; None: prompts and answers are tokens

    def __post_init__(self) -> None:
        """Raise ValueError for a temperature or a scheme that there is not."""
        if min(self.temperature, self.draft_temperature or 1.0) <= 0:
            raise ValueError(
                "A temperature is 0 or less; allowed: above 0. For the target's own "
                "likeliest text use a small one, as 0.01."
            )
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme is {self.scheme!r}; allowed: {', '.join(SCHEMES)}.")

    def run(self, prompt: Any, num_particles: int = 8, seed: int = 0) -> Answer:
        """Answer one prompt: rounds of N particles until all have ended.

        Args:
            prompt: what `tokenizer` encodes; without one ``[P]`` int64 tokens, at least two.
            seed: fixes the answer.

        Raises ValueError for a prompt of fewer than two tokens.
        """
        tokens = prompt if self.tokenizer is None else torch.tensor(self.tokenizer.encode(prompt))
        if len(tokens) < 2:
            raise ValueError(f"The prompt has {len(tokens)} tokens; allowed: two or more.")
        seeds = torch.tensor([seed], device=tokens.device)
        state = self.begin(tokens.unsqueeze(0), num_particles)
        ess: list[float] = []
        while True:
            after, end, decision = self._advance(state, seeds)
            ess.append(float(decision.ess))
            if after.is_finished().all():
                return self._answer(after, end, ess)
            state = State(state.prompts, end.population)

    def _answer(self, after: Population, end: Narrowed, ess: list[float]) -> Answer:
        """Return the particles of one group before its answer is drawn.

        Args:
            end: with the draw.
        """
        lengths = after.lengths[0].tolist()
        tails = zip(after.tokens[0].tolist(), lengths, strict=True)
        tokens = [tail[:length] for tail, length in tails]
        decode = None if self.tokenizer is None else self.tokenizer.decode
        return Answer(
            tokens=tokens,
            texts=None if decode is None else [decode(each) for each in tokens],
            weights=normalized(after.log_weights[0]),
            drawn=int(end.ancestors[0, 0]),
            log_evidence=float(end.log_evidence),
            ess=ess,
        )

    def begin(self, prompts: torch.Tensor, num_particles: int, num_emitted: int = 0) -> State:
        """Return N equal particles of each prompt, ``[G, P]`` int64.

        Args:
            num_emitted: tokens at the end of the prompts that count as output.
        """
        size = len(prompts)
        device = prompts.device
        width = NO_TAIL + self.max_new_tokens + self.num_steps
        texts = torch.zeros(size, num_particles, width, dtype=torch.int64, device=device)
        texts[:, :, :2] = prompts[:, -2:].unsqueeze(1)
        none = torch.zeros_like(texts[:, :, 0])  # [G, N]
        population = self.ops.population(
            texts=texts,
            lengths=none,
            ended=none.bool(),
            log_weights=none.double(),
            num_emitted=none[:, 0] + num_emitted,
            log_evidence=none[:, 0].double(),
            present=none == 0,
            roots=torch.arange(num_particles, device=device).expand_as(none),
            unread=none[:, 0].bool(),
            fidelity=none.double().unsqueeze(2).expand(-1, -1, len(NAMES)),
        )
        return State(prompts, population)

    def step(self, state: State, seeds: torch.Tensor) -> tuple[State, Decision]:
        """Advance all particles by a round; where all have ended, one is drawn for all.

        Args:
            seeds: ``[G]`` int64 of the requests, the same in all rounds.

        Raises ValueError where a model's logits are NaN or infinite.
        """
        after, end, decision = self._advance(state, seeds)
        finished = after.is_finished()
        population = end.population._replace(
            log_weights=torch.where(finished.unsqueeze(1), 0.0, end.population.log_weights),
            log_evidence=torch.where(finished, end.log_evidence, after.log_evidence),
        )
        return State(state.prompts, population), decision

    def _advance(self, state: State, seeds: torch.Tensor) -> tuple[Population, Narrowed, Decision]:
        """Return the particles after a round, and after the draw of finished answers."""
        before = state.population
        settings = self._settings(seeds, before.lengths.shape[1])
        num_steps = self.num_steps
        position = before.round_position
        batch = Batch(
            ops=self.ops,
            draft=_WholeTexts(self.proposer, state),
            settings=settings._replace(seeds=self.ops.round_seeds(seeds, position[:, 0])),
            needs=_NEEDS,
            deciders=(self.decider if num_steps else Plain(),),
            num_steps=num_steps,
            output_lengths=before.output_lengths,
            position=position.expand_as(before.lengths),
            last_two=before.last_two,
            may_stratify=before.present & settings.weighs.unsqueeze(1),
            extends=settings.extends if num_steps else None,
            ends=self._ends,
        )
        drafts = steps.propose(batch, before) if num_steps else steps.read_last(batch, before)
        logits = self.target.chain_logits(*state.grown(drafts.tokens).texts(), num_steps + 1)
        p, log_p = steps.score(batch, drafts, logits.unflatten(0, before.lengths.shape))
        failure = steps.failure_of_round(log_p, drafts, ~before.ended)
        if failure.any():
            raise ValueError("A model's logits are NaN or infinite; allowed: finite or -inf.")
        decision, next_tokens = steps.decide(batch, before, drafts, p, log_p)
        extended = steps.extend(batch, before, drafts, decision)
        after = steps.add_bonus(batch, extended, next_tokens, failure)
        after = steps.measure(batch, before, after, decision.ancestors, p, drafts)
        return after, steps.narrow(batch, after), decision

    def _settings(self, seeds: torch.Tensor, num_particles: int) -> BatchSettings:
        draft_temperature = self.draft_temperature or self.temperature
        return BatchSettings.alike(
            seeds,
            temperature=self.temperature,
            greedy=False,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            last_position=self.max_new_tokens - 1,
            min_new_tokens=0,
            may_stop=False,  # `_ends` says where a text ends
            draft_temperature=draft_temperature,
            own_temperature=draft_temperature,
            least_temperature=draft_temperature,
            num_particles=num_particles,
            num_steps=self.num_steps,
            weighs=self.decider.weighs,
            extends=self.decider.extends,
            ess_threshold=self.ess_threshold,
            scheme=SCHEMES.index(self.scheme),
            resample_each_token=self.resample_each_token,
            heaviest=False,
            lag=self.max_new_tokens + self.num_steps,  # more than any text is long
            power=self.power,
            measured=self.power == 1.0,
            evidence_threshold=self.evidence_threshold,
        )

    def _ends(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return whether a text ends with each token, in their shape, bool."""
        stops = torch.tensor(self.stop_tokens, dtype=torch.int64, device=tokens.device)
        return torch.isin(tokens, stops) | (positions >= self.max_new_tokens - 1)


@dataclass
class _WholeTexts:
    """A proposer as `steps.Draft`, which reads texts as a whole, and no KV."""

    proposer: Proposer
    state: State  # with the tokens that it has drawn

    def first_logits(self, last_two: torch.Tensor, at: None) -> torch.Tensor:
        return self.proposer.next_logits(*self.state.texts()).unflatten(0, last_two.shape[:2])

    def next_logits(self, step: int, tokens: torch.Tensor, at: None) -> torch.Tensor:
        self.state = self.state.grown(tokens.unsqueeze(2))
        return self.first_logits(tokens, at)

    def read_without_logits(self, last_two: torch.Tensor, at: None) -> None: ...
