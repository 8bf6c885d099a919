"""What drafts beside language models: sizes and passes by hand, orders that hold, and refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_smc.plan import heads, proposals
from sglang_smc.plan.blocks import Windows
from sglang_smc.plan.devices import named
from sglang_smc.plan.heads import DFlash, Eagle3
from sglang_smc.plan.memory import hidden_bytes, kv_slots, memory_table
from sglang_smc.plan.proposals import Ngram, Proposal, from_config
from sglang_smc.plan.roofline import RoundCost, best_settings, round_cost, smc_round
from sglang_smc.plan.shapes import ModelShape
from sglang_smc.plan.shapes import from_config as model_from_config

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
TOY_CONFIG: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "intermediate_size": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 20,
}
EAGLE3_CONFIG = TOY_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 6}
DFLASH_CONFIG = TOY_CONFIG | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 19, "target_layer_ids": [1, 2, 3]},
}
TARGET, H200, H100 = model_from_config("llama-3.1-8b"), named("h200"), named("h100")
NAMES = ("llama-3.2-1b", "eagle3-8b", "dflash-8b", "ngram", "ngram+llama-3.2-1b")
OF_8B = {name: from_config(name) for name in NAMES}


def toy_round(draft: Proposal, num_steps: int = 2) -> Any:
    """Two requests of three particles, with 10 tokens in common and 4 of their own each."""
    return smc_round(TOY, draft, 2, 3, num_steps, context=10, tail=4)


def test_eagle3_sizes_by_hand() -> None:
    """Its first layer makes 16 numbers of an embedding and a state: 4 x 16 more weights."""
    head = from_config(EAGLE3_CONFIG)
    assert isinstance(head, Eagle3)
    assert head.entry_parameters == 4 * (8 + 4 + 4)
    assert head.fc_parameters == 3 * 4 * 4
    assert head.num_parameters == 120 + 64 + 48 + 6 * 4
    assert head.streamed_bytes == 2 * (120 + 64 + 24)
    assert head.resident_bytes == 2 * (120 + 64 + 24 + 48)
    assert head.kv_bytes_per_token == 16
    assert head.state_bytes(3, 2) == 3 * 3 * 3 * 4 * 2


def test_eagle3_round_by_hand() -> None:
    found = toy_round(from_config(EAGLE3_CONFIG))
    first, second, verify, follow = found.passes
    assert [one.name for one in found.passes] == ["draft", "draft", "verify", "follow"]
    for step, one in enumerate((first, second)):
        assert one.weights == 2 * (120 + 64 + 24)
        # Read once a request, read of each particle, written.
        assert one.kv == (2 * 10 + 6 * (4 + step) + 6) * 16
        assert one.logits == 6 * 6 * 8
        assert one.flops == 6 * 2 * (120 + 64 + 24) + 6 * (15 + step) * 32
    assert verify == toy_round(Ngram()).passes[0]
    assert follow.weights == 2 * (120 + 64 + 48)
    assert follow.kv == (2 * 10 + 6 * 4 + 6 * 3) * 16
    assert follow.logits == 0
    assert follow.flops == 18 * 2 * (120 + 64 + 48) + 6 * (15 + 16 + 17) * 32
    assert found.layers == 4


def test_dflash_sizes_by_hand() -> None:
    head = from_config(DFLASH_CONFIG)
    assert isinstance(head, DFlash)
    assert head.num_parameters == 2 * 120 + 48
    assert head.streamed_bytes == 2 * 2 * 120
    assert head.resident_bytes == 2 * (2 * 120 + 48)
    assert head.kv_parameters == 2 * 4 * (4 + 4)
    assert head.kv_bytes_per_token == 32
    assert head.max_steps == 7


def test_dflash_round_by_hand() -> None:
    found = toy_round(from_config(DFLASH_CONFIG))
    draft, verify, follow = found.passes
    assert [one.name for one in found.passes] == ["draft", "verify", "follow"]
    assert draft.weights == 2 * (2 * 120 + 80)  # and the target's LM head
    assert draft.kv == (2 * 10 + 6 * 4 + 6 * 3) * 32
    assert draft.logits == 6 * 2 * 20 * 8
    # Each of three columns sees 14 tokens and all three columns; two of them have logits.
    assert draft.flops == 18 * 2 * 240 + 6 * 3 * 17 * 64 + 12 * 2 * 80
    assert verify == toy_round(Ngram()).passes[0]
    assert follow.weights == 2 * (48 + 64)
    assert follow.kv == 18 * 32
    assert follow.flops == 18 * 2 * (48 + 64)
    assert found.layers == 2 + 1 + 1


def test_layers_of_a_block_may_have_windows() -> None:
    """One of two layers sees 5 of 10 tokens: (10 + 5) / 2 on average."""
    types = ["sliding_attention", "full_attention"]
    head = from_config(DFLASH_CONFIG | {"layer_types": types, "sliding_window": 5})
    assert isinstance(head, DFlash) and head.layers.windows == Windows(1, 5)
    draft = toy_round(head).passes[0]
    assert draft.kv == (2 * 7.5 + 6 * 4 + 6 * 3) * 32


def test_matches_cost_the_target_alone_and_beside_a_draft_what_it_costs() -> None:
    assert [one.name for one in toy_round(Ngram()).passes] == ["verify"]
    assert toy_round(Ngram(TOY)) == toy_round(TOY)
    assert Ngram().resident_bytes == Ngram().kv_bytes_per_token == 0
    assert kv_slots(TOY, Ngram(), TOY.resident_bytes + 160) == 10


@pytest.mark.parametrize("device", [H200, H100], ids=["h200", "h100"])
def test_cheaper_drafts_have_shorter_rounds(device: Any) -> None:
    """At batch 1; in a crowd a block of five layers computes more than eight passes of one."""
    order = ("ngram", "dflash-8b", "eagle3-8b", "llama-3.2-1b")
    for n in (1, 4, 8):
        for k in (4, 8):
            times = [
                round_cost(TARGET, OF_8B[name], device, n, k, context=2000).seconds
                for name in order
            ]
            assert times == sorted(times) and len(set(times)) == 4


@given(
    st.sampled_from(sorted(OF_8B)),
    st.integers(1, 16),
    st.integers(1, 15),
    st.integers(1, 32),
    st.integers(0, 50_000),
)
def test_more_of_anything_is_never_faster(
    name: str, n: int, k: int, batch: int, context: int
) -> None:
    draft = OF_8B[name]

    def seconds(n: int, k: int, batch: int, context: int) -> float:
        return round_cost(TARGET, draft, H200, n, k, batch=batch, context=context).seconds

    least = seconds(n, k, batch, context)
    assert seconds(n + 1, k, batch, context) >= least
    assert seconds(n, k + 1, batch, context) >= least if k < 15 else True
    assert seconds(n, k, batch + 1, context) >= least
    assert seconds(n, k, batch, context + 100) >= least


def test_a_cost_is_the_rounds_by_what_takes_it() -> None:
    one = smc_round(TARGET, OF_8B["eagle3-8b"], 2, 8, 8, 2000.0, 4.0)
    cost = round_cost(TARGET, OF_8B["eagle3-8b"], H200, 8, 8, batch=2, context=2000, tail=4)
    assert cost == RoundCost.of(one, H200, 2, 8)
    assert cost.seconds == pytest.approx(one.seconds(H200))
    assert cost.rest == one.parts["follow"].seconds(H200) > 0
    assert cost.layers == 8 * 1 + 32 + 1
    assert cost.tokens_per_second(6) == pytest.approx(2 * 6 / one.seconds(H200))


@pytest.mark.parametrize("tokens", [0.9, 9.1])
def test_tokens_that_no_round_yields(tokens: float) -> None:
    cost = round_cost(TARGET, Ngram(), H200, 8, 8, context=2000)
    with pytest.raises(ValueError, match="8 steps yield 1 to 9"):
        cost.tokens_per_second(tokens)


# --- Configurations


def test_built_in_heads_are_what_public_configurations_say(tmp_path: Path) -> None:
    """The heads for Llama 3.1 8B and for Qwen3 8B, by the keys that their files have."""
    wide = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    wide |= {"head_dim": 128}
    eagle3 = EAGLE3_CONFIG | wide
    eagle3 |= {"intermediate_size": 14336, "vocab_size": 128256, "draft_vocab_size": 32000}
    dflash = DFLASH_CONFIG | wide | {"num_hidden_layers": 5, "num_target_layers": 36}
    dflash |= {"intermediate_size": 12288, "vocab_size": 151936, "block_size": 16}
    del dflash["dflash_config"]
    assert from_config(eagle3) == heads.BUILT_IN["eagle3-8b"]
    (tmp_path / "config.json").write_text(json.dumps(dflash))
    assert from_config(tmp_path) == from_config("DFlash-8B") == heads.BUILT_IN["dflash-8b"]


def test_a_head_reads_as_many_states_as_its_configuration_says() -> None:
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}}
    assert from_config(EAGLE3_CONFIG | ids) == Eagle3(_layers(EAGLE3_CONFIG, 6), 4)
    assert from_config(EAGLE3_CONFIG | {"num_aux_hidden_states": 2}) == Eagle3(
        _layers(EAGLE3_CONFIG, 6), 2
    )
    plain = {key: value for key, value in DFLASH_CONFIG.items() if key != "dflash_config"}
    assert from_config(plain) == DFlash(_layers(DFLASH_CONFIG, 0), 2, 8)


def _layers(config: dict[str, Any], vocab_size: int) -> ModelShape:
    count = config["num_hidden_layers"]
    return dataclasses.replace(TOY, num_layers=count, vocab_size=vocab_size)


def test_precision_of_a_head() -> None:
    """Layers follow the weights; ``fc`` and LM heads stay in 16 bits."""
    head = from_config(EAGLE3_CONFIG, 1)
    assert head.streamed_bytes == 1 * (120 + 64) + 2 * 24
    assert head.resident_bytes == head.streamed_bytes + 2 * 48
    quantized = EAGLE3_CONFIG | {"quantization_config": {"quant_method": "fp8"}}
    assert from_config(quantized) == head
    assert proposals.lowest_precision(TOY, head, Ngram()) == 1
    assert proposals.lowest_precision(TOY, Ngram()) == 2


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            {key: value for key, value in EAGLE3_CONFIG.items() if key != "draft_vocab_size"},
            "no whole number for draft_vocab_size.*write vocab_size there",
        ),
        (EAGLE3_CONFIG | {"target_hidden_size": 8}, "hidden_size is 4 .*target_hidden_size 8"),
        (DFLASH_CONFIG | {"intermediate_size": None}, "intermediate_size.*its own layers"),
        (
            DFLASH_CONFIG | {"dflash_config": {"projector_type": "domino"}},
            "has projector_type: more than one pass",
        ),
        (DFLASH_CONFIG | {"layer_types": ["sliding_attention"]}, "number for sliding_window"),
        (DFLASH_CONFIG | {"architectures": ["DFlash2DraftModel"]}, "DFlash2.*DFlashDraftModel"),
        ("eagle3-9b", "neither a config.json.*eagle3-8b.*ngram"),
        ("ngram+eagle3-8b", "beside a draft model .*given is eagle3"),
    ],
)
def test_what_it_does_not_know_it_refuses(source: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_config(source)


def test_a_head_is_no_target() -> None:
    with pytest.raises(ValueError, match="architecture is DFlashDraftModel"):
        model_from_config(DFLASH_CONFIG)


@pytest.mark.parametrize("name", ["eagle3-8b", "dflash-8b"])
def test_a_head_of_another_target_is_refused(name: str) -> None:
    other = model_from_config("llama-3.1-70b")
    with pytest.raises(ValueError, match=r"hidden size is 4096 and the target's 8192.*trained"):
        smc_round(other, OF_8B[name], 1, 8, 8, 2000)


def test_a_block_has_no_more_steps_than_columns() -> None:
    with pytest.raises(ValueError, match=r"num_steps is 16.*at most 15 steps"):
        round_cost(TARGET, OF_8B["dflash-8b"], H200, 8, 16, context=2000)
    plan = best_settings(TARGET, OF_8B["dflash-8b"], H200, 1, 2000)
    assert {one.num_steps for one in plan.grid} == {4, 8}
    short = dataclasses.replace(OF_8B["dflash-8b"], block_size=3)
    assert proposals.default_steps(short) == (2,)


# --- Memory


def test_memory_of_a_head_is_its_layers_and_the_states_it_reads() -> None:
    head = OF_8B["eagle3-8b"]
    assert head.kv_bytes_per_token == 2 * 1 * 8 * 128 * 2
    assert hidden_bytes(head, 8, 8) == 8 * 9 * 3 * 4096 * 2
    assert hidden_bytes(OF_8B["llama-3.2-1b"], 8, 8) == 0
    room = TARGET.resident_bytes + head.resident_bytes + 1e9
    assert kv_slots(TARGET, head, room) == int(1e9 / (131_072 + 4_096))


def test_a_heads_states_are_kept_aside() -> None:
    """48 requests of 8 x 9 columns: with 100 times as many layers read, slots are fewer by that."""
    from sglang_smc.options.server import SMCConfig

    config = SMCConfig(num_particles=8, num_steps=8)
    slots = []
    for num_states in (3, 300):
        head = Eagle3(heads.BUILT_IN["eagle3-8b"].layers, num_states)
        table = memory_table(TARGET, head, 80e9, config)
        assert table is not None
        slots.append(table.as_dict()["pool_slots"])
    fc = 297 * 4096 * 4096 * 2
    states = 48 * 8 * 9 * 297 * 4096 * 2
    assert slots[0] - slots[1] == pytest.approx((fc + states) / (131_072 + 4_096), abs=1)
