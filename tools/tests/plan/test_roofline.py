"""What a round costs, by hand."""

import dataclasses
from typing import Any

import pytest
from toy_plans import DFLASH_CONFIG, EAGLE3_CONFIG, TOY

from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.plan.devices import Device, named
from sglang_smc_tools.plan.memory import kv_slots
from sglang_smc_tools.plan.roofline import LARGEST_BATCH, PassRows, Scenario, ar_step, smc_round
from sglang_smc_tools.plan.shapes import DRAFTS, NGRAM, ModelShape
from sglang_smc_tools.plan.shapes import draft_from_config as draft_of

#: A draft that shares nothing with the target but the vocabulary.
SMALL = dataclasses.replace(TOY, num_heads=2, num_kv_heads=1)
MATCHES = DRAFTS[NGRAM]
DEVICE = Device("toy", bandwidth=100.0, flops=1000.0)
H200 = named("h200")
B200 = named("b200")
LLAMA = (draft_of("llama-3.1-8b"), draft_of("llama-3.2-1b"))


def toy_round(draft: ModelShape, **more: Any) -> Any:
    """Two requests of three particles, with 10 tokens in common and 4 of their own each."""
    return smc_round(TOY, draft, PassRows(2, 3, 10, tail=4, **more), 2)


def test_ar_step_by_hand() -> None:
    step = ar_step(TOY, batch=2, context=10)
    assert step.traffic == {
        "weights": 2 * 200,
        "kv": 2 * (10 + 1) * 16,  # 10 read and 1 written, each of two requests
        "logits": 2 * 20 * (4 + 4),
    }
    assert step.flops == 2 * (2 * 200 + 11 * 32)
    assert step.seconds(DEVICE) == pytest.approx((400 + 352 + 320) / 100)
    assert step.bound(DEVICE) == "memory"


def test_smc_round_by_hand() -> None:
    found = toy_round(TOY)
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
    apart = toy_round(TOY, shared_prefix=False)
    assert apart.bytes - found.bytes == 3 * (6 - 2) * 10 * 16
    assert apart.flops == found.flops


def test_eagle3_round_by_hand() -> None:
    found = toy_round(draft_of(EAGLE3_CONFIG))
    first, second, verify, follow = found.passes
    assert [one.name for one in found.passes] == ["draft", "draft", "verify", "follow"]
    for step, one in enumerate((first, second)):
        assert one.weights == 2 * (120 + 64 + 24)
        assert one.kv == (2 * 10 + 6 * (4 + step) + 6) * 16
        assert one.logits == 6 * 6 * 8
        assert one.flops == 6 * 2 * (120 + 64 + 24) + 6 * (15 + step) * 32
    assert verify == toy_round(MATCHES).passes[0]
    assert (follow.weights, follow.logits) == (2 * (120 + 64 + 48), 0)
    assert follow.kv == (2 * 10 + 6 * 4 + 6 * 3) * 16
    assert follow.flops == 18 * 2 * (120 + 64 + 48) + 6 * (15 + 16 + 17) * 32
    assert found.layers == 4


def test_a_markov_head_adds_a_product_to_each_step() -> None:
    head = draft_of(DFLASH_CONFIG)
    spark = dataclasses.replace(head, step_parameters=18)
    block, *steps, verify, follow = toy_round(spark).passes
    assert (block, verify, follow) == toy_round(head).passes
    for step in steps:
        assert (step.weights, step.logits, step.flops) == (2 * 18, 6 * 20 * 8, 6 * 2 * 18)
    assert len(steps) == 2


def test_dflash_round_by_hand() -> None:
    found = toy_round(draft_of(DFLASH_CONFIG))
    draft, verify, follow = found.passes
    assert draft.weights == 2 * (2 * 120 + 80)  # and the target's LM head
    assert draft.kv == (2 * 10 + 6 * 4 + 6 * 3) * 32
    assert draft.logits == 6 * 2 * 20 * 8
    # Each of three columns sees 14 tokens and all three columns; two of them have logits.
    assert draft.flops == 18 * 2 * 240 + 6 * 3 * 17 * 64 + 12 * 2 * 80
    assert verify == toy_round(MATCHES).passes[0]
    assert (follow.weights, follow.kv) == (2 * (48 + 64), 18 * 32)
    assert follow.flops == 18 * 2 * (48 + 64)
    assert found.layers == 2 + 1 + 1
    # With a window, one of two layers sees 5 of 10 tokens: (10 + 5) / 2 on average.
    types = ["sliding_attention", "full_attention"]
    head = draft_of(DFLASH_CONFIG | {"layer_types": types, "sliding_window": 5})
    assert (head.windowed_layers, head.window) == (1, 5)
    assert toy_round(head).passes[0].kv == (2 * 7.5 + 6 * 4 + 6 * 3) * 32


def test_matches_cost_the_target_alone() -> None:
    assert [one.name for one in toy_round(MATCHES).passes] == ["verify"]
    assert MATCHES.resident_bytes == MATCHES.kv_bytes_per_token == 0
    assert kv_slots(TOY, MATCHES, TOY.resident_bytes + 160, SMCConfig(), 1) == 10


def test_passes_differ_in_what_bounds_them() -> None:
    found = smc_round(TOY, SMALL, PassRows(1, 4, 0), 3)
    device = Device("", 1.0, 2.0)
    assert found.bound(device) == "draft memory, verify compute"
    # Each pass takes the longer of its two times: more than the sums of either.
    assert found.seconds(device) > max(found.bytes, found.flops / 2)


def test_tokens_of_a_round() -> None:
    it = Scenario(TOY, TOY, DEVICE, 10)
    assert (it.sd(1, 4, 1).tokens, it.sd(1, 4, 0).tokens) == (5, 1)
    assert it.sd(1, 4, 0.8).tokens == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_one_text_has_its_tail_in_its_context() -> None:
    """All methods are compared at the same length of text."""
    scenario = Scenario(TOY, SMALL, DEVICE, context=10, tail=4, shared_prefix=False)
    assert scenario.ar(2).round == ar_step(TOY, 2, 14)
    assert scenario.sd(2, 3, 0.5).round == smc_round(TOY, SMALL, PassRows(2, 1, 14), 3)
    assert scenario.smc(2, 4, 3).round == smc_round(TOY, SMALL, PassRows(2, 4, 10, 4, False), 3)
    speculative = scenario.sd(2, 3, 0.5)
    assert speculative.tokens_per_second == pytest.approx(2 * 1.875 / speculative.seconds)


def test_best_settings() -> None:
    """Of all that quality needs; and long blocks lose where little of them is kept."""
    scenario = Scenario(*LLAMA, H200, 1024)
    best, grid = scenario.best(1, (4, 8), (4, 8, 16))
    rates = {(e.num_particles, e.num_steps): e.tokens_per_second for e in grid}
    assert rates.keys() == {(n, k) for n in (4, 8) for k in (4, 8, 16)}
    assert (best.num_particles, best.num_steps) == max(rates, key=rates.__getitem__)
    assert {e.num_particles for e in scenario.best(1, min_particles=5)[1]} == {8, 16}
    cut, _ = scenario.best(1, steps=(4, 16), kept={4: 3.9, 16: 5.0})
    assert (cut.num_steps, cut.tokens) == (4, 4.9)


def test_plain_decoding_wins_from_just_that_batch_or_never() -> None:
    scenario = Scenario(*LLAMA, H200, 1024)
    batch = scenario.smc(1, 8, 8).plain_wins_from
    assert batch is not None and batch > 1
    for size, wins in ((batch - 1, False), (batch, True)):
        ar = scenario.ar(size).tokens_per_second
        smc = scenario.smc(size, 8, 8).tokens_per_second
        assert (ar >= smc) == wins
    # At a long context the KV is what is read, and SMC reads it once for many tokens.
    scenario = Scenario(*LLAMA, B200, 1e6)
    assert scenario.smc(1, 4, 8).plain_wins_from is None
    assert scenario.ar(LARGEST_BATCH).round.bound(B200) == "memory"
