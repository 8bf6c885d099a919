"""Data sheets and measurements."""

import pytest

from sglang_smc.plan.devices import DATA_SHEETS, Device, measure, named


def test_h200() -> None:
    assert named("H200") == Device("h200", 4.8e12, 989e12, 141e9)
    assert named("h200").ridge == pytest.approx(206, abs=0.5)


def test_fp8_computes_twice_as_fast_where_there_are_units_for_it() -> None:
    for name in DATA_SHEETS:
        gain = named(name, weight_bytes=1).flops / named(name, weight_bytes=2).flops
        assert gain == pytest.approx(1 if name == "a100" else 2, rel=0.03), name


def test_several_devices_split_the_work() -> None:
    assert named("h100").times(4) == Device("4 x h100", 4 * 3.35e12, 4 * 989e12, 320e9)
    assert named("h100").times(1) == named("h100")


def test_unknown_devices_and_precisions() -> None:
    with pytest.raises(ValueError, match=r"'h300' is no known device.*h200.*measured"):
        named("h300")
    with pytest.raises(ValueError, match="not 4"):
        named("h200", weight_bytes=4)


def test_measures_this_machine() -> None:
    """Within what any machine of the last decades has: a wrong unit would be far outside."""
    device = measure("cpu", nbytes=1 << 26, seconds=0.05)
    assert 5e8 < device.bandwidth < 5e12
    assert 1e8 < device.flops < 1e14
    assert device.capacity is not None
    assert 1e9 < device.capacity < 1e14


def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not 1"):
        measure("cpu", weight_bytes=1)
    with pytest.raises(ValueError, match="'tpu' cannot be measured"):
        measure("tpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        measure("cuda")


@pytest.mark.gpu
def test_measures_a_gpu() -> None:
    device = measure("cuda", seconds=0.2)
    assert 1e11 < device.bandwidth < 2e13
    assert device.ridge > 10
