"""The package's own rounds over toy models that read their KV through the ledger's slots.

A toy model remembers the token that was written to each slot. Its logits follow from all the
tokens that a particle's row of `req_to_token` leads to, so a wrong slot anywhere in the prefix
changes what it predicts, and with it the law of the output.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from toy_request import PROMPT, ToyRequest

from sglang_smc import upstream
from sglang_smc.kv import arena
from sglang_smc.kv.unread import UnreadSlots
from sglang_smc.models.chains import Chains
from sglang_smc.ops import TORCH
from sglang_smc.ops.cpu_ops import CPU
from sglang_smc.options.request import Budget, config_of
from sglang_smc.options.server import SMCConfig
from sglang_smc.potentials.runner import PotentialRunner
from sglang_smc.proposers.base import LanguageModel
from sglang_smc.proposers.ngram import Corpus
from sglang_smc.round.batch import Tables
from sglang_smc.round.particles import particles_of
from sglang_smc.round.play import ServedRound
from sglang_smc.round.prefill import Prefill
from sglang_smc.rules import registry
from sglang_smc.smc.ledger import KVLocations
from sglang_smc.smc.ops import Ops
from sglang_smc.state.metrics import Counters, Monitor, fidelity_of
from sglang_smc.state.request import RequestStates, state_of
from sglang_smc.state.texts import has_open_token
from sglang_smc.worker import SMCWorker

NUM_CONTEXTS = 97


class Language(NamedTuple):
    """A next-token table per context; a context is a hash of the whole text."""

    logits: torch.Tensor  # [NUM_CONTEXTS, V]

    @staticmethod
    def contexts(texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Contexts ``[R]`` of the first ``lengths`` tokens of ``texts`` ``[R, width]``."""
        place = torch.arange(texts.shape[1], device=texts.device)
        read = torch.where(place < lengths.unsqueeze(1), Language.terms(texts, place), 0)
        return read.sum(1) % NUM_CONTEXTS

    @staticmethod
    def terms(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What tokens add to the context of a text."""
        return (tokens + 1) * ((places * 31 + 7) ** 2 % NUM_CONTEXTS)

    def after(self, output: tuple[int, ...]) -> torch.Tensor:
        text = torch.tensor([[*PROMPT, *output]], device=self.logits.device)
        length = torch.full_like(text[:, 0], text.shape[1])
        return self.logits[self.contexts(text, length)].squeeze(0)


class SlotModel:
    """Stands in for `ParticleForward`: same calls, KV in the same slots."""

    attn_backend: Any = None
    tails: torch.Tensor  # the particles' rows, set with the tables

    def __init__(self, language: Language, rows: torch.Tensor, num_slots: int) -> None:
        self.language = language
        self._table = rows
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=rows.device)  # the KV

    def prefill(self, slots: torch.Tensor) -> None:
        self._tokens[slots] = torch.tensor(PROMPT, device=slots.device).expand_as(slots)

    def read_on(self, slots: torch.Tensor, text: list[int]) -> None:
        """Write the KV of the end of a text, which other slots have the beginning of."""
        self._tokens[slots] = torch.tensor(text[-len(slots) :], device=slots.device)

    def next_logits(self, chains: Chains) -> torch.Tensor:
        return self.chain_logits(chains)[:, :, -1]

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        """As models in plain torch do, run the first row of each slot in place of the others."""
        slots = chains.slots.flatten(1)  # [G, N * C]
        itself = torch.arange(slots.shape[1], device=slots.device)
        first = (slots.unsqueeze(1) == slots.unsqueeze(2)).byte().argmax(2).where(slots > 0, itself)
        self._tokens[slots] = chains.tokens.flatten(1).gather(1, first)
        contexts = self.contexts(chains).flatten(1).gather(1, first)
        return self.language.logits[contexts.view_as(chains.tokens)]

    def contexts(self, chains: Chains) -> torch.Tensor:
        """Contexts ``[G, N, C]`` of the texts up to each token of a chain."""
        num_columns = chains.tokens.shape[2]
        read = self.texts(chains.locations)
        read = read.unsqueeze(2).expand(-1, -1, num_columns, -1).flatten(0, 2)
        ends = chains.starts.unsqueeze(2) + torch.arange(1, 1 + num_columns, device=read.device)
        return Language.contexts(read, ends.flatten()).view(chains.tokens.shape)

    def texts(self, locations: KVLocations) -> torch.Tensor:
        """The tokens in the slots of each particle, ``[G, N, width]``; none of a text is stale."""
        return self._tokens[self.slots_of(locations)]

    def slots_of(self, locations: KVLocations) -> torch.Tensor:
        """Return the slots that each particle reads, ``[G, N, width]``."""
        place = torch.arange(self._table.shape[1], device=self._table.device)
        in_prefix = place < locations.committed.view(-1, 1, 1)
        prefix = self._table[locations.rows.unsqueeze(1)]
        tails = self.tails[locations.particle_rows][..., place % self.tails.shape[1]]
        return torch.where(in_prefix, prefix, tails).long()


class Outcome(NamedTuple):
    outputs: torch.Tensor  # [G, L]; after EOS, EOS
    log_evidence: torch.Tensor  # [G]
    num_narrowed: int
    num_emitted_early: int  # tokens emitted before a request's last round
    num_rounds: int  # of all requests together, as all that follow
    num_tokens: int  # that rounds made
    num_resampled: int
    num_all_zero: int
    fidelity: torch.Tensor  # [G, 4]


class ToyDraft(LanguageModel):
    """A draft model over a toy's slots, which reads texts that rounds have skipped."""

    def read_prompts(self, batch: Any, target: Any, states: Any) -> torch.Tensor:
        toy: Any = self.forward
        slots = batch.out_cache_loc.split(batch.extend_lens)
        for req, start, own in zip(batch.reqs, batch.prefix_lens, slots, strict=True):
            text = [*req.origin_input_ids, *req.output_ids]
            toy.read_on(own, text[: start + len(own)])
        return torch.empty(0)


class ToyWorker:
    """Requests with one prompt, all in one table, each in its own row and with its own seed.

    Row r asks for ``chosen[(r - 1) % len(chosen)]`` as its `custom_params["smc"]`, and for
    ``asked``, or one of several in turn: sampling parameters and a processor. Each has the grammar
    that ``grammar()`` makes for it, and ``runners`` query its potentials. The i-th round is bounded
    by ``budgets[i % len(budgets)]``. Tables are where the target's language is.
    """

    Model = SlotModel

    def __init__(
        self,
        config: SMCConfig,
        target: Language,
        draft: Language,
        *,
        num_requests: int,
        max_new_tokens: int,
        eos: int,
        chosen: tuple[dict[str, Any], ...] = ({},),
        budgets: tuple[Budget | None, ...] = (None,),
        grammar: Callable[[], Any] = lambda: None,
        asked: dict[str, Any] | tuple[dict[str, Any], ...] | None = None,
        ops: Ops = CPU,
        corpus: Corpus | None = None,
        runners: Mapping[str, PotentialRunner] = MappingProxyType({}),
    ) -> None:
        self.ops = ops
        self.grammar = grammar
        self.corpus = corpus
        self.runners = runners
        self.asked = asked if isinstance(asked, tuple) else (asked or {},)
        if config.adaptive == "auto":
            config = replace(config, adaptive="off" if budgets == (None,) else "on")
        self.config = config
        self.limit = max_new_tokens
        self.eos = eos
        self.chosen = chosen
        self.budgets = budgets
        self.num_reserved = 0
        width = len(PROMPT) + max_new_tokens + arena.max_arena(config)
        num_slots = 1 + num_requests * width
        device = target.logits.device
        self.table = torch.zeros(1 + num_requests, width, dtype=torch.int32, device=device)
        # Every request owns its slots from the start, scattered over the pool.
        generator = torch.Generator().manual_seed(0)
        shuffled = torch.randperm(num_slots - 1, generator=generator) + 1
        self.owned = shuffled.view(num_requests, width).int().to(device)
        self.table[1 : 1 + num_requests] = self.owned
        longest = len(PROMPT) + max_new_tokens + config.num_steps + 1
        self.target = self.Model(target, self.table[:, :longest], num_slots)
        self.draft = self.Model(draft, self.table[:, :longest], num_slots)
        for model in (self.target, self.draft):
            model.prefill(self.table[1 : 1 + num_requests, : len(PROMPT)].long())
        self.device = str(self.table.device)
        self.worker = self._make_worker(num_slots)

    def _make_worker(self, num_slots: int) -> SMCWorker:
        worker = SMCWorker.__new__(SMCWorker)
        config = self.config
        worker.config = config
        worker.device = self.device
        room: Any = {"num_slots": num_slots, "vocab_size": self.vocab_size, "device": self.device}
        worker._tables = tables = Tables.of(config, self.ops, self.table, **room)
        models: Any = self.target, self.draft
        nobody: Any = None
        for model in models:
            model.tails = tables.ledger.tails
        drafts = ToyDraft(models[1], nobody)
        worker._corpus = self.corpus
        worker._round = ServedRound(models[0], drafts, tables, self.corpus)
        worker._states = RequestStates(config, random_seed=0, runners=self.runners)
        # Nothing of `Prefill.run` is called here but `begin`.
        of_torch = tables._replace(ops=TORCH)
        unread = UnreadSlots(self.table, num_slots)
        worker._prefill = Prefill(nobody, drafts, worker._states, of_torch, nobody, unread)
        worker.monitor = Monitor(40)
        return worker

    @property
    def vocab_size(self) -> int:
        return self.target.language.logits.shape[1]

    def run(self, rows: list[int]) -> Outcome:
        reqs = self.begin(rows)
        emitted_in_last = dict.fromkeys(rows, 0)
        num_rounds = 0
        while running := [req for req in reqs if not self._is_over(req)]:
            num_rounds += len(running)
            for req, new in zip(running, self.step(running), strict=True):
                emitted_in_last[req.row] = len(new)
        counted = [Counters._make(req.smc_state.counters) for req in reqs]
        evidence = self.tensor([counters.log_evidence for counters in counted])
        evidence = evidence.masked_fill(self.tensor([req.is_stuck for req in reqs]), -math.inf)
        totals = Counters(*map(sum, zip(*counted, strict=True)))  # type: ignore[arg-type]
        texts = [req.output_ids for req in reqs]
        padded = [text + [self.eos] * (self.limit - len(text)) for text in texts]
        num_tokens = sum(map(len, texts)) - len(texts)
        return Outcome(
            outputs=self.tensor(padded),
            log_evidence=evidence,
            num_narrowed=int(totals.narrow_ct),
            num_emitted_early=num_tokens - sum(emitted_in_last.values()),
            num_rounds=num_rounds,
            num_tokens=num_tokens,
            num_resampled=int(totals.resample_ct),
            num_all_zero=int(totals.all_zero_ct),
            fidelity=fidelity_of(self.tensor([req.smc_state.counters for req in reqs])),
        )

    def step(self, reqs: list[ToyRequest]) -> list[list[int]]:
        """A round, and what each request emits."""
        result = self.play_round(reqs)
        return [self.take(result, group, req) for group, req in enumerate(reqs)]

    def take(self, result: Any, group: int, req: ToyRequest) -> list[int]:
        """Book what a round says of a request, as SGLang and `SMCBatchResult.resolve` do."""
        outcome = result.outcome
        if (particles := outcome.extras.get("return_particles")) is not None:
            req.particles = particles_of(req, particles, group)  # type: ignore[arg-type]
        state = req.smc_state
        firsts = outcome.first_tokens
        if has_open_token(req) and (token := int(firsts[group])) >= 0:  # type: ignore[arg-type]
            registry.close_token(req, token)  # type: ignore[arg-type]
        state.take(outcome.counters[group].tolist(), replayed=False)
        count = 0 if req.is_stuck else int(result.accept_lens[group])
        new = result.next_token_ids.view(len(result.accept_lens), -1)[group, :count].tolist()
        if (traced := outcome.extras.get("trace")) is not None and state.config.trace:
            state.rounds.append(traced.traced_round(group, state, new, state.counters[-1]))
        state.open_token.take()
        req.say(new)
        req.kv_committed_len += len(new)
        return new

    def check_owned(self) -> None:
        """Check that each request owns the slots that it began with, once, and nobody else's."""
        found = self.table[1 : 1 + len(self.owned)]
        assert torch.equal(found.sort(1).values, self.owned.sort(1).values)
        assert not self.table[0].any(), "SGLang's padding row was written to"

    def _is_over(self, req: ToyRequest) -> bool:
        if req.is_stuck:
            return True
        if has_open_token(req):  # type: ignore[arg-type]
            return False
        return req.output_ids[-1] == self.eos or len(req.output_ids) >= self.limit

    def tensor(self, values: list[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def begin(self, rows: list[int]) -> list[Any]:
        """Prefill: the package's own, behind the target's logits."""
        reqs = [self.make_request(row) for row in rows]
        self.prefill(reqs)
        return reqs

    def prefill(self, reqs: list[Any], output_ids: tuple[int, ...] = ()) -> None:
        """Begin particles behind the prompt and an output."""
        logits = self.target.language.after(output_ids).expand(len(reqs), -1)
        self.first_output = output = LogitsProcessorOutput(next_token_logits=logits)
        tokens, _ = self.worker._prefill.begin(self.batch(reqs), output, None, None)
        for req, token in zip(reqs, tokens.tolist(), strict=True):
            req.say([token])

    def make_request(self, row: int) -> ToyRequest:
        """Return the request of a row, whose seed is its row's number."""
        smc = self.chosen[(row - 1) % len(self.chosen)]
        asked = {"custom_params": {"smc": smc}, "stop_token_ids": [self.eos], "sampling_seed": row}
        asked |= self.asked[(row - 1) % len(self.asked)]
        req = ToyRequest(row, self.vocab_size, self.limit, asked, self.grammar())
        # Budgets bound those without a seed.
        req.smc_config = replace(config_of(self.config, req), seeded=False)
        return req

    def play_round(self, reqs: list[ToyRequest]) -> Any:
        """Reserve memory as the scheduler does, then the worker's own round."""
        self.reserve(reqs)
        return self.worker.launch_round(self.batch(reqs))

    def reserve(self, reqs: list[Any]) -> None:
        budget = self.budgets[self.num_reserved % len(self.budgets)]
        self.num_reserved += 1
        for req in reqs:
            state = state_of(req)
            committed = upstream.kv_of(req).kv_committed_len
            wanted = committed + arena.arena(state.span(budget), arena.remaining(req))
            state.step_to(budget)
            state.arena = committed, max(state.arena[1], wanted)

    def batch(self, reqs: list[Any]) -> Any:
        """What of SGLang's `ScheduleBatch` a round looks at."""
        held = [upstream.kv_of(req) for req in reqs]
        return SimpleNamespace(
            reqs=reqs,
            req_pool_indices=self.tensor([kv.req_pool_idx for kv in held]),
            seq_lens=self.tensor([kv.kv_committed_len for kv in held]),
            return_logprob=False,
        )
