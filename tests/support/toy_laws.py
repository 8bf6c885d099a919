"""Runs of `toy_worker` and the laws to hold them against."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import laws
import torch
from toy_worker import NUM_CONTEXTS, Language, Outcome, ToyWorker

from sglang_smc.options.request import OFF, Budget
from sglang_smc.options.server import FIELDS, SMCConfig
from sglang_smc.smc.ops import Ops

VOCAB = 3
EOS = 2
LENGTH = 5
NUM_RUNS = 1200
Text = tuple[int, ...]
SCRIPTS = {  # budgets of rounds in turn, for servers with N = 4
    "fewer": (Budget(4, 1), Budget(2, 1)),
    "more": (Budget(2, 1), Budget(4, 1)),
    "down to none and back": (Budget(4, 1), OFF, Budget(3, 1)),
    "one chain and back": (Budget(1, 1), Budget(4, 1)),
    "without drafts, then fewer": (Budget(4, 0), Budget(3, 1), Budget(2, 0)),
}


def languages(difference: float = 0.7, device: str = "cpu") -> tuple[Language, Language]:
    """A target, and a draft that is a perturbed target."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(2, NUM_CONTEXTS, VOCAB, generator=generator).to(device)
    drawn[0, :, EOS] -= 1.0
    return Language(drawn[0]), Language(drawn[0] + drawn[1] * difference)


def next_law(language: Any, before: Text) -> torch.Tensor:
    return language.after(before).double().softmax(-1)


def law_by(next_probs: laws.NextProbs) -> dict[Text, float]:
    """Probability of every output, filled up with EOS."""
    found = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0.0)
    for text, mass in laws.enumerate_law(LENGTH, EOS, lambda _: next_probs).items():
        found[(*text, *[EOS] * LENGTH)[:LENGTH]] = mass
    return found


def law(*languages: Any) -> dict[Text, float]:
    """Of texts whose tokens languages draw in turn."""
    return law_by(lambda text: next_law(languages[len(text) % len(languages)], text))


def unstratified(ops: Ops) -> Ops:
    """Operations whose particles share no uniform, though their texts be the same."""

    def itself(texts: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        itself = torch.eye(texts.shape[1], dtype=torch.bool, device=texts.device)
        return itself.expand(len(texts), -1, -1)

    return ops._replace(same_text=itself)


TARGET, DRAFT = PAIR = languages()
P = law(TARGET)
#: The plain algorithm of the paper, which keeps what it drafts.
PLAIN: dict[str, Any] = {"evidence_threshold": 0.0, "max_lag": LENGTH}


def toy(
    num_requests: int,
    pair: tuple[Language, Language] = PAIR,
    *,
    limit: int = LENGTH,
    kind: Callable[..., Any] = ToyWorker,
    **options: Any,
) -> Any:
    """Make a worker; ``options`` are those of `SMCConfig` and of `ToyWorker`."""
    config = SMCConfig(**{name: options.pop(name) for name in FIELDS.keys() & options.keys()})
    sizes = {"num_requests": num_requests, "max_new_tokens": limit, "eos": EOS}
    return kind(config, *pair, **{**sizes, **options})


def run(
    pair: tuple[Language, Language] = PAIR,
    rows: list[int] | None = None,
    *,
    num_runs: int = NUM_RUNS,
    **options: Any,
) -> Outcome:
    """Serve requests in ``rows``, or all of them, in one batch; every slot stays where it belongs.

    ``options`` are those of `toy`.
    """
    worker = toy(num_runs, pair, **options)
    outcome = worker.run(list(range(1, num_runs + 1)) if rows is None else rows)
    worker.check_owned()
    return outcome


def pairwise(*settings: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Cases in which every two settings meet with all pairs of their values: an orthogonal array.

    Of p + 1 settings with at most p values each it has p * p rows, for a prime p.
    """
    most = max(len(settings) - 1, *map(len, settings))
    prime = next(p for p in (2, 3, 5, 7) if p >= most)
    for a, b in itertools.product(range(prime), repeat=2):
        levels = [a, *((b + a * factor) % prime for factor in range(prime))]
        yield tuple(
            values[level % len(values)] for values, level in zip(settings, levels, strict=False)
        )


def frequencies(outcome: Outcome) -> dict[Text, int]:
    """How often each text came out."""
    texts, counts = outcome.outputs.unique(dim=0, return_counts=True)
    return {tuple(text): count for text, count in zip(texts.tolist(), counts.tolist(), strict=True)}


def p_value(outcome: Outcome, expected: dict[Text, float]) -> float:
    """Chi-square p-value of what came out under a law; rare texts share a cell."""
    possible = {text: mass for text, mass in expected.items() if mass > 0}
    return laws.p_value(map(tuple, outcome.outputs.tolist()), possible)


def total_variation(outcome: Outcome, masses: Mapping[Text, float], power: float = 1.0) -> float:
    """Distance of what came out to the law of these masses to a power, normalised."""
    found = frequencies(outcome)
    size = len(outcome.outputs)
    total = sum(mass**power for mass in masses.values())
    each = masses.items()
    return 0.5 * sum(abs(found.get(text, 0) / size - mass**power / total) for text, mass in each)


def assert_properly_weighted(
    outcome: Outcome, masses: Mapping[Text, float], power: float = 1.0
) -> None:
    """E[Z-hat f(x)] is the sum of f over ``masses`` to a power, for f = 1 and each of the largest.

    True for any N, unlike any law of the texts themselves. Within 4.5 standard errors, so that
    correct code fails at 1 in 10,000 draws; the error of a text is no less than that of its count.
    """
    masses = {text: mass**power for text, mass in masses.items()}
    evidence = outcome.log_evidence.exp()
    size = len(outcome.outputs)
    texts, which = outcome.outputs.unique(dim=0, return_inverse=True)
    is_possible = torch.tensor([masses[tuple(text)] > 0 for text in texts.tolist()])
    assert not evidence[~is_possible[which]].any(), "a text weighs that has no mass"
    largest = sorted(masses, key=lambda text: -masses[text])[:12]
    counts = frequencies(outcome)
    likeliest = [text for text in largest if counts.get(text, 0) >= 20]  # else no normal law
    picked = [(outcome.outputs == torch.tensor(text)).all(1) for text in likeliest]
    lines = torch.stack([evidence, *(evidence * one for one in picked)])
    total = sum(masses.values())
    shares = torch.tensor([1.0, *(masses[text] / total for text in likeliest)])
    least = total * (shares * (1 - shares)).clamp_min(0).sqrt()
    errors = torch.maximum(lines.std(1), least) / size**0.5
    differences = (lines.mean(1) - total * shares) / (errors + 1e-12)
    assert differences.abs().max() < 4.5, differences
