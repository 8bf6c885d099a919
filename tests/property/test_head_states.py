"""A head finds the target's state before each particle's last token, whatever became of particles.

A toy head drafts from that state alone, which holds what the target has read of the text, and so
has the very law of a toy language model that reads the whole text through its KV. The two must draw
the same texts: one state of another particle, or of another position, is another context.
"""

from typing import Any

import pytest
import torch
from toy_laws import EOS, languages
from toy_worker import NUM_CONTEXTS, PROMPT, Language, Outcome, SlotModel, ToyWorker

from sglang_smc.drafts.eagle import EagleHead
from sglang_smc.drafts.states import StateTable
from sglang_smc.models.attention import KVLocations
from sglang_smc.options.budget import Budget
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.round import Round
from sglang_smc.round.steps import Steps

NUM_RUNS, LIMIT = 60, 24


def terms(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What tokens add to the context of a text, see `Language.contexts`."""
    return (tokens + 1) * ((places * 31 + 7) ** 2 % NUM_CONTEXTS)


class ReadSlots:
    """A target whose states, the contexts of the texts so far, go to a head."""

    def __init__(self, model: SlotModel, head: EagleHead) -> None:
        self.model, self.head = model, head

    def chain_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        logits = self.model.chain_logits(tokens, starts, slots, locations)
        column = torch.arange(tokens.shape[2])
        texts = self.model.texts(locations)
        states = torch.stack(
            [
                Language.contexts(texts.flatten(0, 1), (starts + 1 + j).flatten())
                for j in column.tolist()
            ],
            dim=1,
        ).view(*tokens.shape, 1)
        self.head.read_chains(tokens, starts, slots, locations, states.float())
        return logits


class FromStates:
    """Stands in for `EagleForward`: the law behind a context and a token."""

    def __init__(self, language: Language) -> None:
        self.language = language

    def laws(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = (states.long().squeeze(2) + terms(tokens, starts)) % NUM_CONTEXTS
        return self.language.logits[own], own.unsqueeze(2).float()

    def read(self, *_: Any) -> None:
        pass


class HeadWorker(ToyWorker):
    """A worker whose draft is a head."""

    def _make_worker(self, num_slots: int) -> Any:
        worker = super()._make_worker(num_slots)
        ledger = worker._tables.ledger
        columns = self.config.num_steps + 1
        self.states = StateTable.of(
            ledger.tails, num_columns=columns, num_slots=num_slots, width=1, dtype=torch.float32
        )
        forward: Any = FromStates(self.draft.language)
        head = EagleHead(forward, self.states, None, self.vocab_size)
        target: Any = ReadSlots(self.target, head)
        worker._steps = Steps(target, head, ledger, self.ops)
        worker._round = Round(worker._steps, worker._tables, self.ops)
        return worker

    def begin(self, rows: list[int], noise: torch.Tensor) -> list[Any]:
        lengths = torch.full((len(rows),), len(PROMPT))
        context = Language.contexts(torch.tensor([PROMPT]), lengths[:1])
        index = torch.tensor(rows)
        ledger = self.worker._tables.ledger
        self.states.keep_prompts(
            ledger.table[index, len(PROMPT) - 1].long(),
            lengths,
            ledger.particle_rows(index, self.config.num_particles),
            context.float().expand(len(rows), 1),
        )
        return super().begin(rows, noise)


def outcome(kind: type[ToyWorker], config: SMCConfig, **more: Any) -> Outcome:
    sizes = {"num_requests": NUM_RUNS, "max_new_tokens": LIMIT, "eos": EOS}
    worker = kind(config, *languages(), **sizes, **more)
    noise = torch.rand(NUM_RUNS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = worker.run(list(range(1, NUM_RUNS + 1)), noise)
    worker.check_owned()
    return found


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"num_particles": 4, "num_steps": 3, "evidence_threshold": 0.0}, {}),
        ({"num_particles": 4, "num_steps": 3, "ess_threshold": 1.0}, {}),
        ({"num_particles": 5, "num_steps": 2, "resample_at": "token", "max_lag": 2}, {}),
        ({"num_particles": 3, "num_steps": 4, "mode": "auto"}, {}),
        ({"num_particles": 3, "num_steps": 4, "mode": "exact"}, {}),
        (
            {"num_particles": 4, "num_steps": 3, "ess_threshold": 0.9},
            {"chosen": ({}, {"num_particles": 2}, {"num_steps": 1}, {"mode": "exact"})},
        ),
        (
            {"num_particles": 4, "num_steps": 3, "adaptive": True},
            {"budgets": (None, Budget(1, 0), Budget(2, 3), Budget(4, 1))},
        ),
    ],
)
def test_states_follow_particles(settings: dict[str, Any], more: dict[str, Any]) -> None:
    config = SMCConfig(**settings)
    by_head, by_model = (outcome(kind, config, **more) for kind in (HeadWorker, ToyWorker))
    assert torch.equal(by_head.outputs, by_model.outputs)
    assert torch.allclose(by_head.log_evidence, by_model.log_evidence)
    assert by_head.num_rounds < by_head.num_tokens, "nothing that was drafted was kept"
