"""Random programs of rounds over a pool whose KV is checked at each read.

Requests of any N, K, mode and lag come, end, break, are aborted and retracted. KV depends on all
of the text up to a slot's token, so each slot has a hash of that text, and each particle that a
model runs must find its own text's hash in every slot that it reads.
"""

import random
from collections import Counter
from typing import Any

import torch
from msgspec.structs import replace
from toy_request import PROMPT, ToyRequest
from toy_worker import NUM_CONTEXTS, Language, SlotModel, ToyWorker

from sglang_smc.kv import arena
from sglang_smc.models.chains import Chains
from sglang_smc.ops.cpu_ops import CPU
from sglang_smc.options.request import Budget, config_of
from sglang_smc.options.server import SMCConfig
from sglang_smc.smc.ops import Ops
from sglang_smc.state.texts import skip_prompt

EOS = 0
VOCAB = 3
LONGEST = 34
CONFIGS = {
    "usual": SMCConfig(num_particles=4, num_steps=3, max_lag=8),
    "long tails": SMCConfig(num_particles=3, num_steps=2, max_lag=30),
    "emits every round": SMCConfig(num_particles=3, num_steps=2, max_lag=1),
    "one particle": SMCConfig(num_particles=1, num_steps=4, max_lag=5),
    "one step": SMCConfig(num_particles=8, num_steps=1, max_lag=3),
}


class CheckedSlots(SlotModel):
    """A toy model that fails where a particle reads KV of another text."""

    def __init__(self, language: Language, rows: torch.Tensor, num_slots: int) -> None:
        super().__init__(language, rows, num_slots)
        generator = torch.Generator().manual_seed(0)
        self._factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator)
        self._hashes = torch.zeros(num_slots, dtype=torch.int64)

    def hashes_of(self, texts: torch.Tensor) -> torch.Tensor:
        """Hash each beginning of ``[..., L]``."""
        return ((texts + 1) * self._factors[: texts.shape[-1]]).cumsum(-1)

    def read_text(self, slots: torch.Tensor, text: list[int]) -> None:
        """Write the KV of a text, as a prefill does."""
        self._tokens[slots] = torch.tensor(text)
        self._hashes[slots] = self.hashes_of(torch.tensor(text))

    def read_on(self, slots: torch.Tensor, text: list[int]) -> None:
        super().read_on(slots, text)
        self._hashes[slots] = self.hashes_of(torch.tensor(text))[-len(slots) :]

    def has_read(self, slots: torch.Tensor, text: list[int]) -> torch.Tensor:
        """Return in which slots the KV is that of a text, ``[L]`` bool."""
        return self._hashes[slots] == self.hashes_of(torch.tensor(text))

    def has_text(self, slots: torch.Tensor, text: list[int]) -> bool:
        return bool(self.has_read(slots, text).all())

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        logits = super().chain_logits(chains)
        tokens, starts, slots, locations = chains[:4]
        hashes = self.hashes_of(self.texts(locations))
        read = self.slots_of(locations)
        places = starts.unsqueeze(2) + torch.arange(tokens.shape[2])
        self._hashes[slots] = hashes.gather(2, places.clamp_max(hashes.shape[2] - 1))
        ends = ((places + 1) * (slots > 0)).amax(2, keepdim=True)  # 0: nothing is read
        is_read = torch.arange(hashes.shape[2]) < ends
        assert torch.equal(self._hashes[read][is_read], hashes[is_read]), "KV of another text"
        return logits


class PoolProgram(ToyWorker):
    """Random things that a scheduler may do with the rows of a table.

    With ``overlap`` the host reserves a round's memory before it has the result of the one before.
    Each round is on one of ``budgets``, drawn at random.
    """

    Model = CheckedSlots

    def __init__(
        self,
        config: SMCConfig,
        rng: random.Random,
        *,
        num_rows: int,
        overlap: bool = False,
        budgets: tuple[Budget | None, ...] = (None,),
        ops: Ops = CPU,
    ) -> None:
        drawn = torch.randn(2, NUM_CONTEXTS, VOCAB, generator=torch.Generator().manual_seed(1))
        drawn[..., EOS] -= 2.0
        drawn[0, 0] = torch.nan  # a few texts break
        sizes = {"num_requests": num_rows, "max_new_tokens": LONGEST, "eos": EOS}
        super().__init__(config, *map(Language, drawn), **sizes, ops=ops, budgets=budgets)
        self.rng = rng
        self.overlap = overlap
        self.choices = budgets
        self.budget: Budget | None = None
        self.running: dict[int, ToyRequest] = {}
        self.committed = [0] * (1 + num_rows)  # on the device
        self.late: dict[int, tuple[Any, int]] = {}  # results that the host does not have yet
        self.seen: Counter[str] = Counter()  # situations

    def act(self) -> None:
        """Let requests come and go, and play a round of some of them."""
        for row in range(1, len(self.table)):
            req = self.running.get(row)
            if req is None and self.rng.random() < 0.5:
                self.start(self.make_request(row))
            elif req is not None and self.rng.random() < 0.06:
                self.drop(req, is_back=self.rng.random() < 0.5)
        rows = list(self.running)
        if rows:
            some = self.rng.sample(rows, self.rng.randint(1, len(rows)))
            self.play([self.running[row] for row in some])

    def make_request(self, row: int) -> ToyRequest:
        rng = self.rng
        smc: dict[str, Any] = {}
        if rng.random() < 0.6:
            smc["num_particles"] = rng.randint(1, self.config.num_particles)
            smc["num_steps"] = rng.randint(0, self.config.num_steps)
        kind = rng.random()
        if kind < 0.2:
            smc["mode"] = rng.choice(["exact", "auto"])
        else:
            smc["ess_threshold"] = 1.0
        if 0.2 < kind < 0.5:
            smc["max_lag"] = rng.randint(1, self.config.most_lag)
        if 0.4 < kind < 0.6:
            smc["power"] = 2.0
        asked = {"custom_params": {"smc": smc}, "stop_token_ids": [EOS]}
        asked["sampling_seed"] = rng.randrange(2**30)
        req = ToyRequest(row, VOCAB, rng.randint(2, LONGEST), asked, None)
        # Budgets bound those without a seed.
        req.smc_config = replace(config_of(self.config, req), seeded=False)
        return req

    def start(self, req: ToyRequest) -> None:
        """Prefill a request, which may have an output."""
        text = [*PROMPT, *req.output_ids]
        req.kv_committed_len = self.committed[req.row] = len(text)
        slots = self.table[req.row, : len(text)].long()
        self.target.read_text(slots, text)
        skips = self.rng.random() < 0.3  # as under a budget without drafts
        self.seen["prompt skipped"] += skips
        if not skips:
            self.draft.read_text(slots, text)
        self.worker._prefill.unread.mark(slots, unread=skips)
        self.prefill([req], tuple(req.output_ids))
        if skips:
            skip_prompt(req)
        self.running[req.row] = req
        if self.has_ended(req):
            self.stop(req)

    def has_ended(self, req: ToyRequest) -> bool:
        is_open = req.smc_state.open_token.is_open
        limit = req.sampling_params.max_new_tokens
        return not is_open and (req.output_ids[-1] == EOS or len(req.output_ids) >= limit)

    def stop(self, req: ToyRequest) -> None:
        del self.running[req.row]

    def drop(self, req: ToyRequest, *, is_back: bool) -> None:
        """Abort a request, or prefill it again; a first token that is open is lost."""
        if req.row in self.late:
            self.hear(*self.late.pop(req.row), req)
        if not is_back or req.row not in self.running:
            self.running.pop(req.row, None)
            return
        self.seen["retracted"] += 1
        if req.smc_state.open_token.is_open:
            req.output_ids.pop()
        req.retraction_count += 1
        req.smc_state.arena = (0, 0)
        self.start(req)

    def reserve(self, reqs: list[ToyRequest]) -> None:
        self.budgets = (self.rng.choice(self.choices),)
        super().reserve(reqs)

    def batch(self, reqs: list[ToyRequest]) -> Any:
        batch = super().batch(reqs)
        batch.seq_lens = torch.tensor([self.committed[req.row] for req in reqs])
        return batch

    def play(self, reqs: list[ToyRequest]) -> None:
        before = self.table.clone()
        ledger = self.worker._tables.ledger
        result = self.play_round(reqs)
        self.check_owned()
        assert (ledger.rank[1:] == ledger.free_rank).all(), "marks were left behind"
        for group, req in enumerate(reqs):
            committed = self.committed[req.row]
            allocated = req.smc_state.arena[1]
            row = self.table[req.row]
            was = before[req.row]
            assert torch.equal(row[:committed], was[:committed]), "committed slots moved"
            assert torch.equal(row[allocated:], was[allocated:]), "not its own yet"
            self.committed[req.row] += int(result.accept_lens[group])
            if req.row in self.late:
                self.hear(*self.late.pop(req.row), req)
            if self.overlap and req.row in self.running:
                self.late[req.row] = result, group
            elif not self.overlap:
                self.hear(result, group, req)

    def hear(self, result: Any, group: int, req: ToyRequest) -> None:
        """Take a round's result, and end a request that has come to its end or is broken."""
        self.note(result, group, req)
        self.take(result, group, req)
        self.check_read(self.target, req, None)
        num_read = req.smc_state.num_read
        self.check_read(self.draft, req, -1 if num_read is None else num_read)
        if self.has_ended(req) or result.outcome.failure[group] > 0:
            self.worker._prefill.finish(req)
            self.check_marks(req)
            self.stop(req)

    def check_read(self, model: Any, req: ToyRequest, end: int | None) -> None:
        """See the KV of a text up to its ``end``; the draft is one token behind, or more."""
        text = [*PROMPT, *req.output_ids][: req.kv_committed_len][:end]
        slots = self.table[req.row, : len(text)].long()
        assert model.has_text(slots, text), "KV of the emitted text is lost"

    def check_marks(self, req: ToyRequest) -> None:
        """See that the draft has read what is not marked, where the radix cache takes a text."""
        text = [*PROMPT, *req.output_ids][: req.kv_committed_len][:-1]
        slots = self.table[req.row, : len(text)].long()
        marked = self.worker._prefill.unread.marks[slots].bool()
        assert self.draft.has_read(slots, text)[~marked].all(), "unread, and without a mark"

    def note(self, result: Any, group: int, req: ToyRequest) -> None:
        state = req.smc_state
        tails = self.worker._tables.particles.gather(
            torch.tensor([req.row]), self.config.num_particles, arena.max_tail(self.config)
        )[0]
        emits = int(result.accept_lens[group]) > 0
        waits = int(tails.lengths.max()) > 0
        ended = tails.ended[tails.present]
        for what, is_so in {
            "broken": bool(result.outcome.failure[group] > 0),
            "first tokens differ": state.open_token.is_open,
            "nothing common": waits and not emits,
            "something common, something not": waits and emits,
            "some have ended": bool(ended.any() and not ended.all()),
            "more particles": state.config_now.num_particles > state.config_before.num_particles,
            "fewer particles": state.config_now.num_particles < state.config_before.num_particles,
        }.items():
            self.seen[what] += bool(is_so)
