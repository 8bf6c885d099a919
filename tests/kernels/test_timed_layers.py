"""The attention over which `bench/gpu` times a draft's layers: what a GPU is asked, here."""

import pytest
import torch
from gpu import layers


@pytest.mark.parametrize("num_rows", [3, 16])
def test_its_kernel_equals_its_reference(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """Red where slots, positions or rotations of the two differ."""
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    # In Triton 3.6's interpreter products of bfloat16 are wrong.
    monkeypatch.setattr(layers, "DTYPE", torch.float16)
    monkeypatch.setattr(layers, "PROMPT", 40)
    sizes = {"Q_HEADS": 4, "KV_HEADS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(layers, name, value)
    torch.manual_seed(num_rows)
    cache = layers.make_cache(num_rows)
    qkv = 2 * torch.randn(num_rows, (4 + 2 * 2) * layers.DIM, dtype=torch.float16)
    expected = layers.attend_by_torch(cache, qkv)
    found = layers.attend_by_kernel(cache)(qkv)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


def test_what_it_reads_depends_on_query_and_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where angles or keys are zero: a mean costs as much, and equals any other mean."""
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    torch.manual_seed(0)
    cache = layers.make_cache(8)
    cos, sin = cache.cos_sin.chunk(2, dim=1)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))
    width = layers.Q_HEADS + 2 * layers.KV_HEADS
    qkv = torch.randn(8, width * layers.DIM, dtype=layers.DTYPE)
    other = qkv.clone()
    other[:, : layers.Q_HEADS * layers.DIM] *= -1
    elsewhere = cache._replace(cos_sin=cache.cos_sin.roll(100, 0))
    found = layers.attend_by_torch(cache, qkv)
    for changed in (layers.attend_by_torch(cache, other), layers.attend_by_torch(elsewhere, qkv)):
        assert (changed - found).abs().amax(1).min() > 0.1
