"""The gated delta rule in torch, against transformers' own layer and by what must hold."""

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from sglang_smc.models.gated_delta import Columns, Gates, causal_conv, columns_of, gated_delta, scan

HEADS, DIM, LENGTH = (2, 4), 8, 11


@pytest.fixture
def layer() -> Qwen3_5GatedDeltaNet:
    torch.manual_seed(0)
    config: Any = Qwen3_5TextConfig(
        hidden_size=32,
        linear_num_key_heads=HEADS[0],
        linear_num_value_heads=HEADS[1],
        linear_key_head_dim=DIM,
        linear_value_head_dim=DIM,
    )
    made = Qwen3_5GatedDeltaNet(config, 0).float()
    torch.nn.init.constant_(made.A_log, -1.0)
    return made


def test_a_layer_is_transformers_own(layer: Qwen3_5GatedDeltaNet) -> None:
    """Convolution, gates, norms of keys and queries, order of heads, and the recurrence."""
    hidden = torch.randn(3, LENGTH, 32)
    with torch.no_grad():
        expected = layer(hidden)
        inputs = torch.nn.functional.pad(layer.in_proj_qkv(hidden), (0, 0, 3, 0))
        qkv = causal_conv(inputs, layer.conv1d.weight.squeeze(1))
        gates = Gates(layer.A_log, layer.dt_bias)
        columns = columns_of(qkv, gates, layer.in_proj_a(hidden), layer.in_proj_b(hidden))
        _, output = scan(torch.zeros(3, HEADS[1], DIM, DIM), columns)
        gate = layer.in_proj_z(hidden).view(-1, DIM)
        normed = layer.norm(output.reshape(-1, DIM), gate).view(3, LENGTH, -1)
        found = layer.out_proj(normed)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def columns(num_rows: int, num_columns: int) -> Columns:
    width = (2 * HEADS[0] + HEADS[1]) * DIM
    return Columns(
        torch.randn(num_rows, num_columns, width),
        -torch.rand(num_rows, num_columns, HEADS[1]),
        torch.rand(num_rows, num_columns, HEADS[1]),
    )


def test_rolling_and_reading_is_reading_in_one_go() -> None:
    torch.manual_seed(0)
    states, past, new = torch.randn(5, HEADS[1], DIM, DIM), columns(4, 3), columns(4, 2)
    source, num_past = torch.tensor([4, 1, 1, 0]), torch.tensor([0, 1, 2, 3])
    output, rolled = gated_delta(states, source, past, num_past, new)
    for row, kept in enumerate(num_past.tolist()):
        own = [part[row : row + 1, :kept] for part in past], [part[row : row + 1] for part in new]
        whole = Columns(*(torch.cat(parts, dim=1) for parts in zip(*own, strict=True)))
        behind, _ = scan(states[source[row : row + 1]], Columns(*own[0]))
        _, read = scan(states[source[row : row + 1]], whole)
        torch.testing.assert_close(rolled[row : row + 1], behind)
        torch.testing.assert_close(output[row : row + 1], read[:, kept:])
