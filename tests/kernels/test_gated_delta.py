"""The gated delta rule: in torch against transformers' own layer, and its kernel against that."""

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from sglang_smc.kernels.attention import gated_delta as kernel
from sglang_smc.models.gated_delta import RecurrenceInputs, columns_of, gated_delta, scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = (2, 4)
DIM = 8
LENGTH = 11


def columns(
    shape: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> RecurrenceInputs:
    k_heads, v_heads = heads
    key_dim, value_dim = dims
    return RecurrenceInputs(
        torch.randn(*shape, 2 * k_heads * key_dim + v_heads * value_dim).to(DEVICE, dtype),
        -torch.rand(*shape, v_heads, device=DEVICE),
        torch.rand(*shape, v_heads, device=DEVICE),
    )


def test_a_layer_is_transformers_own() -> None:
    """Convolution, gates, norms of keys and queries, order of heads, and the recurrence."""
    torch.manual_seed(0)
    sizes = {"linear_num_key_heads": HEADS[0], "linear_num_value_heads": HEADS[1]}
    dims = {"linear_key_head_dim": DIM, "linear_value_head_dim": DIM}
    config: Any = Qwen3_5TextConfig(hidden_size=32, **sizes, **dims)
    layer = Qwen3_5GatedDeltaNet(config, 0).float()
    torch.nn.init.constant_(layer.A_log, -1.0)
    hidden = torch.randn(3, LENGTH, 32)
    with torch.no_grad():
        expected = layer(hidden)
        inputs = torch.nn.functional.pad(layer.in_proj_qkv(hidden), (0, 0, 3, 0))
        layer.conv_weights = layer.conv1d.weight.squeeze(1)
        given = columns_of(inputs, layer, layer.in_proj_a(hidden), layer.in_proj_b(hidden))
        _, output = scan(torch.zeros(3, HEADS[1], DIM, DIM), given)
        gate = layer.in_proj_z(hidden).view(-1, DIM)
        normed = layer.norm(output.reshape(-1, DIM), gate).view(3, LENGTH, -1)
        found = layer.out_proj(normed)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rolling_and_reading_is_reading_in_one_go() -> None:
    torch.manual_seed(0)
    sizes = HEADS, (DIM, DIM), torch.float32
    states = torch.randn(5, HEADS[1], DIM, DIM, device=DEVICE)
    past = columns((4, 3), *sizes)
    new = columns((4, 2), *sizes)
    source, num_past = torch.tensor([[4, 1, 1, 0], [0, 1, 2, 3]], device=DEVICE)
    for part in past:  # left by another request
        part[torch.arange(3, device=DEVICE) >= num_past.unsqueeze(1)] = torch.nan
    output, rolled = gated_delta(states, source, past, num_past, new)
    for row, kept in enumerate(num_past.tolist()):
        own = [part[row : row + 1, :kept] for part in past], [part[row : row + 1] for part in new]
        whole = RecurrenceInputs(*(torch.cat(parts, dim=1) for parts in zip(*own, strict=True)))
        behind, _ = scan(states[source[row : row + 1]], RecurrenceInputs(*own[0]))
        _, read = scan(states[source[row : row + 1]], whole)
        torch.testing.assert_close(rolled[row : row + 1], behind)
        torch.testing.assert_close(output[row : row + 1], read[:, kept:])


@pytest.mark.parametrize(
    ("heads", "dims", "dtypes"),
    [
        ((2, 4), (8, 8), (torch.float32, torch.float32)),
        ((1, 3), (16, 40), (torch.float32, torch.float32)),  # value dimensions of two blocks
        ((2, 2), (12, 5), (torch.float16, torch.float32)),  # tiles that dimensions do not fill
        ((1, 2), (8, 8), (torch.float16, torch.float16)),
    ],
)
def test_states_are_rolled_and_read(
    heads: tuple[int, int], dims: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """From states of others, over no column, some and all; in the caller's own number formats."""
    torch.manual_seed(0)
    of_columns, of_states = dtypes
    states = torch.randn(7, heads[1], dims[1], dims[0]).to(DEVICE, of_states)
    source = torch.tensor([6, 2, 2, 0, 5], device=DEVICE)
    num_past = torch.tensor([0, 3, 1, 4, 2], device=DEVICE)
    past = columns((5, 4), heads, dims, of_columns)
    new = columns((5, 3), heads, dims, of_columns)
    past.qkv[num_past == 0] = torch.nan  # what nobody reads
    before = states.clone()
    found = kernel.gated_delta(states, source, past, num_past, new)
    past.qkv[num_past == 0] = 0
    expected = gated_delta(states, source, past, num_past, new)
    assert states.equal(before)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        close = 1e-5 if one.dtype == torch.float32 else 2e-3
        torch.testing.assert_close(one, other, atol=close, rtol=close)
