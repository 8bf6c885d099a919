"""The package's own rounds over toy models that read their KV through the ledger's slots.

A toy model remembers the token that was written to each slot. Its logits follow from all the
tokens that a particle's row of `req_to_token` leads to, so a wrong slot anywhere in the prefix
changes what it predicts, and with it the law of the output.
"""

from types import SimpleNamespace
from typing import NamedTuple

import torch

from sglang_smc import memory
from sglang_smc.config import SMCConfig
from sglang_smc.ledger import Ledger
from sglang_smc.particles import ParticleTable, Population
from sglang_smc.sampling import RequestSpec, RequestTable
from sglang_smc.smc.rounds import Cut
from sglang_smc.steps import Groups, Steps

PROMPT = (1, 0)
NUM_CONTEXTS = 97


class Language(NamedTuple):
    """A next-token table per context; a context is a hash of the whole text."""

    logits: torch.Tensor  # [NUM_CONTEXTS, V]

    @staticmethod
    def contexts(texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Contexts ``[R]`` of the first ``lengths`` tokens of ``texts`` ``[R, width]``."""
        place = torch.arange(texts.shape[1])
        factors = (place * 31 + 7) ** 2 % NUM_CONTEXTS
        terms = torch.where(place < lengths.unsqueeze(1), (texts + 1) * factors, 0)
        return terms.sum(1) % NUM_CONTEXTS

    def after(self, output: tuple[int, ...]) -> torch.Tensor:
        text = torch.tensor([[*PROMPT, *output]])
        return self.logits[self.contexts(text, torch.tensor([text.shape[1]]))[0]]


class SlotModel:
    """Stands in for `ParticleForward`: same calls, KV in the same slots."""

    def __init__(self, language: Language, rows: torch.Tensor, num_slots: int) -> None:
        self.language = language
        self._table = rows
        self._tokens = torch.zeros(num_slots, dtype=torch.int64)  # the KV

    def prefill(self, slots: torch.Tensor) -> None:
        self._tokens[slots] = torch.tensor(PROMPT).expand_as(slots)

    def decode(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        self._tokens[slots.long()] = tokens
        read = self._tokens[self._table[rows].long()]
        return self.language.logits[Language.contexts(read, positions + 1)]

    def verify(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        columns = [
            self.decode(tokens[:, i], rows, positions + i, slots[:, i])
            for i in range(tokens.shape[1])
        ]
        return torch.stack(columns, dim=1)


class Outcome(NamedTuple):
    outputs: torch.Tensor  # [G, L]; after EOS, EOS
    log_evidence: torch.Tensor  # [G]
    num_forced: int
    num_emitted_early: int  # tokens emitted before a request's last round


class ToyWorker:
    """Requests with one prompt, all in one table, each in its own row and with its own seed."""

    def __init__(
        self,
        config: SMCConfig,
        target: Language,
        draft: Language,
        *,
        num_requests: int,
        max_new_tokens: int,
        eos: int,
    ) -> None:
        self.config, self.limit, self.eos = config, max_new_tokens, eos
        width = len(PROMPT) + max_new_tokens + memory.max_arena(config)
        num_slots = 1 + num_requests * width
        self.table = torch.zeros(
            (1 + num_requests) * (1 + config.num_particles), width, dtype=torch.int32
        )
        # Every request owns its slots from the start, scattered over the pool.
        shuffled = torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.table[1 : 1 + num_requests] = shuffled.view(num_requests, width).int()
        longest = len(PROMPT) + max_new_tokens + config.num_steps + 1
        self.target = SlotModel(target, self.table[:, :longest], num_slots)
        self.draft = SlotModel(draft, self.table[:, :longest], num_slots)
        for model in (self.target, self.draft):
            model.prefill(self.table[1 : 1 + num_requests, : len(PROMPT)].long())
        self.ledger = Ledger(
            self.table,
            num_rows=1 + num_requests,
            num_particles=config.num_particles,
            max_tail=memory.max_tail(config),
            num_slots=num_slots,
        )
        self.steps = Steps(config, self.target, self.draft, self.ledger)  # type: ignore[arg-type]
        self.particles = ParticleTable(
            1 + num_requests, config.num_particles, memory.max_tail(config), "cpu"
        )
        self.settings = RequestTable(1 + num_requests, target.logits.shape[1], "cpu")

    def run(self, rows: list[int], first: torch.Tensor) -> Outcome:
        """Serve the requests in ``rows``, whose prefill drew ``first``, in one batch to the end."""
        self._begin(rows, first)
        texts = [[int(token)] for token in first]
        emitted_in_last = [0] * len(rows)
        evidence = torch.zeros(len(rows), dtype=torch.float64)
        running = [i for i in range(len(rows)) if not self._is_over(texts[i])]
        num_forced = 0
        while running:
            population, counts, forced = self._round([rows[i] for i in running], texts, running)
            num_forced += int(forced.sum())
            for group, i in enumerate(running):
                new = population.tokens[group, 0, : counts[group]].tolist()
                texts[i] += new
                emitted_in_last[i] = len(new)
                evidence[i] = population.log_evidence[group]
            running = [i for i in running if not self._is_over(texts[i])]
        padded = [text + [self.eos] * (self.limit - len(text)) for text in texts]
        early = sum(map(len, texts)) - len(texts) - sum(emitted_in_last)
        return Outcome(torch.tensor(padded), evidence, num_forced, early)

    def _is_over(self, text: list[int]) -> bool:
        return text[-1] == self.eos or len(text) >= self.limit

    def _begin(self, rows: list[int], first: torch.Tensor) -> None:
        self.settings.write(
            [
                RequestSpec(
                    row, row, 1.0, 1 << 30, 1.0, 0.0, self.limit, 0, False, frozenset({self.eos})
                )
                for row in rows
            ]
        )
        self.particles.begin(
            torch.tensor(rows),
            first_tokens=first,
            num_emitted=torch.ones_like(first),
            log_evidence=torch.zeros(len(rows), dtype=torch.float64),
        )
        for row in rows:
            self.ledger.open(row, len(PROMPT))

    def _round(
        self, rows: list[int], texts: list[list[int]], running: list[int]
    ) -> tuple[Population, torch.Tensor, torch.Tensor]:
        committed = torch.tensor([len(PROMPT) + len(texts[i]) - 1 for i in running])
        arenas = [memory.arena(self.config, self.limit - len(texts[i])) for i in running]
        params = SimpleNamespace(stop_strs=[], stop_regex_strs=[])
        index = torch.tensor(rows)
        groups = Groups(
            reqs=[SimpleNamespace(sampling_params=params)] * len(rows),  # type: ignore[list-item]
            rows=index,
            settings=self.settings.gather(index),
            filtered=False,
            committed=committed,
            allocated=committed + torch.tensor(arenas),
        )
        steps, before = self.steps, self.particles.gather(index)
        slots = steps.reserve(groups, before)
        drafts = steps.propose(groups, before, slots)
        log_p = steps.score(groups, before, drafts, slots)
        cut: Cut
        cut, extended = steps.reweight(groups, before, drafts, log_p)
        ancestors, resampled = steps.resample(groups, extended, cut)
        continued = steps.add_bonus(groups, resampled, log_p, ancestors, cut.num_columns)
        settled, forced = steps.collapse(groups, continued)
        counts = settled.num_common()
        self.ledger.commit(
            index,
            committed=committed,
            allocated=groups.allocated,
            lengths=settled.lengths,
            counts=counts,
        )
        self.particles.scatter(index, settled.emit(counts))
        return settled, counts, forced
