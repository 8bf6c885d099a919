"""Requests of `pool_model`, in plain Python."""

from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_smc.memory import arena
from sglang_smc.options.budget import Budget, apply_budget, union
from sglang_smc.options.request import RequestConfig

Text = tuple[int, ...]
EOS, VOCAB = 0, 3


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
    budgets: tuple[Budget | None, Budget | None] = (
        None,
        None,
    )  # of the last round, and of this one
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
