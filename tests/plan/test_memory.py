"""Bytes of a round, held by test_fake_cuda.py to what it takes, and of a server."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_smc.memory.rounds import round_bytes
from sglang_smc.options.server import SMCConfig
from sglang_smc.plan.blocks import States
from sglang_smc.plan.memory import memory_table, reserved_bytes, state_bytes
from sglang_smc.plan.shapes import BUILT_IN

VOCAB = 128_256
REPOSITORY = Path(__file__).parents[2]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}


def test_a_weighed_round_holds_the_targets_logits_twice() -> None:
    """In bf16 as the head makes them, and in float32; and the draft's where they are watched."""
    assert round_bytes(8, 8, VOCAB) == (8 * 4 + 72 * 6) * VOCAB


def test_a_verified_round_holds_what_was_drafted_too() -> None:
    assert round_bytes(8, 8, VOCAB, verifies=True) == ((64 + 8) * 4 + 72 * 6) * VOCAB


def test_without_drafts_one_token_is_read() -> None:
    assert round_bytes(1, 0, VOCAB) == VOCAB * 6


@pytest.mark.parametrize(
    ("target", "draft", "capacity", "fits"),
    [
        ("llama-3.1-8b", "llama-3.2-1b", 24e9, {"smc": 4, "exact, mixed, auto": 4}),
        ("llama-3.1-8b", "llama-3.2-1b", 80e9, {"smc": 48, "exact, mixed, auto": 48}),
        ("qwen3-8b", "qwen3-0.6b", 24e9, {"smc": 4, "exact, mixed, auto": 4}),
    ],
)
def test_requests_that_a_card_holds(
    target: str, draft: str, capacity: float, fits: dict[str, int]
) -> None:
    table = memory_table(BUILT_IN[target], BUILT_IN[draft], capacity, SMCConfig())
    assert table is not None
    assert {name: mode.fits for name, mode in table.modes.items()} == fits
    assert table.advice is None, "no setting would make more of them fit"


def test_models_that_leave_no_memory_have_no_table() -> None:
    big = BUILT_IN["llama-3.1-70b"]
    assert memory_table(big, BUILT_IN["llama-3.2-1b"], 80e9, SMCConfig()) is None


#: MiB of memory, from an L4 to a B300.
CARDS = (23_034, 24_564, 32_607, 46_068, 81_559, 81_920, 97_887, 143_771, 183_359, 275_040)


def test_what_sglang_keeps_from_weights_and_kv(tmp_path: Path) -> None:
    """By its own reading of a server's arguments, on GPUs that are not there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    asked = {
        "model_path": str(tmp_path),
        "device": "cuda",
        "load_format": "dummy",
        "speculative_algorithm": "SMC",
        "speculative_draft_model_path": str(tmp_path),
    }
    script = REPOSITORY / "tests" / "pretended_gpu.py"
    told = subprocess.run(
        [sys.executable, "-W", "ignore", script, *map(str, CARDS)],
        input=json.dumps([asked]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    found = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    for card, one in zip(CARDS, found, strict=True):
        print(card, one["reserved"], one["sizes"][-1])
        assert one["running"] == 48
        assert reserved_bytes(card << 20) >> 20 == pytest.approx(one["reserved"], rel=0.01)


def test_states_of_all_requests_are_kept_aside() -> None:
    """One that SGLang has, and one for each particle, or each column if these are more."""
    states = States(layers=2, key_heads=1, value_heads=3, key_dim=4, value_dim=5)
    target = replace(BUILT_IN["llama-3.1-8b"], states=states)
    assert states.bytes == 2 * 3 * 4 * 5 * 4
    assert state_bytes(target, SMCConfig(num_particles=4, num_steps=7), 10) == 10 * 9 * 480
    assert state_bytes(target, SMCConfig(num_particles=12, num_steps=7), 10) == 10 * 13 * 480
    assert state_bytes(BUILT_IN["llama-3.1-8b"], SMCConfig(), 10) == 0
