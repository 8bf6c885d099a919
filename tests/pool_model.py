"""Drives a ledger and its particles as a round does, with a plain model of the pool beside it.

The model knows for every slot what either model wrote there: the text up to and including the
slot's own token, which is what KV depends on. A particle that reads a slot with any other text
would attend to the wrong KV. Particles, tails and ownership are lists, checked after every step.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from populations import shared

from sglang_smc.kv import arena
from sglang_smc.kv.ledger import Ledger
from sglang_smc.options.request import Budget, RequestConfig, apply_budget, request_config, union
from sglang_smc.options.server import SMCConfig
from sglang_smc.state.population import ParticleTable, Population

ENDS_WITH_PROBABILITY = 0.04
BREAKS_WITH_PROBABILITY = 0.02
Text = tuple[int, ...]
EOS, VOCAB = 0, 3
CONFIGS = {
    "usual": SMCConfig(num_particles=4, num_steps=3, max_lag=8),
    "long tails": SMCConfig(num_particles=3, num_steps=2, max_lag=30),
    "emits every round": SMCConfig(num_particles=3, num_steps=2, max_lag=1),
    "one particle": SMCConfig(num_particles=1, num_steps=4, max_lag=5),
    "one step": SMCConfig(num_particles=8, num_steps=1, max_lag=3),
}


@dataclass
class Request:
    """One request in plain Python."""

    row: int
    config: RequestConfig
    prompt: list[int]
    max_new_tokens: int
    output: list[int]
    committed: int
    allocated: int
    tails: list[list[int]]
    ended: list[bool]
    budgets: tuple[Budget | None, ...] = (None, None)  # of the last round, and of this one
    has_begun: bool = False
    is_over: bool = False  # a round began with nothing left to do
    heard: tuple[int, int] = (0, 0)  # committed and remaining, as far as the host knows
    unread: bool = False  # the draft has yet to read the last token but one
    first_tokens: list[int] | None = None  # of each particle, where they differ in the newest token
    frozen: list[int] = field(default_factory=list)  # slots of the committed text so far

    @property
    def now(self) -> RequestConfig:
        """What this round runs with."""
        return apply_budget(self.config, self.budgets[1])

    @property
    def span(self) -> RequestConfig:
        """What memory must hold from the last round's end to this one's."""
        return union(apply_budget(self.config, self.budgets[0]), self.now)

    def resize(self, ancestors: list[int]) -> None:
        """Go on with copies of these particles."""
        if self.first_tokens:
            self.first_tokens = [self.first_tokens[ancestor] for ancestor in ancestors]
        self.tails = [list(self.tails[ancestor]) for ancestor in ancestors]
        self.ended = [self.ended[ancestor] for ancestor in ancestors]

    @property
    def settled(self) -> list[int]:
        """The output, without a token that particles differ in."""
        return self.output[:-1] if self.first_tokens else self.output

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.output)

    def text(self, particle: int) -> list[int]:
        """Prompt, output and tail, with what the particle itself has in the newest place."""
        return [*self.prompt, *self.output[:-1], self.last_emitted[particle], *self.tails[particle]]

    @property
    def last_emitted(self) -> list[int]:
        return self.first_tokens or [self.output[-1]] * len(self.tails)

    def settle(self) -> None:
        """Take what all particles have in the newest place into the output."""
        if len(set(self.last_emitted)) == 1:
            self.output[-1], self.first_tokens = self.last_emitted[0], None

    def oldest(self) -> list[tuple[int, ...]]:
        """What particles must share before they go on; nothing, where none lags behind."""
        longest = max(map(len, self.tails))
        late = max(longest + 1 - self.now.lag, 0) if self.now.weighs else 0
        count = longest if all(self.ended) else late
        if not count:
            return [()] * len(self.tails)
        each = zip(self.last_emitted, self.tails, strict=True)
        return [(before, *tail[:count]) for before, tail in each]

    def ends_at(self, particle: int, new_tokens: list[int]) -> int | None:
        """Index of the new token that ends the text."""
        length = len(self.output) + len(self.tails[particle])
        for index, token in enumerate(new_tokens):
            if token == EOS or length + index + 1 >= self.max_new_tokens:
                return index
        return None


class Window(NamedTuple):
    """The sizes that tensors of one round are cut to."""

    num_particles: int
    num_steps: int
    max_tail: int
    max_arena: int

    @classmethod
    def of(cls, batch: list[Request]) -> "Window":
        """As small as they may be."""
        return cls(
            max(request.now.num_particles for request in batch),
            max(request.now.num_steps for request in batch),
            max(arena.tail(request.span, request.heard[1]) for request in batch),
            max(request.allocated - request.heard[0] for request in batch),
        )

    def padded(self, values: list, filling: object) -> list:
        """One entry for each of the particles that the largest group has."""
        return values + [filling] * (self.num_particles - len(values))


def num_common(tails: list[list[int]]) -> int:
    """How many tokens all tails begin with."""
    shortest = min(map(len, tails))
    for index in range(shortest):
        if len({tail[index] for tail in tails}) > 1:
            return index
    return shortest


class PoolModel:
    """A pool, its requests, and the code under test.

    Requests choose their own N, K and mode, no larger than those of ``config``. With ``overlap``
    the host reserves a round's memory before it hears of the round before, as SGLang's does. Each
    round is on one of ``budgets``, drawn at random.
    """

    def __init__(
        self,
        config: SMCConfig,
        *,
        num_rows: int = 4,
        longest: int = 40,
        overlap: bool = False,
        budgets: tuple[Budget | None, ...] = (None,),
    ) -> None:
        self.config, self.overlap, self.budgets = config, overlap, budgets
        num_slots = num_rows * (longest + arena.max_arena(config))
        self.table, self.tails = (
            torch.zeros(*shape, dtype=torch.int32)
            for shape in (
                (num_rows + 1, longest + arena.max_arena(config)),
                ((num_rows + 1) * config.num_particles, arena.tail_width(config)),
            )
        )
        self.ledger = Ledger(
            self.table,
            self.tails,
            num_particles=config.num_particles,
            max_tail=arena.max_tail(config),
            num_slots=num_slots + 1,
        )
        self.particles = ParticleTable(
            num_rows + 1, config.num_particles, arena.max_tail(config), "cpu"
        )
        self.longest = longest
        self.all_slots = set(range(1, num_slots + 1))
        self.free = list(range(1, num_slots + 1))
        self.free_rows = list(range(1, num_rows + 1))
        self.requests: dict[int, Request] = {}
        self.content: dict[int, Text] = {}
        self.draft_content: dict[int, Text] = {}  # the draft reads a round's last token in the next
        self.operations = 0
        self.seen: Counter[str] = Counter()  # situations that the programs met

    # -- the scheduler's part -----------------------------------------------------------------

    def act(self, rng: random.Random) -> None:
        """Do one thing that a scheduler may do next; mostly a round for some of the requests."""
        running, choice = list(self.requests.values()), rng.random()
        if self.free_rows and (choice < 0.3 or not running):
            self.start(rng)
        elif choice < 0.34:
            self.abort(rng.choice(running), rng)
        elif choice < 0.38:
            self.retract(rng.choice(running), rng)
        else:
            self.play_round(rng.sample(running, rng.randint(1, len(running))), rng)

    def start(self, rng: random.Random) -> Request:
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 6))]
        max_new_tokens = rng.randint(2, self.longest - len(prompt))
        row = self.free_rows.pop(rng.randrange(len(self.free_rows)))
        return self._prefill(row, self._choose(rng), prompt, max_new_tokens, [], rng)

    def _choose(self, rng: random.Random) -> RequestConfig:
        chosen: dict[str, object] = {}
        if rng.random() < 0.6:
            chosen["num_particles"] = rng.randint(1, self.config.num_particles)
            chosen["num_steps"] = rng.randint(1, self.config.num_steps)
        if rng.random() < 0.2:
            chosen["mode"] = rng.choice(["exact", "mixed"])
        elif rng.random() < 0.3:
            chosen["max_lag"] = rng.randint(1, self.config.most_lag)
        return request_config(self.config, {"smc": chosen})

    def abort(self, request: Request, rng: random.Random) -> None:
        """Free all that the row owns, as abort and retraction do, and give the row back."""
        self.free += self.table[request.row, : request.allocated].tolist()
        rng.shuffle(self.free)
        self.free_rows.append(request.row)
        del self.requests[request.row]
        self.check()

    def retract(self, request: Request, rng: random.Random) -> None:
        """Abort, then prefill prompt and emitted text again, in another row perhaps."""
        self.abort(request, rng)
        row = self.free_rows.pop(rng.randrange(len(self.free_rows)))
        self._prefill(
            row, request.config, request.prompt, request.max_new_tokens, request.settled, rng
        )

    def _prefill(
        self,
        row: int,
        config: RequestConfig,
        prompt: list[int],
        limit: int,
        output: list[int],
        rng: random.Random,
    ) -> Request:
        text = prompt + output
        slots = self._take(len(text), rng)
        self.table[row, : len(text)] = torch.tensor(slots)
        for position, slot in enumerate(slots):
            self.content[slot] = self.draft_content[slot] = tuple(text[: position + 1])
        first = rng.randrange(1, VOCAB)
        request = Request(
            row=row,
            config=config,
            prompt=prompt,
            max_new_tokens=limit,
            output=[*output, first],
            committed=len(text),
            allocated=len(text),
            tails=[[] for _ in range(config.num_particles)],
            ended=[False] * config.num_particles,
        )
        if config.weighs and rng.random() < 0.3 and len(request.output) < limit:
            request.first_tokens = [self._token(rng) for _ in request.tails]
            request.output[-1] = request.first_tokens[0]
            request.ended = [token == EOS for token in request.first_tokens]
        self.particles.begin(
            torch.tensor([row]),
            first_tokens=self._padded([request.last_emitted]),
            ended=self._padded([request.ended]).bool(),
            num_emitted=torch.tensor([len(request.output)]),
            log_evidence=torch.zeros(1, dtype=torch.float64),
            num_particles=torch.tensor([config.num_particles]),
        )
        self.requests[row] = request
        if len(request.output) >= limit:
            self.abort(request, rng)
        return request

    def _padded(self, rows: list[list]) -> torch.Tensor:
        """As many as the tables have room for; what stands in the others means nothing."""
        return torch.tensor([row + [0] * (self.config.num_particles - len(row)) for row in rows])

    def _take(self, count: int, rng: random.Random) -> list[int]:
        rng.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the model's pool is too small"
        return taken

    def _top_up(self, request: Request, rng: random.Random) -> None:
        committed, remaining = request.heard
        wanted = committed + arena.arena(request.span, remaining)
        if wanted > request.allocated:
            slots = self._take(wanted - request.allocated, rng)
            self.table[request.row, request.allocated : wanted] = torch.tensor(slots).int()
            request.allocated = wanted

    # -- a round, with random drafts, cuts and ancestors -----------------------------------------

    def play_round(self, batch: list[Request], rng: random.Random) -> None:
        budget = rng.choice(self.budgets)
        for request in batch:
            if not self.overlap or not request.has_begun:
                request.heard = request.committed, request.remaining + self.overlap
            request.budgets = request.budgets[1], budget
            self._top_up(request, rng)
            request.has_begun = True
        self.check()
        self.window = Window.of(batch)
        for request in batch:
            request.heard = request.committed, request.remaining
        rows = torch.tensor([request.row for request in batch])
        population = self._resized(batch, rows, rng)
        self._check_population(population, batch)
        drafts, counts = self._draft(batch, rows, population, rng)
        population = self._extend(population, batch, torch.tensor(drafts).long(), counts)
        ancestors = [self._random_ancestors(request, rng) for request in batch]
        population = self._descend(batch, rows, population, ancestors)
        bonus = torch.tensor([self._bonus(request, rng) for request in batch]).unsqueeze(2)
        ones = [[1] * len(request.tails) for request in batch]
        population = self._extend(population, batch, bonus, ones)
        population = self._break(population, batch, rng)
        population = self._descend(
            batch, rows, population, [self._narrow(request, rng) for request in batch]
        )
        self._commit(batch, rows, population)
        for request in batch:
            if all(request.ended):
                assert not any(request.tails)
                if request.is_over or not self.overlap:
                    self.abort(request, rng)
                request.is_over = True  # the host hears of it when the next round has begun

    def _resized(self, batch: list[Request], rows: torch.Tensor, rng: random.Random) -> Population:
        """The populations as the round begins, of the size that they have in it."""
        sizes = [request.now.num_particles for request in batch]
        held = max(*sizes, *(len(request.tails) for request in batch))
        population = self.particles.gather(rows, held, self.window.max_tail)
        ancestors = []
        for request, size in zip(batch, sizes, strict=True):
            old = len(request.tails)
            chosen = [rng.randrange(old) for _ in range(size)] if size != old else list(range(old))
            request.resize(chosen)
            ancestors.append([*chosen, *range(size, held)])
            self.seen["more particles"] += size > old
            self.seen["fewer particles"] += size < old
        if population.present.sum(1).tolist() == sizes:
            return population
        chosen = torch.tensor(ancestors)
        self.ledger.descend(
            rows,
            committed=torch.tensor([request.committed for request in batch]) - 1,
            ancestors=chosen,
            max_tail=self.window.max_tail,
        )
        present = torch.arange(held) < torch.tensor(sizes).unsqueeze(1)
        population = population.resize(chosen, present)
        self.particles.scatter(rows, population)
        self.check()
        return self.particles.gather(rows, self.window.num_particles, self.window.max_tail)

    def _draft(
        self,
        batch: list[Request],
        rows: torch.Tensor,
        population: Population,
        rng: random.Random,
    ) -> tuple[list, list]:
        """Reserve, write KV and draw where the group is cut; drafts and their kept counts."""
        num_steps = self.window.num_steps
        slots = self.ledger.reserve(
            rows,
            allocated=torch.tensor([request.allocated for request in batch]),
            starts=torch.tensor([r.committed for r in batch]).unsqueeze(1) + population.lengths,
            idle=population.ended,
            unread=population.unread,
            num_particles=torch.tensor([request.now.num_particles for request in batch]),
            num_columns=torch.tensor([request.now.num_steps + 1 for request in batch]),
            width=num_steps + 1,
        ).tolist()
        self._check_reserved(batch, slots)
        drafts, counts = [], []
        for group, request in enumerate(batch):
            cut = rng.randint(0, request.now.num_steps)
            request.unread = cut == num_steps > 0
            drafts.append(
                [
                    [self._token(rng) for _ in range(num_steps)]
                    for _ in range(self.window.num_particles)
                ]
            )
            counts.append([cut] * len(request.tails))
            for particle, has_ended in enumerate(request.ended):
                if not has_ended:
                    own = slots[group][particle][: request.now.num_steps + 2]
                    self._write(request.text(particle), drafts[group][particle], own)
                    self._check_draft(request, particle)
        self.check()
        return drafts, counts

    def _write(self, text: list[int], drafted: list[int], slots: list[int]) -> None:
        """KV of the last tokens and of the drafted ones, each with all that precedes it."""
        before, *new = slots
        for column, slot in enumerate(new):
            self.content[slot] = tuple(text + drafted[:column])
        if before:
            self.draft_content[before] = tuple(text[:-1])
        # Without drafts it reads the last token all the same.
        for column, slot in enumerate(new[: max(self.window.num_steps, 1)]):
            self.draft_content[slot] = tuple(text + drafted[:column])

    def _extend(
        self,
        population: Population,
        batch: list[Request],
        tokens: torch.Tensor,
        limits: list[list[int]],
    ) -> Population:
        """Append up to ``limits`` tokens, no further than each text's end, on both sides."""
        counts = []
        for group, request in enumerate(batch):
            counts.append([0] * self.window.num_particles)
            for particle, tail in enumerate(request.tails):
                if request.ended[particle]:
                    continue
                new = tokens[group, particle].tolist()[: limits[group][particle]]
                end = request.ends_at(particle, new)
                new = new if end is None else new[: end + 1]
                tail += new
                request.ended[particle] = end is not None
                counts[group][particle] = len(new)
        population = population.append(tokens, torch.tensor(counts))._replace(
            ended=torch.tensor([self.window.padded(request.ended, True) for request in batch]),
            unread=torch.tensor([request.unread for request in batch]),
        )
        self._check_population(population, batch)
        return population

    def _descend(
        self,
        batch: list[Request],
        rows: torch.Tensor,
        population: Population,
        ancestors: list[list[int]],
    ) -> Population:
        committed = torch.tensor([request.committed for request in batch])
        every = range(self.window.num_particles)  # those that are absent stay as they are
        padded = torch.tensor([[*chosen, *every[len(chosen) :]] for chosen in ancestors])
        self.ledger.descend(
            rows, committed=committed, ancestors=padded, max_tail=self.window.max_tail
        )
        population = population.descend(padded)
        for request, chosen in zip(batch, ancestors, strict=True):
            request.resize(chosen)
        self._check_population(population, batch)
        self.check()
        return population

    def _random_ancestors(self, request: Request, rng: random.Random) -> list[int]:
        num_particles = request.now.num_particles
        if not request.now.weighs:
            return [rng.randrange(num_particles)] * num_particles
        if rng.random() < 0.4:
            return list(range(num_particles))
        return [rng.randrange(num_particles) for _ in range(num_particles)]

    def _bonus(self, request: Request, rng: random.Random) -> list[int]:
        tokens = [self._token(rng) for _ in range(self.window.num_particles)]
        return tokens if request.now.weighs else tokens[:1] * len(tokens)

    def _break(
        self, population: Population, batch: list[Request], rng: random.Random
    ) -> Population:
        """Some requests come to where logits mean nothing: they stand still until they are gone."""
        breaks = [rng.random() < BREAKS_WITH_PROBABILITY for _ in batch]
        population = population.stop(torch.tensor(breaks))
        for request in (request for request, broken in zip(batch, breaks, strict=True) if broken):
            self.seen["a broken request had tails"] += any(request.tails)
            request.tails = [[] for _ in request.tails]
            request.ended = [True] * len(request.tails)
        self._check_population(population, batch)
        return population

    def _narrow(self, request: Request, rng: random.Random) -> list[int]:
        """Who is left stays in place; the others are copies of somebody who is left."""
        oldest = request.oldest()
        drawn = rng.choice(oldest)
        left = [i for i, tokens in enumerate(oldest) if tokens == drawn]
        self.seen["some lag behind, some stay apart"] += 1 < len(left) < len(oldest)
        return [i if i in left else rng.choice(left) for i in range(len(oldest))]

    def _commit(self, batch: list[Request], rows: torch.Tensor, population: Population) -> None:
        for request in batch:
            request.settle()
        counts = [0 if request.first_tokens else num_common(request.tails) for request in batch]
        self._note_situations(batch, counts)
        assert shared(population).tolist() == counts
        self.ledger.commit(
            rows,
            committed=torch.tensor([request.committed for request in batch]),
            allocated=torch.tensor([request.allocated for request in batch]),
            lengths=population.lengths,
            counts=torch.tensor(counts),
            max_tail=self.window.max_tail,
            max_arena=self.window.max_arena,
        )
        population = population.emit(torch.tensor(counts))
        for request, count in zip(batch, counts, strict=True):
            request.output += request.tails[0][:count]
            request.tails = [tail[count:] for tail in request.tails]
            request.committed += count
        self._check_population(population, batch)
        self.particles.scatter(rows, population)
        self.check()

    def _note_situations(self, batch: list[Request], counts: list[int]) -> None:
        sizes = {(request.now.num_particles, request.now.num_steps) for request in batch}
        self.seen["groups of different size"] += len(sizes) > 1
        self.seen["one verifies, one weighs"] += len({r.now.weighs for r in batch}) > 1
        for request, count in zip(batch, counts, strict=True):
            left = max(map(len, request.tails)) - count
            self.seen["first tokens differ"] += request.first_tokens is not None
            self.seen["nothing common"] += count == 0
            self.seen["something common, something not"] += count > 0 and left > 0
            self.seen["some have ended"] += any(request.ended) and not all(request.ended)
            self.seen["all have ended"] += all(request.ended)

    def _token(self, rng: random.Random) -> int:
        return EOS if rng.random() < ENDS_WITH_PROBABILITY else rng.randrange(1, VOCAB)

    # -- what must always hold ----------------------------------------------------------------

    def check(self) -> None:
        self.operations += 1
        owned: list[int] = []
        for request in self.requests.values():
            slots = self.table[request.row, : request.allocated].tolist()
            assert slots[: len(request.frozen)] == request.frozen, "committed slots moved"
            request.frozen = slots[: request.committed]
            owned += slots
            if request.has_begun:
                self._check_lineages(request, set(slots))
        assert len(owned) == len(set(owned)), "a slot stands twice"
        assert not set(owned) & set(self.free)
        assert set(owned) | set(self.free) == self.all_slots
        assert not self.table[0].any(), "SGLang's padding row was written to"

    def _check_lineages(self, request: Request, owned: set[int]) -> None:
        emitted = request.prompt + request.output
        self._check_read(self.table[request.row, : request.committed].tolist(), emitted, owned)
        for particle, tail in enumerate(request.tails):
            read = self._slots_read(request, particle, request.committed + len(tail))
            self._check_read(read, request.text(particle), owned)

    def _check_read(self, read: list[int], text: list[int], owned: set[int]) -> None:
        assert set(read) <= owned, "a particle reads a slot that its request does not own"
        for position, slot in enumerate(read):
            assert self.content[slot] == tuple(text[: position + 1]), "wrong KV"

    def _slots_read(self, request: Request, particle: int, length: int) -> list[int]:
        """Emitted text through the request's row, the tail through the particle's own."""
        row = self.ledger.particle_rows(torch.tensor([request.row]), particle + 1)[0, particle]
        committed = min(request.committed, length)
        prefix = self.table[request.row, :committed]
        return [*prefix.tolist(), *self._tail(int(row), committed, length)]

    def _tail(self, row: int, begin: int, end: int) -> list[int]:
        """Slots at these positions of a particle's row."""
        return [int(self.tails[row, p % self.tails.shape[1]]) for p in range(begin, end)]

    def _check_draft(self, request: Request, particle: int) -> None:
        """Before it drafts, the draft has read the particle's whole text, slot by slot."""
        text = request.text(particle)
        for position, slot in enumerate(self._slots_read(request, particle, len(text))):
            assert self.draft_content[slot] == tuple(text[: position + 1]), "wrong KV of the draft"

    def _check_reserved(self, batch: list[Request], slots: list) -> None:
        for request, of_group in zip(batch, slots, strict=True):
            ended_here = self.window.padded(request.ended, True)
            width = request.now.num_steps + 1
            live = [s for s, ended in zip(of_group, ended_here, strict=True) if not ended]
            reserved = [slot for row in live for slot in row[1 : 1 + width]]
            assert len(reserved) == len(set(reserved)), "a slot was handed out twice"
            arena = self.table[request.row, request.committed : request.allocated].tolist()
            assert set(reserved) <= set(arena)
            assert not set(reserved) & self._in_use(request), "a slot in use was handed out"
            for row, ended in zip(of_group, ended_here, strict=True):
                assert set(row if ended else row[1 + width :]) <= {0}, "more than its own columns"

    def _in_use(self, request: Request) -> set[int]:
        rows = self.ledger.particle_rows(torch.tensor([request.row]), len(request.tails))[
            0
        ].tolist()
        spans = zip(rows, request.tails, strict=True)
        begin = request.committed
        return {slot for row, tail in spans for slot in self._tail(row, begin, begin + len(tail))}

    def _check_population(self, population: Population, batch: list[Request]) -> None:
        self.operations += 1
        for group, request in enumerate(batch):
            size = len(request.tails)
            assert population.lengths[group, :size].tolist() == list(map(len, request.tails))
            assert population.ended[group, :size].tolist() == request.ended
            assert population.last_emitted[group, :size].tolist() == request.last_emitted
            assert population.last_tokens[group, :size].tolist() == [
                request.text(particle)[-1] for particle in range(size)
            ]
            for particle in range(size):
                if request.unread and not request.ended[particle]:
                    expected = request.text(particle)[-2:]
                    assert population.last_two[group, particle].tolist() == expected
            assert population.output_lengths[group, :size].tolist() == [
                len(request.output) + len(tail) for tail in request.tails
            ]
            for particle, tail in enumerate(request.tails):
                assert population.tokens[group, particle, : len(tail)].tolist() == tail
            assert population.present[group].tolist() == self.window.padded([True] * size, False)
            assert population.ended[group, size:].all()
            assert not population.lengths[group, size:].any()
