"""Stand-ins for engines of the speed benchmark, with times that tests can work out."""

from __future__ import annotations

from speed.grid import AR, AR_STOCK, CHAIN, TREE, System
from speed.remote import EngineError, Sample, Work

#: Seconds a token of each family takes in a batch of one; SMC takes the default.
SECONDS = {AR: 0.10, AR_STOCK: 0.09, CHAIN: 0.05, TREE: 0.04}
SMC_SECONDS = 0.02
FIRST = 0.5
TOKENS_PER_ROUND = 5


def sample(system: System, work: Work, slower: float = 1.0) -> Sample:
    """Every request has its first token after `FIRST` seconds, and ends with the others."""
    tokens = work.params[0]["max_new_tokens"]
    end = FIRST + (tokens - 1) * SECONDS.get(system.family, SMC_SECONDS) * slower
    info: dict[str, object] = {"completion_tokens": tokens}
    if system.family not in (AR, AR_STOCK):
        info["spec_verify_ct"] = -(-(tokens - 1) // TOKENS_PER_ROUND)
    batch = len(work.prompts)
    return Sample([FIRST] * batch, [end] * batch, [info] * batch)


class FakeEngine:
    """Answers for one system; each answer is 10 % slower than the last one of its kind."""

    def __init__(self, system: System, asked: list[tuple[str, Work]], budget: list[int]) -> None:
        self.system, self.asked, self.budget = system, asked, budget
        self.count = 0

    def ask(self, work: Work) -> Sample:
        if self.budget[0] == 0:
            raise KeyboardInterrupt
        self.budget[0] -= 1
        self.asked.append((self.system.slug, work))
        self.count += 1
        return sample(self.system, work, 1.0 + self.count / 10)


class BrokenEngine:
    """Dies of every question about a batch of ``batch``."""

    def __init__(self, engine: FakeEngine, batch: int) -> None:
        self.engine, self.batch = engine, batch

    def ask(self, work: Work) -> Sample:
        if len(work.prompts) == self.batch:
            raise EngineError("OutOfMemoryError: too large")
        return self.engine.ask(work)
