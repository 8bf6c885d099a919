"""A toy head, which drafts from the target's states alone: the contexts of the texts so far.

So it has the law of a toy language model that reads the whole text through its KV.
"""

from typing import Any

import torch
from toy_worker import NUM_CONTEXTS, PROMPT, Language, SlotModel, ToyWorker

from sglang_smc.models.chains import Chains
from sglang_smc.proposers.eagle3 import EagleHead
from sglang_smc.proposers.hidden_states import StateTable
from sglang_smc.round.play import ServedRound


class ReadSlots:
    """A target whose states, the contexts of the texts so far, go to a head."""

    def __init__(self, model: SlotModel, head: EagleHead) -> None:
        self.model = model
        self.head = head

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        logits = self.model.chain_logits(chains)
        self.head.read_chains(chains, self.model.contexts(chains).unsqueeze(3).float())
        return logits


class FromStates:
    """Stands in for `EagleForward`: the law behind a context and a token.

    The key of a pair is its context; all keys of a committed text, which the ``target`` has read,
    must be there when the head drafts.
    """

    def __init__(self, language: Language, target: SlotModel) -> None:
        self.language = language
        self.target = target
        self.keys = torch.full_like(target._tokens, -1)  # [slots]

    attn_backend: Any = None

    def pair_logits(
        self, chains: Chains, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.read(chains, states.unsqueeze(2))
        if self.keys.device.type == "cpu":  # others must not wait
            self.check_keys(chains)
        own = self.contexts(chains, states.unsqueeze(2)).squeeze(2)
        return self.language.logits[own], own.unsqueeze(2).float()

    def read(self, chains: Chains, states: torch.Tensor) -> None:
        self.keys[chains.slots] = self.contexts(chains, states)

    @staticmethod
    def contexts(chains: Chains, states: torch.Tensor) -> torch.Tensor:
        column = torch.arange(chains.tokens.shape[2], device=states.device)
        places = chains.starts.unsqueeze(2) + column
        return (states.long().squeeze(3) + Language.terms(chains.tokens, places)) % NUM_CONTEXTS

    def check_keys(self, chains: Chains) -> None:
        slots = self.target.slots_of(chains.locations)  # [G, N, width]
        place = torch.arange(slots.shape[2])
        sums = Language.terms(self.target.texts(chains.locations), place).cumsum(2) % NUM_CONTEXTS
        is_read = (place >= len(PROMPT)) & (place < chains.locations.committed.view(-1, 1, 1))
        is_read = is_read & (chains.slots > 0)  # of particles that go on
        assert torch.equal(self.keys[slots][is_read], sums[is_read]), "a key is missing"


class HeadWorker(ToyWorker):
    """A worker whose draft is a head."""

    def _make_worker(self, num_slots: int) -> Any:
        worker = super()._make_worker(num_slots)
        columns = self.config.num_steps + 1
        ledger = worker._tables.ledger
        self.states = StateTable.of(ledger, num_columns=columns, width=1, dtype=torch.float32)
        forward: Any = FromStates(self.draft.language, self.target)
        rest: Any = {"target": None, "ledger": ledger, "num_particles": 0}  # it reads no prompts
        head = EagleHead(forward, self.states, None, self.vocab_size, **rest)
        worker._prefill._draft = head
        worker._round = ServedRound(ReadSlots(self.target, head), head, worker._tables)
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
