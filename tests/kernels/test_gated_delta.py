"""The kernel of the gated delta rule against its torch reference."""

import pytest
import torch

from sglang_smc.kernels.attention import gated_delta as kernel
from sglang_smc.models.gated_delta import Columns, gated_delta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def columns(
    shape: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> Columns:
    (k_heads, v_heads), (key_dim, value_dim) = heads, dims
    return Columns(
        torch.randn(*shape, 2 * k_heads * key_dim + v_heads * value_dim).to(DEVICE, dtype),
        -torch.rand(*shape, v_heads, device=DEVICE),
        torch.rand(*shape, v_heads, device=DEVICE),
    )


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
