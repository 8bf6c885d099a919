"""What a round costs: by hand, as laws, and against what others have published."""

import dataclasses
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_smc.plan.devices import Device, named
from sglang_smc.plan.roofline import (
    LARGEST_BATCH,
    Scenario,
    ar_step,
    best_settings,
    sd_round,
    sd_tokens,
    smc_round,
    smc_tokens,
)
from sglang_smc.plan.shapes import ModelShape, from_config

#: 120 weights in its layer, 80 in its LM head, 16 bytes of KV a token, 32 operations a key.
TOY = ModelShape(
    num_layers=1,
    hidden_size=4,
    intermediate_size=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=20,
    tied_embeddings=True,
)
#: A draft that shares nothing with the target but the vocabulary.
SMALL = dataclasses.replace(TOY, num_heads=2, num_kv_heads=1)
DEVICE = Device("toy", bandwidth=100.0, flops=1000.0)
LLAMA = (from_config("llama-3.1-8b"), from_config("llama-3.2-1b"))

batches = st.integers(1, 64)
particles = st.integers(1, 32)
steps = st.integers(1, 16)
contexts = st.integers(0, 100_000)
tails = st.integers(0, 256)


def test_ar_step_by_hand() -> None:
    step = ar_step(TOY, batch=2, context=10)
    assert step.traffic == {
        "weights": 2 * 200,
        "kv": 2 * (10 + 1) * 16,  # 10 read and 1 written, each of two requests
        "logits": 2 * 20 * (4 + 4),
    }
    assert step.flops == 2 * (2 * 200 + 11 * 32)
    assert step.bytes == 400 + 352 + 320
    assert step.seconds(DEVICE) == pytest.approx(1072 / 100)
    assert step.bound(DEVICE) == "memory"


def test_smc_round_by_hand() -> None:
    """Two requests of three particles, with 10 tokens in common and 4 of their own each."""
    found = smc_round(TOY, TOY, 2, 3, num_steps=2, context=10, tail=4)
    first, second, verify = found.passes
    assert [one.weights for one in found.passes] == [400, 400, 400]
    # Read once a request, read of each particle, written.
    assert first.kv == (2 * 10 + 6 * 4 + 6 * 2) * 16
    assert second.kv == (2 * 10 + 6 * 6 + 6 * 1) * 16
    assert verify.kv == (2 * 10 + 6 * 4 + 6 * 3) * 16
    assert [one.logits for one in found.passes] == [6 * 160, 6 * 160, 18 * 160]
    assert first.flops == 12 * 240 + 6 * (15 + 16) * 32 + 6 * 160
    assert second.flops == 6 * 240 + 6 * 17 * 32 + 6 * 160
    assert verify.flops == 18 * 240 + 6 * (15 + 16 + 17) * 32 + 18 * 160
    assert found.parts["draft"].passes == (first, second)
    assert found.parts["verify"].passes == (verify,)


def test_prefix_that_is_not_shared_by_hand() -> None:
    shared = smc_round(TOY, TOY, 2, 3, 2, context=10, tail=4)
    apart = smc_round(TOY, TOY, 2, 3, 2, context=10, tail=4, shared_prefix=False)
    assert apart.bytes - shared.bytes == 3 * (6 - 2) * 10 * 16
    assert apart.flops == shared.flops


def test_passes_differ_in_what_bounds_them() -> None:
    found = smc_round(TOY, SMALL, 1, 4, 3, context=0)
    bounds = {one.name: one.cost.bound(Device("", 1.0, 2.0)) for one in found.passes}
    assert bounds == {"draft": "memory", "verify": "compute"}
    assert found.bound(Device("", 1.0, 2.0)) == "draft memory, verify compute"
    # Each pass takes the longer of its two times: more than the sums of either.
    assert found.seconds(Device("", 1.0, 2.0)) > max(found.bytes, found.flops / 2)


@given(batches, batches, particles, steps, contexts, tails, st.booleans())
def test_more_requests_are_never_faster(
    batch: int, more: int, n: int, k: int, context: int, tail: int, shared: bool
) -> None:
    device = named("h200")
    few = smc_round(*LLAMA, batch, n, k, context, tail, shared)
    many = smc_round(*LLAMA, batch + more, n, k, context, tail, shared)
    assert many.seconds(device) >= few.seconds(device)
    assert ar_step(LLAMA[0], batch + more, context).seconds(device) >= ar_step(
        LLAMA[0], batch, context
    ).seconds(device)


@given(batches, particles, steps, contexts, tails)
def test_sharing_a_prefix_never_costs_more(
    batch: int, n: int, k: int, context: int, tail: int
) -> None:
    shared = smc_round(*LLAMA, batch, n, k, context, tail, True)
    apart = smc_round(*LLAMA, batch, n, k, context, tail, False)
    assert shared.bytes <= apart.bytes
    assert (shared.bytes == apart.bytes) == (n == 1 or context == 0)


@given(batches, steps, contexts, tails)
def test_one_particle_costs_what_speculative_decoding_costs(
    batch: int, k: int, context: int, tail: int
) -> None:
    """Also with its tail counted as context: alone, it shares nothing with nobody."""
    one = smc_round(*LLAMA, batch, 1, k, context, tail)
    other = sd_round(*LLAMA, batch, k, context + tail)
    assert one.bytes == pytest.approx(other.bytes)
    assert one.flops == pytest.approx(other.flops)


@given(particles, steps, contexts)
def test_weights_are_read_once_a_pass(n: int, k: int, context: int) -> None:
    weights = smc_round(*LLAMA, 4, n, k, context).traffic["weights"]
    assert weights == pytest.approx(LLAMA[0].streamed_bytes + k * LLAMA[1].streamed_bytes)


def test_tokens_of_a_round() -> None:
    assert sd_tokens(0.5, 2) == 1 + 0.5 + 0.25
    assert sd_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert sd_tokens(1, 4) == 5
    assert sd_tokens(0, 4) == 1
    assert smc_tokens(8) == 9
    assert smc_tokens(8, kept=6.9) == 7.9


@pytest.mark.parametrize(("acceptance", "kept"), [(1.1, 8.1), (-0.1, -1)])
def test_impossible_tokens(acceptance: float, kept: float) -> None:
    with pytest.raises(ValueError, match="within 0 and 1"):
        sd_tokens(acceptance, 8)
    with pytest.raises(ValueError, match="within 0 and the 8 steps"):
        smc_tokens(8, kept)


def test_impossible_rounds() -> None:
    with pytest.raises(ValueError, match="batch is 0"):
        ar_step(TOY, 0, 10)
    with pytest.raises(ValueError, match="num_particles is 0"):
        smc_round(TOY, TOY, 1, 0, 1, 10)
    with pytest.raises(ValueError, match="num_steps is 0"):
        sd_round(TOY, TOY, 1, 0, 10)


def test_one_text_has_its_tail_in_its_context() -> None:
    """All methods are compared at the same length of text."""
    scenario = Scenario(TOY, SMALL, DEVICE, context=10, tail=4, shared_prefix=False)
    assert scenario.ar(2).round == ar_step(TOY, 2, 14)
    assert scenario.sd(2, 3, 0.5).round == sd_round(TOY, SMALL, 2, 3, 14)
    assert scenario.smc(2, 4, 3).round == smc_round(TOY, SMALL, 2, 4, 3, 10, 4, False)
    assert scenario.sd(2, 3, 0.5).tokens_per_second == pytest.approx(
        2 * 1.875 / scenario.sd(2, 3, 0.5).seconds
    )


def test_best_settings_looks_at_all() -> None:
    plan = best_settings(*LLAMA, named("h200"), 1, 1024, particles=(4, 8), steps=(4, 8, 16))
    rates = {(e.num_particles, e.num_steps): e.tokens_per_second for e in plan.grid}
    assert rates.keys() == {(n, k) for n in (4, 8) for k in (4, 8, 16)}
    assert (plan.best.num_particles, plan.best.num_steps) == max(rates, key=rates.__getitem__)
    assert (plan.best.num_particles, plan.best.num_steps) == (4, 16)


def test_best_settings_keeps_to_the_particles_that_quality_needs() -> None:
    plan = best_settings(*LLAMA, named("h200"), 1, 1024, min_particles=5, max_particles=8)
    assert {e.num_particles for e in plan.grid} == {8}
    with pytest.raises(ValueError, match="No number of particles lies within 17"):
        best_settings(*LLAMA, named("h200"), 1, 1024, min_particles=17)


def test_long_blocks_lose_where_little_of_them_is_kept() -> None:
    kept = {4: 3.9, 16: 5.0}
    plan = best_settings(*LLAMA, named("h200"), 1, 1024, steps=(4, 16), kept=kept)
    assert plan.best.num_steps == 4
    assert plan.best.tokens == 4.9


def test_plain_decoding_wins_from_just_that_batch() -> None:
    plan = best_settings(*LLAMA, named("h200"), 1, 1024, particles=[8], steps=[8])
    batch = plan.plain_wins_from
    assert batch is not None and batch > 1
    scenario = Scenario(*LLAMA, named("h200"), 1024)
    for size, wins in ((batch - 1, False), (batch, True)):
        ar, smc = scenario.ar(size).tokens_per_second, scenario.smc(size, 8, 8).tokens_per_second
        assert (ar >= smc) == wins


def test_plain_decoding_may_never_win() -> None:
    """At a long context the KV is what is read, and SMC reads it once for many tokens."""
    scenario = Scenario(*LLAMA, named("b200"), 1e6)
    assert scenario.plain_wins_from(lambda batch: scenario.smc(batch, 4, 8)) is None
    assert scenario.ar(LARGEST_BATCH).bound == "memory"


class Published(NamedTuple):
    """A measured speed, with the context that it had on average, and its share of the bound."""

    device: Device
    target: str
    draft: str
    setting: tuple[int, int] | None  # N and K; None is plain decoding
    context: float
    tail: float
    speed: float
    share: float


B200, H100, H100X4 = named("b200"), named("h100"), named("h100").times(4)
PAIR = ("llama-3.1-8b", "llama-3.2-1b")
PUBLISHED = {
    # The reference implementation's docs/smc/performance.md: prompts of three lengths, 1,024
    # tokens of output; its blog puts it at 34.5 % of the roofline.
    "SMC, prompt 256": Published(B200, *PAIR, (8, 8), 256, 512, 677, 0.345),
    "SMC, prompt 1k": Published(B200, *PAIR, (8, 8), 1024, 512, 641, 0.33),
    "SMC, prompt 4k": Published(B200, *PAIR, (8, 8), 4096, 512, 522, 0.28),
    # Its log of GSM8K runs.
    "SMC, H100": Published(H100, *PAIR, (12, 8), 256, 256, 307.7, 0.37),
    # SGLang's documentation of speculative decoding, MT-bench.
    "AR 8B": Published(H100, *PAIR, None, 512, 0, 158.34, 0.71),
    # The paper's figure 1.
    "AR 70B": Published(H100X4, "llama-3.1-70b", PAIR[1], None, 512, 0, 65.0, 0.68),
    # The reference's comparison with EAGLE-3.
    "AR Qwen3": Published(B200, "qwen3-8b", "qwen3-0.6b", None, 512, 0, 264, 0.5),
}


@pytest.mark.parametrize("case", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_speeds_reach_a_plausible_share_of_the_bound(case: Published) -> None:
    target, draft = from_config(case.target), from_config(case.draft)
    scenario = Scenario(target, draft, case.device, case.context, case.tail)
    bound = scenario.smc(1, *case.setting) if case.setting else scenario.ar(1)
    assert case.speed / bound.tokens_per_second == pytest.approx(case.share, rel=0.1)


def test_a_round_takes_as_long_as_the_reference_computes() -> None:
    """3.71 ms on a B200 at N = K = 4, from its megakernel study, with a fifth draft pass."""
    scenario = Scenario(from_config(PAIR[0]), from_config(PAIR[1]), B200, 512, 128)
    assert scenario.smc(1, 4, 4).seconds == pytest.approx(3.71e-3, rel=0.2)


def test_plain_decoding_overtakes_about_where_it_was_measured_to() -> None:
    """Qwen3-8B and 0.6B on a B200: with N = 4 behind at batch 32 and 64, ahead at 1."""
    scenario = Scenario(from_config("qwen3-8b"), from_config("qwen3-0.6b"), B200, 256, 128)
    batch = scenario.plain_wins_from(lambda size: scenario.smc(size, 4, 8))
    assert batch is not None and 16 <= batch <= 128
