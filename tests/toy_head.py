"""A toy head, which drafts from the target's states alone: the contexts of the texts so far.

So it has the law of a toy language model that reads the whole text through its KV.
"""

from typing import Any

import torch
from toy_worker import NUM_CONTEXTS, PROMPT, Language, SlotModel, ToyWorker

from sglang_smc.models.chains import Chains
from sglang_smc.proposers.eagle3 import EagleHead
from sglang_smc.proposers.hidden_states import StateTable
from sglang_smc.round.play import Round, Steps


class ReadSlots:
    """A target whose states, the contexts of the texts so far, go to a head."""

    merges = True

    def __init__(self, model: SlotModel, head: EagleHead) -> None:
        self.model, self.head = model, head

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        logits = self.model.chain_logits(chains)
        self.head.read_chains(chains, self.model.contexts(chains).unsqueeze(3).float())
        return logits


class FromStates:
    """Stands in for `EagleForward`: the law behind a context and a token."""

    def __init__(self, language: Language) -> None:
        self.language = language

    attn_backend: Any = None

    def pair_logits(
        self, chains: Chains, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = states.long().squeeze(2) + Language.terms(chains.tokens.squeeze(2), chains.starts)
        own %= NUM_CONTEXTS
        return self.language.logits[own], own.unsqueeze(2).float()

    def read(self, *_: Any) -> None:
        pass


class HeadWorker(ToyWorker):
    """A worker whose draft is a head."""

    def _make_worker(self, num_slots: int) -> Any:
        worker = super()._make_worker(num_slots)
        ledger = worker._tables.ledger
        columns = self.config.num_steps + 1
        self.states = StateTable.of(ledger, num_columns=columns, width=1, dtype=torch.float32)
        forward: Any = FromStates(self.draft.language)
        nobody: Any = None  # who reads prompts
        rest = {"target": nobody, "ledger": ledger, "num_particles": 0}
        head = EagleHead(forward, self.states, None, self.vocab_size, **rest)
        target: Any = ReadSlots(self.target, head)
        worker._steps = Steps(target, head, ledger, self.ops)
        worker._round = Round(worker._steps, worker._tables)
        return worker

    def begin(self, rows: list[int]) -> list[Any]:
        index = self.tensor(rows)
        lengths = torch.full_like(index, len(PROMPT))
        context = Language.contexts(self.tensor([PROMPT]), lengths[:1])
        ledger = self.worker._tables.ledger
        self.states.keep_prompts(
            ledger.table[index, len(PROMPT) - 1].long(),
            lengths,
            ledger.particle_rows(index, self.config.num_particles),
            context.float().expand(len(rows), 1),
        )
        return super().begin(rows)
