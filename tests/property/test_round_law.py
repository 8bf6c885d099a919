"""The law of the package's own rounds, with models that read their KV through the ledger.

Against `test_toy_smc.py` these add the steps themselves, slots, emission on the way and the lag
bound. Seeds are fixed; error probabilities are those of correct code, had they been drawn.
"""

import itertools
import math

import pytest
import torch
from scipy.stats import chisquare
from toy_worker import NUM_CONTEXTS, Language, Outcome, ToyWorker

from sglang_smc.config import SMCConfig

VOCAB, EOS, LENGTH, NUM_RUNS = 3, 2, 5, 3000
Text = tuple[int, ...]


def languages(spread: float = 1.0, difference: float = 0.7) -> tuple[Language, Language]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(NUM_CONTEXTS, VOCAB, generator=generator) * spread
    logits[:, EOS] -= 1.0
    change = torch.randn(NUM_CONTEXTS, VOCAB, generator=generator) * difference
    return Language(logits), Language(logits + change)


def law(drawn_by: list[Language]) -> dict[Text, float]:
    """Probability of every output, filled up with EOS; ``drawn_by[i]`` draws position i."""
    found: dict[Text, float] = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        mass = 1.0
        for position, token in enumerate(text):
            if position and text[position - 1] == EOS:
                mass *= token == EOS
            elif mass:
                mass *= float(drawn_by[position].after(text[:position]).double().softmax(-1)[token])
        found[text] = mass
    return found


def run(
    config: SMCConfig, pair: tuple[Language, Language], rows: list[int] | None = None
) -> Outcome:
    target, draft = pair
    worker = ToyWorker(config, target, draft, num_requests=NUM_RUNS, max_new_tokens=LENGTH, eos=EOS)
    probs = target.after(()).double().softmax(-1).expand(NUM_RUNS, -1)
    first = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(4)).squeeze(1)
    rows = list(range(1, NUM_RUNS + 1)) if rows is None else rows
    return worker.run(rows, first[torch.tensor(rows) - 1])


def frequencies(outcome: Outcome) -> dict[Text, int]:
    texts, counts = outcome.outputs.unique(dim=0, return_counts=True)
    return {tuple(text): count for text, count in zip(texts.tolist(), counts.tolist(), strict=True)}


def p_value(outcome: Outcome, expected: dict[Text, float]) -> float:
    found, size = frequencies(outcome), len(outcome.outputs)
    assert all(expected[text] > 0 for text in found)
    common = [text for text, mass in expected.items() if mass * size >= 8]
    observed = [found.get(text, 0) for text in common]
    wanted = [expected[text] * size for text in common]
    return float(chisquare([*observed, size - sum(observed)], [*wanted, size - sum(wanted)]).pvalue)


def total_variation(outcome: Outcome, expected: dict[Text, float]) -> float:
    found, size = frequencies(outcome), len(outcome.outputs)
    return 0.5 * sum(abs(found.get(text, 0) / size - mass) for text, mass in expected.items())


def settings(num_particles: int, num_steps: int, **more: object) -> SMCConfig:
    return SMCConfig(num_particles=num_particles, num_steps=num_steps, **more)


@pytest.mark.parametrize("max_lag", [1, LENGTH])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_one_particle_follows_q_where_drafted_and_p_where_bonus(
    num_steps: int, max_lag: int
) -> None:
    """Error probability 1e-4 each; the slightest misreading of KV changes every context."""
    target, draft = languages()
    outcome = run(settings(1, num_steps, max_lag=max_lag), (target, draft))
    drawn_by = [target if t % (num_steps + 1) == 0 else draft for t in range(LENGTH)]
    assert p_value(outcome, law(drawn_by)) > 1e-4
    assert p_value(outcome, law([target] * LENGTH)) < 1e-9, "the test could not tell them apart"


@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize("max_lag", [1, 3, LENGTH])
def test_draft_equal_to_target_is_exact(max_lag: int, resample_at: str) -> None:
    """Error probability 1e-4 each; exact evidence, since no weight ever leaves 1."""
    target, _ = languages()
    config = settings(4, 2, ess_threshold=1.0, resample_at=resample_at, max_lag=max_lag)
    outcome = run(config, (target, target))
    assert p_value(outcome, law([target] * LENGTH)) > 1e-4
    assert outcome.log_evidence.abs().max() < 1e-12


@pytest.mark.parametrize("max_lag", [1, 2, LENGTH])
@pytest.mark.parametrize("resample_at", ["block", "token"])
@pytest.mark.parametrize(("num_particles", "num_steps"), [(2, 1), (4, 2), (5, 4)])
def test_evidence_is_unbiased(
    num_particles: int, num_steps: int, resample_at: str, max_lag: int
) -> None:
    """E[Z-hat] = 1 within 4 standard errors (error probability 6e-5 each)."""
    config = settings(num_particles, num_steps, resample_at=resample_at, max_lag=max_lag)
    outcome = run(config, languages())
    evidence = outcome.log_evidence.exp()
    assert abs(evidence.mean() - 1) < 4 * evidence.std() / math.sqrt(NUM_RUNS)
    if num_steps + 1 < LENGTH:  # else one round may be all there is
        assert (outcome.num_forced > 0) == (max_lag < LENGTH)
        assert outcome.num_emitted_early > 0


@pytest.mark.parametrize("ess_threshold", [0.5, 1.0])
@pytest.mark.parametrize(("num_steps", "resample_at"), [(1, "block"), (2, "block"), (3, "token")])
def test_many_particles_come_near_the_target(
    num_steps: int, resample_at: str, ess_threshold: float
) -> None:
    """With this many runs noise alone makes a TV of about .04; one particle's law is .26 away.

    Threshold 1 resamples after every block, or token: a bonus token that is drawn behind another
    particle or another column than the one it follows puts the law far off.
    """
    target, draft = languages()
    config = settings(
        24, num_steps, resample_at=resample_at, ess_threshold=ess_threshold, max_lag=LENGTH
    )
    outcome = run(config, (target, draft))
    assert total_variation(outcome, law([target] * LENGTH)) < 0.06


def test_a_request_draws_the_same_text_alone_and_in_any_batch() -> None:
    config = settings(4, 2, max_lag=3)
    together = run(config, languages()).outputs
    for rows in ([7], [9, 7, 2000], [2999, 1]):
        alone = run(config, languages(), rows).outputs
        assert torch.equal(alone, together[torch.tensor(rows) - 1])
