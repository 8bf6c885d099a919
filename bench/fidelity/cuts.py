"""What may follow a cut: variants of mode smc against mode mixed, in tokens and in nats.

    python bench/fidelity/cuts.py                  # some 10 minutes on one core; resumes
    python bench/fidelity/cuts.py --answers 64     # a look

Mode smc cuts a block where its evidence is low, and the target draws the next token afresh from p.
The variants draw it otherwise, or cut elsewhere:

one text    where the population has one text at the start of a round, and the block is cut: what
            exact verification accepts of the N chains, if that is longer. Else as smc, with its
            weights.
any text    the same whatever the population: the text is drawn by weight, its own chains are
            verified, and the population goes on from there as one text.
residual    behind a cut each text draws from what p has beyond what its chains would have brought.
cap weight  no drafted token multiplies a weight by more than 2.
cap column  the evidence of a prefix counts as 1 at most, so that no column pays for a later one.

N = K = 8, but for exact verification of fewer and longer chains, as in `chains.py`, at equal rows.
Whole answers on held-out problems, the same for all. Fidelity is scored with the plain models, with
l = log q/p: the tilt sum(l - E_p l) / sum(Var_p l), 0 under the target, and the bound
KL(mode || target) >= E[sum log(1 - w + w q/p)] in nats an answer, w chosen on the other half. "Over
the curve" is a variant's number less what mode mixed has at equal tokens a pass, by straight lines
between its points; its interval resamples problems. Below 0 moves the frontier.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import logging

# Python has put this folder first; the benchmarks import each other from the one above.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from fidelity.cut_rules import CapColumn, CapWeight, Residual, VerifyAtCut, Weigh
from fidelity.nats import ratio
from fidelity.reference import Models
from fidelity.scoring import token_statistics
from fidelity.simulate import Answer, Llama, Model, Pair, Rule, Verify, answers
from fidelity.stats import normal_interval
from pair.task import held_out, messages
from results import Interval, interval_cell, markdown_table, provenance
from study import PAIR, Log, bar, code_fingerprint, digest, parser, positive, slug_of

TEMPERATURE, LIMIT, BATCH = 0.7, 160, 32
SHAPES = [(6, 11), (5, 13), (4, 17)]  # of chains: 72 scored rows, or 70
FIRST_PROBLEM = 30_000  # beyond those of the published tables
MIXTURES = torch.linspace(0.02, 0.9, 45, dtype=torch.float64)
RESAMPLES = 2000


class Arm(NamedTuple):
    """A rule with its name."""

    name: str
    rule: Rule
    num_particles: int = 8
    num_steps: int = 8

    @property
    def slug(self) -> str:
        return slug_of(self.name)


CURVE = [Arm("exact", Verify()), *(Arm(f"mixed c={c:g}", Verify(c)) for c in (2.0, 1.0, 0.5))]
ARMS = CURVE + [
    Arm(f"{name} c={c:g}", rule)
    for c in (1.0, 0.5)
    for name, rule in (
        ("smc", Weigh(c)),
        ("smc one text", VerifyAtCut(c, any_text=False)),
        ("smc any text", VerifyAtCut(c, any_text=True)),
        ("smc residual", Residual(c)),
        ("smc cap weight", CapWeight(c)),
        ("smc cap column", CapColumn(c)),
    )
]
ARMS += [Arm(f"exact N={n} K={k}", Verify(), n, k) for n, k in SHAPES]


# --- Fidelity


class Scored(NamedTuple):
    """What one answer says of its law."""

    num_tokens: int
    num_rounds: int
    shift: float  # sum of l - E_p l
    variance: float  # sum of Var_p l
    log_mixtures: list[float]  # sum of log(1 - w + w q/p), for each w of `MIXTURES`


def score(pair: Pair, prompts: Sequence[Sequence[int]], found: Sequence[Answer]) -> list[Scored]:
    """Score answers, each behind its prompt, by what p and q say to all of their tokens."""
    texts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, found, strict=True)]
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    log_p, log_q = _read(pair.target, padded), _read(pair.draft, padded)
    scored = []
    for row, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
        at = slice(len(prompt) - 1, len(texts[row]) - 1)
        tokens = torch.tensor(answer.tokens)
        scored.append(_score(log_p[row, at].double(), log_q[row, at].double(), tokens, answer))
    return scored


def _read(model: Model, texts: torch.Tensor) -> torch.Tensor:
    starts = torch.zeros(len(texts), dtype=torch.int64)
    return model.rows(len(texts), texts.shape[1]).log_probs(texts, starts)


def _score(
    log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor, answer: Answer
) -> Scored:
    """One answer, from log p and log q ``[T, V]`` at its tokens ``[T]``."""
    laws = (law.numpy() for law in (log_p, log_q))
    found = token_statistics(*laws, tokens.numpy())
    ratios = torch.from_numpy(found.log_ratio).expm1()  # [T]
    mixtures = torch.log1p(MIXTURES.unsqueeze(1) * ratios).sum(1)
    return Scored(
        len(tokens),
        answer.num_rounds,
        float(found.tilt.sum()),
        float(found.information.sum()),
        mixtures.tolist(),
    )


class Fidelity(NamedTuple):
    """What the answers of one arm, ``[n]`` each, say together."""

    tokens: np.ndarray  # beyond the first one, which is no round's
    rounds: np.ndarray
    shift: np.ndarray
    variance: np.ndarray
    log_odds: np.ndarray  # sum of log(1 - w + w q/p), at a w of the other half

    @classmethod
    def of(cls, scored: Sequence[Scored]) -> Fidelity:
        """Of two answers or more."""
        tokens, rounds, shift, variance, mixtures = (
            np.array(column, dtype=float) for column in zip(*scored, strict=True)
        )
        return cls(tokens - 1, rounds, shift, variance, cross_fitted(mixtures))

    def at(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens a pass, tilt and KL where answer i counts ``counts[..., i]`` times."""
        tokens_a_pass = (counts @ self.tokens) / (counts @ self.rounds)
        tilt = (counts @ self.shift) / (counts @ self.variance)
        return tokens_a_pass, tilt, (counts @ self.log_odds) / counts.sum(-1)


def cross_fitted(log_mixtures: np.ndarray) -> np.ndarray:
    """The column of ``[n, W]`` that is best for every other row, in the rows between: ``[n]``."""
    half = np.arange(len(log_mixtures)) % 2
    best = [log_mixtures[half != h].mean(0).argmax() for h in (0, 1)]
    return log_mixtures[np.arange(len(half)), np.array(best)[half]]


def over_curve(curve: Sequence[Fidelity], arm: Fidelity, seed: int = 0) -> list[Interval]:
    """Tilt and KL of an arm less the curve's at as many tokens; 95 % by resampling problems.

    Args:
        curve: arms in the order of their tokens a pass, on the arm's problems.
    """
    n = len(arm.tokens)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    counts = np.concatenate([np.ones((1, n)), drawn])  # the first: each problem once
    points = [one.at(counts) for one in curve]
    ours = arm.at(counts)
    gaps = []
    for what in (1, 2):
        there = [
            np.interp(ours[0][i], [p[0][i] for p in points], [p[what][i] for p in points])
            for i in range(len(counts))
        ]
        gap = ours[what] - np.array(there)
        low, high = np.quantile(gap[1:], [0.025, 0.975])
        gaps.append(Interval(float(gap[0]), float(low), float(high), n))
    return gaps


# --- The command


def load_pair(folder: Path, temperature: float) -> tuple[Models, Pair]:
    """The checkpoints of a folder in both forms, of `reference` and of `simulate`."""
    logging.disable_progress_bar()
    models = Models.load(folder)
    modules = (models.target.module, models.draft.module)  # pyright: ignore -- as loaded
    target, draft = (Llama(module, temperature) for module in modules)
    eos = models.tokenizer.eos_token_id
    assert isinstance(eos, int)
    return models, Pair(target, draft, eos)


def log_of(arm: Arm, folder: Path, seed: int) -> Log:
    """Where the answers of an arm are kept, and what they depend on."""
    here = Path(__file__).parent
    return Log(
        folder / f"{arm.slug}.jsonl",
        {
            **code_fingerprint(),
            "study": digest([here / "simulate.py", here / "cut_rules.py"]),
            "arm": arm.slug,
            "seed": seed,
        },
    )


def measure(arm: Arm, log: Log, models: Models, pair: Pair, num_answers: int, seed: int) -> None:
    """Complete an arm, a batch of problems at a time."""
    done = len(log.read())
    with log.writing() as write:
        for first in bar(iterable=range(done, num_answers, BATCH), desc=arm.name, unit="batch"):
            numbers = range(FIRST_PROBLEM + first, FIRST_PROBLEM + first + BATCH)
            prompts = [models.prompt_ids(messages(held_out(number))) for number in numbers]
            shape = arm.num_particles, arm.num_steps
            found = answers(pair, prompts, arm.rule, *shape, seed=seed + first, limit=LIMIT)
            for one in score(pair, prompts, found):
                write(one._asdict())


def summary(arms: dict[Arm, Fidelity]) -> list[dict[str, Any]]:
    """A row for each arm."""
    curve = [arms[arm] for arm in CURVE]
    rows = []
    for arm, found in arms.items():
        row: dict[str, Any] = {
            "name": arm.name,
            "tokens_per_pass": ratio(found.tokens, found.rounds),
            "tilt": ratio(found.shift, found.variance),
            "kl": normal_interval(found.log_odds.tolist()),
        }
        if arm not in CURVE:
            row["tilt_over_curve"], row["kl_over_curve"] = over_curve(curve, found)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    heads = ["", "tokens / pass", "tilt", "KL at least", "tilt over the curve", "KL over the curve"]
    names = ["tokens_per_pass", "tilt", "kl", "tilt_over_curve", "kl_over_curve"]
    lines = [
        [row["name"], *(interval_cell(row.get(name), ".2f") for name in names)] for row in rows
    ]
    return markdown_table(heads, lines)


def main() -> None:
    """Complete all arms, and write what they say."""
    options = _options()
    torch.set_num_threads(1)
    models, pair = load_pair(PAIR, TEMPERATURE)
    logs = {arm: log_of(arm, options.output_dir, options.seed) for arm in ARMS}
    for arm, log in logs.items():
        if arm.slug in (options.only or [arm.slug]):
            measure(arm, log, models, pair, options.answers, options.seed)
    kept = {arm: log.read()[: options.answers] for arm, log in logs.items()}
    if any(len(entries) < options.answers for entries in kept.values()):
        return
    rows = summary(
        {arm: Fidelity.of([Scored(**e) for e in entries]) for arm, entries in kept.items()}
    )
    settings = {"answers": options.answers, "seed": options.seed, "temperature": TEMPERATURE}
    results = {"provenance": provenance(settings), "rows": [plain(row) for row in rows]}
    (options.output_dir / "cuts.json").write_text(json.dumps(results, indent=2) + "\n")
    print(table(rows))


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Intervals as dictionaries."""
    return {k: v._asdict() if isinstance(v, Interval) else v for k, v in row.items()}


def _options() -> argparse.Namespace:
    found = parser("fidelity/cuts.py", "Variants of mode smc against mode mixed.")
    found.set_defaults(output_dir=Path("cuts-output"))
    found.add_argument("--answers", type=positive, default=128, help="of each arm")
    found.add_argument("--only", nargs="+", help="slugs of arms, for several processes")
    found.add_argument("--seed", type=int, default=0)
    return found.parse_args()


if __name__ == "__main__":
    main()
