"""Measure powers where the target is known exactly: by resampling scheme, proposal, N and draft.

    PYTHONPATH=bench .venv/bin/python -m power.toy --publish       # an hour on two quiet cores

*Letters* are a model of four letters in a row, counted in answers of the shipped pair's task. Its
normaliser Z of p^alpha is a sum over letters, place by place. The mean of log Z - log Z-hat bounds
the KL divergence of answers from p^alpha. *Texts* are of up to five of three tokens: all are
enumerated, so that the total variation distance of what is sampled is known.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import study
import torch
from intervals import Z95
from pair.task import problem
from results import table
from study import PUBLISHED

from sglang_smc.smc.deciding import Decider, VerifyEach, Weigh
from sglang_smc.smc.round import Round

ORDER = 3  # letters that the next one depends on
LENGTH = 40
NUM_ANSWERS = 3000
SMOOTHING = 0.01
NUM_TEXT_TOKENS = 3
TEXT_LENGTH = 5
PROPOSALS: dict[str, Decider] = {"verified": VerifyEach(), "draft": Weigh()}
BATCH = 2048  # particles that are advanced at once


class StateModel(NamedTuple):
    """A language whose next token depends on a state, and moves it; both protocols of `Round`."""

    log_probs: torch.Tensor  # [S, V]
    moves: torch.Tensor  # [S, V] int64: the state after each token
    start: int  # behind the prompt
    num_prompt: int

    def next_logits(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.chain_logits(texts, lengths, 1)[:, 0]

    def chain_logits(
        self, texts: torch.Tensor, lengths: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        state = torch.full_like(lengths, self.start)
        states = [state]
        for tokens in texts[:, self.num_prompt : int(lengths.max())].unbind(1):
            state = self.moves[state, tokens]
            states.append(state)
        ends = lengths.unsqueeze(1) - self.num_prompt - torch.arange(num_columns).flip(0)
        return self.log_probs[torch.stack(states, 1).gather(1, ends)]

    def log_normalizer(self, power: float, length: int, stop: int | None = None) -> float:
        """Return log of the sum of p(x)^power over texts of ``length``, or that end with a stop."""
        raised = power * self.log_probs.double()  # [S, V]
        rest = torch.zeros_like(raised[:, 0])
        for _ in range(length):
            after = rest[self.moves]
            if stop is not None:
                after[:, stop] = 0.0
            rest = (raised + after).logsumexp(1)
        return float(rest[self.start])


def letters(order: int) -> StateModel:
    """Return the model of letters by the ``order`` letters before, of the target's answers."""
    answers = [problem(seed).answer + "\n" for seed in range(NUM_ANSWERS)]
    alphabet = sorted(set("".join(answers)))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        for place, letter in enumerate(answer):
            for depth in range(order + 1):
                counts[("\n" * order + answer)[place + order - depth : place + order]][letter] += 1
    contexts = [context for context in counts if len(context) == order]
    known = {context: place for place, context in enumerate([*contexts, *alphabet])}
    names = list(known)

    def law(context: str) -> np.ndarray:
        of = counts[context]
        return np.array([of[letter] for letter in alphabet]) / sum(of.values())

    def state(context: str) -> int:
        return known.get(context[-order:], known[context[-1]])

    smooth = 0.8 * np.array([law(name[-1]) for name in names]) + 0.2 / len(alphabet)
    probs = (1 - SMOOTHING) * np.array([law(name) for name in names]) + SMOOTHING * smooth
    moves = [[state(name + letter) for letter in alphabet] for name in names]
    start = known["\n" * order]
    return StateModel(torch.tensor(probs).log().float(), torch.tensor(moves), start, num_prompt=2)


def texts(difference: float, seed: int = 3) -> StateModel:
    """Return a model of texts whose states are texts; the last token ends one, and seldom comes.

    Args:
        difference: of its logits from those of the target.
    """
    generator = torch.Generator().manual_seed(seed)
    num_states = sum(NUM_TEXT_TOKENS**n for n in range(TEXT_LENGTH + 1))
    drawn = torch.randn(2, num_states, NUM_TEXT_TOKENS, generator=generator)
    drawn[0, :, -1] -= 1.0
    logits = drawn[0] + difference * drawn[1]
    first = torch.arange(num_states).unsqueeze(1) * NUM_TEXT_TOKENS + 1
    moves = (first + torch.arange(NUM_TEXT_TOKENS)).clamp_max(num_states - 1)
    return StateModel(logits.log_softmax(1), moves, start=0, num_prompt=2)


@dataclass(frozen=True)
class ToyCell:
    """One way to sample."""

    model: str  # of `MODELS`
    power: float
    draft: str
    num_particles: int
    proposal: str
    scheme: str
    ess_threshold: float

    @property
    def slug(self) -> str:
        sizes = f"{self.model}-a{self.power:g}-{self.draft}-n{self.num_particles}"
        return f"{sizes}-{self.proposal}-{self.scheme}-{self.ess_threshold:g}"


@dataclass(frozen=True)
class ToyRow:
    """What was measured of a cell, with halves of 95 % intervals."""

    cell: str
    runs: int
    variance: float  # of log Z-hat
    variance_half: float
    kl_at_most: float  # log Z - E log Z-hat, nats an answer
    kl_half: float
    mean_ratio: float  # of Z-hat to Z; 1, to chance
    mean_ratio_half: float
    tokens_a_round: float
    distance: float | None  # total variation, of texts
    distance_half: float | None
    noise: float | None  # the same of as many exact samples


def cells() -> Iterator[ToyCell]:
    """Return all cells: of schemes and N, of proposals and drafts, and of enumerated texts."""
    ways = (("systematic", 0.5), ("chopthin", 0.5), ("chopthin", 1.0))
    for power, n, (scheme, tau) in product((2.0, 4.0), (4, 8, 16, 32), ways):
        yield ToyCell("letters", power, "near", n, "verified", scheme, tau)
    for power, proposal, way in product((2.0, 4.0), PROPOSALS, ways[::2]):
        yield ToyCell("letters", power, "far", 8, proposal, *way)
    for power, way in product((2.0, 4.0), ways[::2]):
        yield ToyCell("letters", power, "near", 8, "draft", *way)
    for power, n, proposal, way in product((2.0, 4.0), (8, 64), PROPOSALS, ways[::2]):
        yield ToyCell("texts", power, "near", n, proposal, *way)


#: Targets and drafts by name, and the length of texts.
MODELS: dict[str, tuple[Callable[[], StateModel], dict[str, Callable[[], StateModel]], int]] = {
    "letters": (
        lambda: letters(ORDER),
        {"near": lambda: letters(ORDER - 1), "far": lambda: letters(1)},
        LENGTH,
    ),
    "texts": (lambda: texts(0.0), {"near": lambda: texts(0.7)}, TEXT_LENGTH),
}


class ToySamples(NamedTuple):
    """Answers of all runs of a cell."""

    log_evidence: np.ndarray  # [R]
    tokens: np.ndarray  # [R, L]
    num_tokens: int
    num_rounds: int


def sample(cell: ToyCell, num_runs: int) -> ToySamples:
    """Return answers of ``num_runs`` seeds."""
    of_target, of_drafts, length = MODELS[cell.model]
    is_texts = cell.model == "texts"
    rounds = Round(
        of_target(),
        of_drafts[cell.draft](),
        PROPOSALS[cell.proposal],
        num_steps=2 if is_texts else 4,
        max_new_tokens=length,
        stop_tokens=(NUM_TEXT_TOKENS - 1,) if is_texts else (),
        draft_temperature=1 / cell.power,
        power=cell.power,
        ess_threshold=cell.ess_threshold,
        evidence_threshold=0.0,
        scheme=cell.scheme,
    )
    most = max(1, BATCH // cell.num_particles)
    parts = [
        batch(rounds, torch.arange(first, min(first + most, num_runs)), cell.num_particles)
        for first in range(0, num_runs, most)
    ]
    evidence, tokens, num_tokens, num_rounds = zip(*parts, strict=True)
    joined = np.concatenate(evidence), np.concatenate(tokens)
    return ToySamples(*joined, sum(num_tokens), sum(num_rounds))


def batch(
    rounds: Round, seeds: torch.Tensor, num_particles: int
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return `ToySamples` of some seeds; rounds are counted until each answer has ended."""
    state = rounds.begin(torch.zeros(len(seeds), 2, dtype=torch.int64), num_particles)
    num_rounds = 0
    while not state.population.ended.all():
        num_rounds += int((~state.population.ended.all(1)).sum())
        state, _ = rounds.step(state, seeds)
    lengths = state.population.lengths[:, 0]
    place = torch.arange(rounds.max_new_tokens)
    tokens = state.population.tokens[:, 0, : len(place)]
    tokens = tokens.masked_fill(place >= lengths.unsqueeze(1), NUM_TEXT_TOKENS - 1)
    return state.population.log_evidence.numpy(), tokens.numpy(), int(lengths.sum()), num_rounds


def law_of_texts(power: float) -> dict[tuple[int, ...], float]:
    """Return the probability of each text under p^power, filled up with the last token."""
    model = texts(0.0)
    end = NUM_TEXT_TOKENS - 1
    masses: dict[tuple[int, ...], float] = {}
    for text in product(range(NUM_TEXT_TOKENS), repeat=TEXT_LENGTH):
        state = model.start
        log_p = 0.0
        length = text.index(end) + 1 if end in text else TEXT_LENGTH
        if any(token != end for token in text[length:]):
            continue
        for token in text[:length]:
            log_p += float(model.log_probs[state, token])
            state = int(model.moves[state, token])
        masses[text] = math.exp(power * log_p)
    total = sum(masses.values())
    return {text: mass / total for text, mass in masses.items()}


def distances(tokens: np.ndarray, power: float) -> tuple[float, float, float]:
    """Return the total variation distance, half its interval, and that of exact samples."""
    law = law_of_texts(power)
    shares = np.array(list(law.values()))
    places = {text: place for place, text in enumerate(law)}
    drawn = np.array([places[tuple(text)] for text in tokens.tolist()])
    rng = np.random.default_rng(0)
    size = len(drawn)

    def distance(counts: np.ndarray) -> np.ndarray:
        return 0.5 * np.abs(counts / size - shares).sum(-1)

    found = np.bincount(drawn, minlength=len(law))
    again = distance(rng.multinomial(size, found / size, 400))
    noise = distance(rng.multinomial(size, shares, 400)).mean()
    return float(distance(found)), Z95 * float(again.std()), float(noise)


def measure(cell: ToyCell, num_runs: int) -> ToyRow:
    """Return the row of a cell."""
    found = sample(cell, num_runs)
    of_target, _, length = MODELS[cell.model]
    stop = NUM_TEXT_TOKENS - 1 if cell.model == "texts" else None
    errors = found.log_evidence - of_target().log_normalizer(cell.power, length, stop)
    squares = (errors - errors.mean()) ** 2
    ratios = np.exp(errors)
    is_texts = cell.model == "texts"
    tv = distances(found.tokens, cell.power) if is_texts else (None, None, None)
    half = Z95 / math.sqrt(num_runs)
    return ToyRow(
        cell=cell.slug,
        runs=num_runs,
        variance=float(squares.mean()),
        variance_half=half * float(squares.std()),
        kl_at_most=-float(errors.mean()),
        kl_half=half * float(errors.std()),
        mean_ratio=float(ratios.mean()),
        mean_ratio_half=half * float(ratios.std()),
        tokens_a_round=found.num_tokens / found.num_rounds,
        distance=tv[0],
        distance_half=tv[1],
        noise=tv[2],
    )


COLUMNS: dict[str, Callable[[ToyRow], str]] = {
    "": lambda row: f"`{row.cell}`",
    "runs": lambda row: str(row.runs),
    "variance of log Ẑ": lambda row: f"{row.variance:.2f} ± {row.variance_half:.2f}",
    "log Z less E log Ẑ": lambda row: f"{row.kl_at_most:.2f} ± {row.kl_half:.2f}",
    "E Ẑ / Z": lambda row: f"{row.mean_ratio:.2f} ± {row.mean_ratio_half:.2f}",
    "tokens a round": lambda row: f"{row.tokens_a_round:.2f}",
    "TV": lambda row: (
        "" if row.distance is None else f"{row.distance:.3f} ± {row.distance_half:.3f}"
    ),
    "noise alone": lambda row: "" if row.noise is None else f"{row.noise:.3f}",
}
NOTE = (
    "Powers of a known target, ± half of the 95 % interval; a cell is the model, alpha, the draft, "
    "N, the proposal, the resampling scheme and its ESS threshold.\n\n"
)


def write(folder: Any, rows: Sequence[ToyRow]) -> None:
    """Write the rows as CSV and as a table."""
    with (folder / "toy.csv").open("w", newline="") as file:
        names = [field.name for field in fields(ToyRow)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            values = asdict(row).items()
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values})
    (folder / "toy.md").write_text(NOTE + table(COLUMNS, rows) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells; return exit status 0 if it completes."""
    made = study.parser("power/toy", "Powers of a target that is known exactly.")
    study.add_selection(made)
    made.add_argument("--particles", type=study.positive, default=16_000, help="runs times N")
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options), study.GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    grid = study.selected(list(cells()), options.only)
    if options.list:
        print(*(cell.slug for cell in grid), sep="\n")
        return
    study.prepare_folder(options.output_dir)
    rows: list[ToyRow] = []
    for cell in grid:
        identity = study.code_fingerprint() | {"particles": options.particles}
        log = study.Log(options.output_dir / f"{cell.slug}.jsonl", identity)
        if options.fresh:
            log.drop()
        if not log.read():
            num_runs = min(2000, max(2, options.particles // cell.num_particles))
            with log.writing() as append:
                append(asdict(measure(cell, num_runs)))
        rows.append(ToyRow(**log.read()[0]))
        write(options.output_dir, rows)
    print((options.output_dir / "toy.md").read_text())
    if options.publish:
        study.copy(
            [options.output_dir / f"toy.{end}" for end in ("csv", "md")], PUBLISHED / "power"
        )


if __name__ == "__main__":
    study.as_script(main)
