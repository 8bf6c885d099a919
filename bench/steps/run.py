"""Simulate ways to choose K for each round on real text, by the cost of a token.

    .venv/bin/python bench/steps            # minutes; the draft's entropies are published
    .venv/bin/python bench/steps --fresh    # reads them again, after make real-models

Answers and their log q/p are those that `bench/real` published of the coder pair, ms those of
`bench/gpu` on an H200, measured or modelled. No figure here is a measurement.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import study
from gpu.expected import SHAPES, milliseconds, ours, published, tokens_by_name
from intervals import Interval, paired_ratio_of_ratios
from real.prompts import SPEC_BENCH, prompts
from results import Report, interval_cell, markdown_table
from speed import grid
from steps.rounds import (
    TOP,
    USERS,
    AsServed,
    Chooser,
    FixedSteps,
    KnownRequests,
    KnownRounds,
    Milliseconds,
    RecordedAnswer,
    RunningRequest,
    StepsByRequest,
    Stopping,
    play,
    tokens_a_round,
)
from study import PUBLISHED, Log, whole_lines

from sglang_smc.options.request import Budget
from sglang_smc_tools.real.models import CACHE, checkpoint, origin

TARGET = "coder-1.5b"
DRAFT = "coder-0.5b"
CELL = "coder-exact-n8-k8-t0.7"
TEMPERATURE = 0.7
ENTROPIES = "entropies.jsonl"
#: Bins of entropies, of as many tokens each.
NUM_BINS = 12
SEEDS = 3
#: How often each answer is written by a seed.
TIMES = 4
#: Of `foretold`: answers are written so often, rounds before one, and its tokens that are seen.
REPEATS = 20
LAST = 3
LOOKED_AT = 4
#: Longer answers are these, written so often in a row.
LENGTHS = {"at most 96 tokens": 1, "at most 288 tokens": 3}
#: ms until the host has read a value and launched the next pass: an assumption.
WAIT = 0.05
DRAFTS = {"head": grid.EXACT_HEAD, "draft model": grid.EXACT}
POLICY = "the policy"
WAYS: dict[str, Callable[[Budget, Milliseconds], Chooser]] = {
    "K = 4": lambda top, ms: FixedSteps(Budget(top.num_particles, 4)),
    "K = 8": lambda top, ms: FixedSteps(Budget(top.num_particles, 8)),
    "K = 17": lambda top, ms: FixedSteps(Budget(top.num_particles, 17)),
    POLICY: AsServed,
    "K by a request's last three rounds": partial(StepsByRequest, decay=0.7),
    "K by a request's last twenty": partial(StepsByRequest, decay=0.95),
    "a stop where chains are unsure": Stopping,
    "such a stop, and the host is asked": partial(Stopping, wait=WAIT),
    "bound: each answer known": KnownRequests,
    "bound: each round known": KnownRounds,
}


# --- What is recorded


def entropies(log: Log, path: Path) -> list[dict[str, Any]]:
    """Return the draft's entropies of each answer, of which the file may have some.

    Args:
        path: of the prompts.
    """
    answers = _published("answers")
    scores = _published("scores")
    missing = sorted(answers.keys() - {one["index"] for one in log.read()})
    if missing:
        from real.run import tokenizer
        from steps.certainty import entropies as read  # imports torch
        from steps.certainty import load

        asked = prompts(path, tokenizer(TARGET), max(answers) + 1)
        draft = load(checkpoint(DRAFT))
        with log.writing() as append:
            for index in study.bar(iterable=missing, desc="answers"):
                found = read(
                    draft,
                    prompt=asked[index],
                    answer=answers[index]["output_ids"],
                    accepted=_accepted(scores[index]),
                    temperature=TEMPERATURE,
                    seed=index,
                )
                append({"index": index, **found})
    return sorted(log.read(), key=lambda one: one["index"])


def _published(kind: str) -> dict[int, dict[str, Any]]:
    """Return the entries of a published cell, by answer."""
    _, *entries = whole_lines(PUBLISHED / "real" / kind / f"{CELL}.jsonl")
    return {one["index"]: one for one in entries}


def _accepted(scores: Mapping[str, Any]) -> np.ndarray:
    return np.minimum(np.exp(np.array(scores["log_ratios"])), 1.0)


def recorded_answers(found: Sequence[Mapping[str, Any]]) -> list[RecordedAnswer]:
    """Return the answers, each with guesses that were fitted to all others."""
    scores = _published("scores")
    accepted = [_accepted(scores[one["index"]]) for one in found]
    along = [np.array(one["along"]) for one in found]
    every = range(len(found))
    answers = []
    for own in every:
        others = [index for index in every if index != own]
        guess = guess_of(*(np.concatenate([of[i] for i in others]) for of in (along, accepted)))
        behind = {int(place): guess(one) for place, one in found[own]["behind"].items()}
        sure = guess(along[own])
        answers.append(RecordedAnswer(accepted[own], sure, behind, len(sure)))
    return answers


def guess_of(
    entropy: np.ndarray, accepted: np.ndarray
) -> Callable[[Sequence[float] | np.ndarray], np.ndarray]:
    """Return a function of entropies ``[L]``: the probability that tokens are accepted.

    It is linear between the medians of bins of as many tokens each.
    """
    bins = np.array_split(np.argsort(entropy, kind="stable"), NUM_BINS)
    medians = [np.median(entropy[one]) for one in bins]
    means = [accepted[one].mean() for one in bins]
    return lambda of: np.interp(of, medians, means)


def repeated(answer: RecordedAnswer, times: int) -> RecordedAnswer:
    """Return an answer that says the same ``times`` times."""
    return answer._replace(
        accepted=np.tile(answer.accepted, times), sure=np.tile(answer.sure, times)
    )


# --- The study


@dataclass(frozen=True, kw_only=True)
class StepsRow:
    """A way to choose K; every number is simulated."""

    draft: str
    num_particles: int
    length: str
    way: str
    users: int
    simulated_ms_a_token: float
    simulated_to_policy: Interval  # ms a token over the policy's, on the same answers


def rows_of(answers: Sequence[RecordedAnswer], seeds: int = SEEDS) -> Iterator[StepsRow]:
    """Yield a row for each draft, N, length of answers, number of users and way."""
    of_n = TOP, Budget(1, TOP.num_steps)
    for (draft, family), top, (length, times), users in product(
        DRAFTS.items(), of_n, LENGTHS.items(), USERS
    ):
        ms = milliseconds_of(family)
        longer = [repeated(one, times) for one in answers]
        played = {
            way: _sums(partial(make, top, ms), ms, longer, users, seeds)
            for way, make in WAYS.items()
        }
        for way, found in played.items():
            spent, tokens = found
            yield StepsRow(
                draft=draft,
                num_particles=top.num_particles,
                length=length,
                way=way,
                users=users,
                simulated_ms_a_token=float(spent.sum() / tokens.sum()),
                simulated_to_policy=paired_ratio_of_ratios(found, played[POLICY]),
            )


def _sums(
    make: Callable[[], Chooser],
    ms: Milliseconds,
    answers: Sequence[RecordedAnswer],
    users: int,
    seeds: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return each answer's ms and tokens, ``[answers]``, over all seeds."""
    runs = [play(make(), ms, answers, users, times=TIMES, seed=seed) for seed in range(seeds)]
    spent, tokens = (np.sum(of, 0) for of in zip(*runs, strict=True))
    return spent, tokens


def milliseconds_of(family: str) -> Milliseconds:
    """Return the ms of a round on an H200; without drafts, those of plain decoding."""
    results = published()

    @lru_cache
    def found(users: int, budget: Budget) -> float:
        if budget.num_steps == 0:
            batches = (1, 8, 32)
            plain = [milliseconds(results, SHAPES["AR"], batch)[0] for batch in batches]
            return float(np.interp(users, batches, plain))
        return milliseconds(results, ours(family, *budget), users)[0]

    return found


def markdown(rows: Sequence[StepsRow], note: str) -> str:
    """Return a page with a table for each N and length: a line for a way, a column for users."""
    parts = ["# Which K, simulated", note]
    for num_particles, length in product((TOP.num_particles, 1), LENGTHS):
        here = [row for row in rows if (row.num_particles, row.length) == (num_particles, length)]
        columns = {(row.draft, row.users): "" for row in here}
        by = {(row.way, (row.draft, row.users)): row for row in here}
        lines = [[way, *(_cell(by[way, of]) for of in columns)] for way in WAYS]
        headers = [f"{draft}, {users}" for draft, users in columns]
        parts.append(f"## N = {num_particles}, answers of {length}")
        parts.append(markdown_table(["over the policy's ms a token, by users", *headers], lines))
    return "\n\n".join(parts) + "\n"


def _cell(row: StepsRow) -> str:
    if row.way == POLICY:
        return f"1 ({row.simulated_ms_a_token:.2f} ms)"
    return interval_cell(row.simulated_to_policy, ".3f")


def note(origin: Mapping[str, Any]) -> str:
    """Return what the tables stand on."""
    told = origin["settings"]
    kept = "; ".join(
        f"{one:.2f} at {of}, {served:.2f} of a server, which verifies blocks and trees"
        for of, (one, served) in told["tokens_a_round"].items()
    )
    foretells = " and ".join(f"{of} ({r:.2f})" for of, r in told["correlations"].items())
    return (
        f"**All figures are simulated.** {told['answers']} answers of {TARGET} to Spec-Bench's "
        f"prompts, its kinds in turn, at T = {TEMPERATURE} (bench/results/real). Draft tokens of "
        f"{DRAFT} are verified one by one: a chain's is accepted with min(1, q / p), of N chains "
        f"rejections are 0.8 for each doubling, as the policy guesses. Tokens a round: {kept}. "
        f"What a round of N = 4, K = 16 keeps correlates with {foretells}. Ms are those of an 8B "
        "on an H200 with a head "
        "or a 1B draft, measured or modelled as in "
        "[gpu](../gpu/gpu.md). Longer answers say the recorded one three times. *The policy* is "
        "the package's, from N and K = 16 down. *K by a request's last rounds* takes in each round "
        "the K of most expected tokens a ms, from a running mean of each request's rejections. *A "
        "stop where chains are unsure* drafts a further token where the probability that all "
        "before it are kept is worth a pass of the draft; that is read from the entropies of the "
        "draft, by a curve fitted to the other answers. A captured round cannot stop: its passes "
        "are fixed; launched pass by pass, the device waits for the host before each but the "
        f"first, assumed {WAIT:g} ms (*and the host is asked*). In brackets 95 % intervals, over "
        f"answers. `bench/steps`, {origin['date'][:10]}, commit {origin['git_sha']}."
    )


REPORT = Report("steps", StepsRow, markdown)


def run(options: argparse.Namespace) -> None:
    """Record what is not there, simulate, and write the report."""
    folder = options.output_dir
    study.prepare_folder(folder)
    there = folder / ENTROPIES
    source = PUBLISHED / "steps" / ENTROPIES
    if source.exists() and not there.exists():
        shutil.copy(source, there)
    answers = PUBLISHED / "real" / "answers" / f"{CELL}.jsonl"
    identity = {"answers": sha256(answers.read_bytes()).hexdigest(), "draft": origin(DRAFT)}
    log = Log(there, identity)
    if options.fresh:
        log.drop()
    found = recorded_answers(entropies(log, options.prompts))
    sizes = Budget(1, 8), Budget(4, 17)
    served = tokens_by_name()
    settings = identity | {
        "answers": len(found),
        "tokens_a_round": {
            f"N = {n}, K = {k}": (
                _tokens(found, Budget(n, k)),
                served[f"exact N={n} K={k}"][f"{TEMPERATURE:g}"],
            )
            for n, k in sizes
        },
        "correlations": foretold(found),
    }
    print(REPORT.write(folder, list(rows_of(found)), settings, note))
    if options.publish:
        REPORT.publish(folder, PUBLISHED / "steps")
        study.copy([there], PUBLISHED / "steps")


def foretold(answers: Sequence[RecordedAnswer]) -> dict[str, float]:
    """Return what the tokens that a round of the most particles and steps keeps correlate with."""
    num_chains, most = TOP
    rounds: list[tuple[float, float, int]] = []
    draw = np.random.default_rng(0)
    for answer in [one for one in answers for _ in range(REPEATS)]:
        request = RunningRequest(0, answer, draw.random(answer.length))
        before: list[int] = []
        while request.place + most < answer.length:
            kept = min(request.kept(num_chains), most)
            if len(before) >= LAST:
                guess = request.sure(num_chains, most)[LOOKED_AT - 1]
                rounds.append((float(np.mean(before[-LAST:])), guess, kept))
            before.append(kept)
            request.place += kept + 1
    last, guess, kept = np.array(rounds).T
    return {
        f"the mean of the last {LAST}": float(np.corrcoef(last, kept)[0, 1]),
        f"the guess after {LOOKED_AT} drafted tokens": float(np.corrcoef(guess, kept)[0, 1]),
    }


def _tokens(answers: Sequence[RecordedAnswer], budget: Budget) -> float:
    lengths = [one.length for one in answers]
    rounds = [one.length / tokens_a_round(one.accepted, budget) for one in answers]
    return sum(lengths) / sum(rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; return exit status 0 if it completes."""
    made = study.parser("steps", "Simulate ways to choose K for each round on real text.")
    add = made.add_argument
    add("--prompts", type=Path, default=CACHE / SPEC_BENCH.name, help=SPEC_BENCH.where)
    add("--fresh", action="store_true", help="read the draft's entropies again")
    add("--publish", action="store_true", help="also copy to bench/results")
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options), study.GOES_ON)
