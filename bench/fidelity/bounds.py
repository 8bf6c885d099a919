"""How far the answers of SMC are from the target's: bounds in nats on whole answers.

    python bench/fidelity/bounds.py                                  # N=8, K=8 on the shipped pair
    python bench/fidelity/bounds.py --num-steps 4 --resample-at token --temperature 1

p is the target's law of answers x, s that of an SMC run's, Z-hat the run's evidence estimate; the
true evidence is 1. Write c(w | x) for the law of a conditional run given x (reference.py). A run
that gives (w, x) has density

    s(w, x) = p(x) c(w | x) / Z-hat(w),    hence  g(x) := s(x) / p(x) = E[1 / Z-hat | x] under c,

and the runs that gave x have the law s(w | x) = c(w | x) / (Z-hat g(x)). Let G be the mean of
1 / Z-hat over several runs. All bounds compare log G with log g:

upper          KL(s || p) = E_s[log g] <= E[log G], G over the run that gave x and M conditional
               runs. By symmetry their joint law is c...c G / g, so E[log G | x] = E_c[G log G] / g,
               which by Jensen is at least log g, and falls as M grows.
upper_of_runs  the same with M = 0: E[-log Z-hat] of plain runs. An engine can report it.
lower          KL(s || p) >= E[log G], G over M conditional runs alone given x ~ s (Jensen).
reverse_upper  KL(p || s) = E_p[-log g] <= E[-log G], G over M conditional runs given x ~ p
               (Jensen).
reverse_lower  KL(p || s) >= E_p[f] + 1 - E_s[exp f] with f = min(-log G, log 10), G over M
               conditional runs given x ~ p and given x ~ s. Any f would do (Nguyen, Wainwright,
               Jordan 2010, arXiv 0809.0853), and an f that draws on the runs, too, since their law
               given x is the same on both sides. Without the minimum E_s[exp f] would hang on
               answers too rare to be sampled; with it the bound never exceeds 1 + log 10, and
               nothing can certify more than about log n nats from n samples (McAllester, Stratos
               2020, arXiv 1811.04251). The pooling that gives `upper` is of no use here: it needs
               a run that gave x, for x ~ p.

Grosse, Ghahramani, Adams 2015 (arXiv 1511.02543) and Zhao et al. 2024 (arXiv 2404.17546) bound
log Z so from both sides; here log Z is known, which leaves the divergences. Both lower bounds may
be negative, where 0 is the better bound.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import logging

# Python has put this folder first; the benchmarks import each other from the one above.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from fidelity.reference import Models, Outcome, Setting, ancestral, run
from fidelity.stats import normal_interval
from pair.task import held_out, messages
from results import Interval

from sglang_smc.smc.resampling import SCHEMES
from sglang_smc.smc.weights import log_mean_exp

PAIR = Path(__file__).resolve().parents[1] / "pair"
#: Where p / s is cut in the bound that averages it over samples of s.
LARGEST_ODDS = 10.0


class KLBounds(NamedTuple):
    """Bounds in nats an answer, means over problems; the module's docstring derives them."""

    upper: Interval
    upper_of_runs: Interval
    lower: Interval
    reverse_upper: Interval
    reverse_lower: Interval
    answer_tokens: Interval  # length of SMC's answers


class _Evidence(NamedTuple):
    """What was run for one problem: log Z-hat in nats."""

    of_run: torch.Tensor  # [1] the run that gave x ~ s
    given_smc: torch.Tensor  # [M] conditional runs given that x
    given_target: torch.Tensor  # [M] conditional runs given another x ~ p
    num_tokens: int  # of x ~ s


def kl_bounds(
    models: Models,
    problems: Sequence[Sequence[int]],
    setting: Setting,
    temperature: float,
    *,
    num_conditional: int = 4,
    seed: int = 0,
    max_new_tokens: int = 160,
    progress: bool = False,
) -> KLBounds:
    """Bounds on KL(s || p) and KL(p || s), averaged over problems.

    Args:
        problems: token ids of the prompts, at least two.
        num_conditional: M, conditional runs given each of two answers a problem; 2 M + 1 runs
            and one answer of the target's in all.
        progress: whether to show a bar.

    Problem i draws from ``seed + i``, whatever else is asked for.
    """
    eos, limit = models.tokenizer.eos_token_id, max_new_tokens
    evidence = []
    for prompt_ids, generator in _each(problems, seed, "KL bounds" if progress else None):
        once = partial(
            run, models, prompt_ids, setting, temperature, generator, max_new_tokens=limit
        )
        exact = ancestral(
            models.target, prompt_ids, eos, temperature, generator, max_new_tokens=limit
        )
        evidence.append(_measure(once, exact, num_conditional))
    return _bounds(evidence)


def variance_of_log_evidence(
    models: Models,
    problems: Sequence[Sequence[int]],
    setting: Setting,
    temperature: float,
    *,
    repeats: int = 4,
    seed: int = 0,
    max_new_tokens: int = 160,
    progress: bool = False,
) -> Interval:
    """Variance of log Z-hat over runs on one prompt, per 100 tokens, averaged over problems.

    Args:
        problems: token ids of the prompts, at least two.
        repeats: runs on each, at least two; their mean length stands for the problem's.
    """
    found = []
    for prompt_ids, generator in _each(problems, seed, "Var(log Z)" if progress else None):
        outcomes = [
            run(models, prompt_ids, setting, temperature, generator, max_new_tokens=max_new_tokens)
            for _ in range(repeats)
        ]
        variance = torch.tensor([outcome.log_evidence for outcome in outcomes]).var()
        num_tokens = sum(len(outcome.tokens) for outcome in outcomes) / repeats
        found.append(float(variance) / (num_tokens / 100))
    return normal_interval(found)


def _each(
    problems: Sequence[Sequence[int]], seed: int, progress: str | None
) -> Iterator[tuple[Sequence[int], torch.Generator]]:
    """Each problem with a generator of its own; ``progress`` names the bar, if one is shown."""
    bar = tqdm(problems, desc=progress, unit="problem", disable=progress is None)
    for index, prompt_ids in enumerate(bar):
        yield prompt_ids, torch.Generator().manual_seed(seed + index)


def _measure(once: Callable[..., Outcome], exact: list[int], num_conditional: int) -> _Evidence:
    """One run, and conditional runs given its answer and given ``exact``, one of the target's."""

    def given(answer: list[int]) -> torch.Tensor:
        outcomes = [once(retained=answer) for _ in range(num_conditional)]
        return torch.tensor([outcome.log_evidence for outcome in outcomes], dtype=torch.float64)

    smc = once()
    of_run = torch.tensor([smc.log_evidence], dtype=torch.float64)
    return _Evidence(of_run, given(smc.tokens), given(exact), len(smc.tokens))


def _log_inverse(log_evidence: torch.Tensor) -> float:
    """log G: the log of the mean of 1 / Z-hat."""
    return float(log_mean_exp(-log_evidence))


def _cut(log_g: float) -> float:
    """f of the docstring: the log of p / s as G has it, but for large values."""
    return min(-log_g, math.log(LARGEST_ODDS))


def _bounds(evidence: list[_Evidence]) -> KLBounds:
    given_smc = [_log_inverse(e.given_smc) for e in evidence]
    given_target = [_log_inverse(e.given_target) for e in evidence]
    return KLBounds(
        upper=normal_interval([_log_inverse(torch.cat([e.of_run, e.given_smc])) for e in evidence]),
        upper_of_runs=normal_interval([_log_inverse(e.of_run) for e in evidence]),
        lower=normal_interval(given_smc),
        reverse_upper=normal_interval([-log_g for log_g in given_target]),
        reverse_lower=normal_interval(
            [
                _cut(log_p) + 1 - math.exp(_cut(log_s))
                for log_p, log_s in zip(given_target, given_smc, strict=True)
            ]
        ),
        answer_tokens=normal_interval([e.num_tokens for e in evidence]),
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; their words are those of the server's flags."""
    parser = argparse.ArgumentParser(
        description="Bounds on the divergence between SMC's answers and the target's, in nats.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--pair", type=Path, default=PAIR, help="folder of target and draft")
    add("--problems", type=int, default=60, help="held-out problems, at least 2")
    add("--num-particles", type=int, default=8, help="N")
    add("--num-steps", type=int, default=8, help="K, tokens drafted a round")
    add("--resample-at", choices=("block", "token"), default="block")
    add("--ess-threshold", type=float, default=0.5, help="resample where ESS < this * N")
    add("--resampling-method", choices=list(SCHEMES), default="systematic")
    add("--stratified", action=argparse.BooleanOptionalAction, default=True, help="draws")
    add("--temperature", type=float, default=0.7, help="above 0")
    add("--num-conditional", type=int, default=4, help="conditional runs an answer")
    add("--repeats", type=int, default=4, help="runs a problem for the variance, at least 2")
    add("--seed", type=int, default=0, help="problem i draws from seed + i")
    add("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args(argv)


def print_lines(lines: dict[str, Interval]) -> None:
    """Each number with its name and interval."""
    for name, value in lines.items():
        print(f"{name:26}{value.mean:8.2f} [{value.low:.2f}, {value.high:.2f}]", flush=True)


def print_bounds(bounds: KLBounds) -> None:
    """The bounds, under names that explain themselves."""
    lines = {
        "KL(SMC || target), upper": bounds.upper,
        "  from plain runs alone": bounds.upper_of_runs,
        "KL(SMC || target), lower": bounds.lower,
        "KL(target || SMC), upper": bounds.reverse_upper,
        "KL(target || SMC), lower": bounds.reverse_lower,
        "tokens an answer": bounds.answer_tokens,
    }
    print_lines(lines)


def main() -> None:
    """Measure one setting and print its numbers."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    models = Models.load(options.pair)
    problems = [models.prompt_ids(messages(held_out(i))) for i in range(options.problems)]
    setting = Setting(
        options.num_particles,
        options.num_steps,
        options.resample_at,
        options.ess_threshold,
        options.resampling_method,
        options.stratified,
    )
    common = {"seed": options.seed, "progress": True}
    arguments = (models, problems, setting, options.temperature)
    print(f"{setting}, temperature {options.temperature}")
    print(f"nats an answer, {options.problems} problems, 95 % intervals over problems")
    print_bounds(kl_bounds(*arguments, num_conditional=options.num_conditional, **common))
    variance = variance_of_log_evidence(*arguments, repeats=options.repeats, **common)
    print_lines({"Var(log Z) / 100 tokens": variance})


if __name__ == "__main__":
    main()
