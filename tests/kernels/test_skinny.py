"""The products of a draft's layer against torch, at few and odd rows, with all that goes along."""

from typing import Any

import pytest
import torch
import triton

from sglang_smc.kernels import skinny as kernel
from sglang_smc.kernels.attention import work
from sglang_smc.ops import TORCH
from sglang_smc.smc.ops import Fused

INPUTS = 192
OUTPUTS = 48
Given = tuple[torch.Tensor, torch.Tensor, Fused]
AROUND = {
    "plain": (),
    "norm": ("norm",),
    "residual": ("residual",),
    "norm, bias": ("norm", "bias"),
    "two inputs": ("norm", "beside"),
    "gated": ("norm", "gated"),
    "8 bits": ("norm", "scale", "bias"),
    "8 bits, float32 results": ("scale", "wide"),
    "8 bits, gated, residual": ("norm", "scale", "gated", "residual"),
    "8 bits, two inputs, residual": ("norm", "beside", "scale", "residual"),
}


def arguments(num_rows: int, around: tuple[str, ...], device: str) -> Given:
    """What comes of an epilogue differs in size from the product that it goes with, or is 0.5."""
    generator = torch.Generator().manual_seed(num_rows)
    # In Triton 3.6's interpreter products of bfloat16 are wrong.
    dtype = torch.float16 if device == "cpu" else torch.bfloat16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    height = OUTPUTS * (1 + ("gated" in around))
    width = INPUTS * (1 + ("beside" in around))
    weight = normal(height, width) / width**0.5
    x = normal(num_rows, INPUTS) * 3
    found = {}
    if "scale" in around:
        scale = weight.abs().amax(1).float() / 127
        weight = (weight / scale.unsqueeze(1)).round().to(torch.int8)
        found["scale"] = scale
    if "beside" in around:
        found |= {"beside": normal(num_rows, INPUTS), "beside_norm": normal(INPUTS)}
    shapes = {"norm": (INPUTS,), "bias": (OUTPUTS,), "residual": (num_rows, OUTPUTS)}
    found |= {name: normal(*shape) for name, shape in shapes.items() if name in around}
    found["dtype"] = torch.float32 if "wide" in around else None
    return x, weight, Fused(**found, eps=0.5, gated="gated" in around)


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("num_rows", [1, 8, 9, 33, 64])
@pytest.mark.parametrize("name", AROUND)
def test_products_equal_torchs(name: str, num_rows: int, device: str) -> None:
    given = arguments(num_rows, AROUND[name], device)
    found = kernel.skinny(*given)
    expected = TORCH.skinny(*given)
    assert found.dtype == (given[2].dtype or given[0].dtype)
    tolerance = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["8 bits, gated, residual", "8 bits, two inputs, residual"])
def test_the_reference_by_hand(name: str) -> None:
    """Norms over each input alone, factors by output, the gate first, the residual last."""
    given: Any = arguments(3, AROUND[name], "cpu")
    x, weight, fused = given
    inputs: Any = [(x, fused.norm), (fused.beside, fused.beside_norm)]
    pairs = [(one.double(), own.double()) for one, own in inputs if one is not None]
    normed = [x / (x.square().mean(1, keepdim=True) + 0.5).sqrt() * own for x, own in pairs]
    products = torch.cat(normed, dim=1) @ weight.double().T * fused.scale
    if fused.gated:
        gate = products[:, :OUTPUTS]
        up = products[:, OUTPUTS:]
        products = gate * gate.sigmoid() * up
    expected = products + fused.residual
    torch.testing.assert_close(TORCH.skinny(*given).double(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("chip", [work.A100, work.H100, work.Chip(142, 99 << 10)])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64])
def test_every_output_has_one_program(num_rows: int, chip: work.Chip) -> None:
    for outputs, inputs in ((3072, 2048), (2048, 8192), (1152, 896), (896, 4864)):
        for element_size, gated in ((1, False), (2, False), (2, True)):
            found = kernel.blocks_of(num_rows, (outputs, inputs), element_size, gated, chip)
            assert outputs % found.outputs == inputs % found.inputs == 0
            assert found.outputs >= 16 and found.inputs >= 64 and num_rows <= found.rows
            assert found == (*map(triton.next_power_of_2, found[:3]), found.stages)


@pytest.mark.parametrize("sizes", [(65, 64, 64), (8, 24, 64), (8, 64, 96)])
def test_other_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    num_rows, outputs, inputs = sizes
    with pytest.raises(ValueError, match=f"^{num_rows} rows of {inputs} inputs and {outputs} outp"):
        kernel.skinny(torch.zeros(num_rows, inputs), torch.zeros(outputs, inputs), Fused())


def test_launches_wait_where_they_are_to_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(work, "chip_of", lambda _: work.H100)
    with work.in_order():
        assert not work.chip_of(device).overlaps
    assert work.chip_of(device) is work.H100
