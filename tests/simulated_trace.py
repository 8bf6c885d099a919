"""Traces of made-up answers, by the contract of `view.record`, and what their particles read."""

import math
import random
from itertools import takewhile
from typing import NamedTuple

from sglang_smc.smc.weighing import effective_sample_size
from sglang_smc.state.record import RoundRecord, Trace

EOS = 0
LAG = 24


class Simulated(NamedTuple):
    """A trace, and what it must be read as."""

    trace: Trace
    texts: list[list[int]]  # of the particles as the record ends
    answer: list[int]  # what was emitted
    judged: dict[tuple[int, ...], float]  # what potentials said of particles' texts


def simulated(seed: int, num_particles: int, length: int, num_steps: int = 8) -> Simulated:
    """An answer of ``length`` tokens, of random ones, with all that can happen on the way."""
    answer = _Answer(random.Random(seed), num_particles, length, num_steps)
    rounds = []
    while not answer.is_over:
        rounds.append(answer.play())
    pieces = {str(token): f" w{token}" for token in range(1, 100)} | {str(EOS): "</script>"}
    trace = Trace(
        mode="smc",
        num_particles=num_particles,
        num_steps=num_steps,
        prompt_length=7,
        rounds=rounds,
        pieces=pieces,
    )
    return Simulated(trace, answer.texts, answer.emitted, answer.judged)


class _Answer:
    def __init__(self, rng: random.Random, size: int, length: int, num_steps: int) -> None:
        self.rng, self.most, self.length, self.num_steps = rng, size, length, num_steps
        self.emitted: list[int] = []
        self.texts: list[list[int]] = []
        self.weights: list[float] = []
        self.judged: dict[tuple[int, ...], float] = {}
        self.banked = 0.0

    @property
    def is_over(self) -> bool:
        return bool(self.emitted) and (self.emitted[-1] == EOS or len(self.emitted) >= self.length)

    def play(self) -> RoundRecord:
        begins = self.begin() if not self.texts or self.rng.random() < 0.01 else None
        resized = None if begins else self.resize()
        before, size = list(self.weights), len(self.texts)
        potentials = self.judge() if self.rng.random() < 0.3 else None
        drafted = [[] if self.has_ended(text) else self.draft(text) for text in self.texts]
        keep = self.num_steps if self.rng.random() < 0.7 else self.rng.randrange(self.num_steps)
        kept = [min(keep, len(tokens)) for tokens in drafted]
        for lane, count in enumerate(kept):
            self.texts[lane] = self.texts[lane] + drafted[lane][:count]
            if count:
                self.weights[lane] += self.rng.gauss(0, 0.3 * count)
                if len(self.alive()) > 1 and self.rng.random() < 0.02:
                    self.weights[lane] = -math.inf
        weights = list(self.weights)
        ess = _ess(weights)
        resampled = ess < size / 2
        ancestors = self.resample() if resampled else list(range(size))
        bonus = [None if self.has_ended(text) else self.token(text) for text in self.texts]
        self.texts = [t if b is None else [*t, b] for t, b in zip(self.texts, bonus, strict=True)]
        ended = [self.has_ended(text) for text in self.texts]
        narrowed = self.narrow()
        return RoundRecord(
            begins=begins,
            resized_from=resized,
            log_weights_before=_told(before),
            drafted=drafted,
            kept=kept,
            log_weights=_told(weights),
            log_potentials=potentials,
            ess=ess,
            log_block_evidence=0.1,
            cut="none" if keep == self.num_steps else "evidence",
            resampled=resampled,
            ancestors=ancestors,
            bonus=bonus,
            ended=ended,
            narrowed_to=narrowed,
            log_weights_after=_told(self.weights),
            log_evidence=self.banked,
            emitted=self.emit(),
        )

    def begin(self) -> list[int]:
        """A prefill, the first or one behind a retraction."""
        first = self.token(self.emitted)
        self.texts = [[*self.emitted, first] for _ in range(self.most)]
        self.emitted = [*self.emitted, first]
        self.weights = [0.0] * self.most
        return [first] * self.most

    def judge(self) -> list[float | None]:
        """Equal texts are judged alike, and none twice."""
        fresh = {tuple(text) for text in self.texts} - self.judged.keys()
        new = {text: self.rng.gauss(0, 0.2) for text in sorted(fresh)}
        self.judged |= new
        added = [new.get(tuple(text), 0.0) for text in self.texts]
        self.weights = [w + more for w, more in zip(self.weights, added, strict=True)]
        return [*added]

    def resize(self) -> list[int] | None:
        if self.rng.random() > 0.03 or self.most < 4:
            return None
        size = self.most // 2 if len(self.texts) == self.most else self.most
        found = sorted(self.rng.choice(self.alive()) for _ in range(size))
        self.copy(found)
        return found

    def draft(self, text: list[int]) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < self.num_steps and not self.has_ended([*text, *tokens]):
            tokens.append(self.token([*text, *tokens]))
        return tokens

    def token(self, text: list[int]) -> int:
        ends = len(text) > self.length - 20 and self.rng.random() < 0.02
        return EOS if ends else self.rng.randrange(1, 100)

    def has_ended(self, text: list[int]) -> bool:
        return len(text) >= self.length or (bool(text) and text[-1] == EOS)

    def alive(self) -> list[int]:
        return [lane for lane, weight in enumerate(self.weights) if weight > -math.inf]

    def resample(self) -> list[int]:
        alive = self.alive()
        shares = [math.exp(self.weights[lane]) for lane in alive]
        found = sorted(self.rng.choices(alive, shares, k=len(self.texts)))
        self.copy(found)
        self.weights = [0.0] * len(found)
        self.banked -= 0.05
        return found

    def narrow(self) -> list[int] | None:
        """Draw the answer, or what lags too far behind."""
        late = max(map(len, self.texts)) - len(self.emitted) - LAG
        if all(map(self.has_ended, self.texts)):
            found = [self.rng.choice(self.alive())] * len(self.texts)
        elif late <= 0:
            return None
        else:
            upto = len(self.emitted) + late
            text = self.texts[self.rng.choice(self.alive())][:upto]
            drawn = next(lane for lane in self.alive() if self.texts[lane][:upto] == text)
            found = [
                lane if self.texts[lane][:upto] == text else drawn
                for lane in range(len(self.texts))
            ]
        if found == list(range(len(found))):
            return None
        self.copy(found)
        return found

    def copy(self, of: list[int]) -> None:
        self.texts = [self.texts[lane] for lane in of]
        self.weights = [self.weights[lane] for lane in of]

    def emit(self) -> list[int]:
        columns = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*self.texts, strict=False))
        shared = [token for token, *_ in columns]
        new, self.emitted = shared[len(self.emitted) :], shared
        return new


def _told(weights: list[float]) -> list[float | None]:
    return [None if weight == -math.inf else weight for weight in weights]


def _ess(weights: list[float]) -> float:
    import torch

    return float(effective_sample_size(torch.tensor(weights, dtype=torch.float64)))
