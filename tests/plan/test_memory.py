"""Bytes of a round; `tests/kernels/test_fake_cuda.py` holds them to what a round takes."""

from sglang_smc.plan.memory import round_bytes

VOCAB = 128_256


def test_a_weighed_round_holds_the_targets_logits_twice() -> None:
    """In bf16 as the head makes them, and in float32."""
    assert round_bytes(8, 8, VOCAB) == 72 * VOCAB * 6


def test_a_verified_round_holds_what_was_drafted_too() -> None:
    assert round_bytes(8, 8, VOCAB, verifies=True) == (64 + 3 * 72) * VOCAB * 4


def test_without_drafts_one_token_is_read() -> None:
    assert round_bytes(1, 0, VOCAB) == VOCAB * 6
