"""Devices, and what a server's memory holds."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from programs import printed

from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.plan.devices import DATA_SHEETS, Device, measure, named
from sglang_smc_tools.plan.memory import memory_table, reserved_bytes, state_bytes
from sglang_smc_tools.plan.shapes import BUILT_IN, DRAFTS, States

REPOSITORY = Path(__file__).parents[3]
PAIR = REPOSITORY / "bench" / "pair"
TARGET = BUILT_IN["llama-3.1-8b"]


def test_data_sheets() -> None:
    assert named("H200") == Device("h200", 4.8e12, 989e12, 141e9)
    assert named("h200").ridge == pytest.approx(206, abs=0.5)
    assert named("h100").times(4) == Device("4 x h100", 4 * 3.35e12, 4 * 989e12, 320e9)
    for name in DATA_SHEETS:  # in 8 bits twice as fast, where there are units for it
        gain = named(name, weight_bytes=1).flops / named(name, weight_bytes=2).flops
        assert gain == pytest.approx(1 if name == "a100" else 2, rel=0.03), name


def test_measures_this_machine_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what any machine of the last decades has: a wrong unit would be far outside."""
    device = measure("cpu", nbytes=1 << 26, seconds=0.05)
    assert 5e8 < device.bandwidth < 5e12 and 1e8 < device.flops < 1e14
    assert device.capacity is not None and 1e9 < device.capacity < 1e14
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, size, said in (("cpu", 1, "not 1"), ("cuda", 2, "no CUDA")):
        with pytest.raises(ValueError, match=said):
            measure(name, weight_bytes=size)


@pytest.mark.gpu
def test_measures_a_gpu() -> None:
    device = measure("cuda", seconds=0.2)
    assert 1e11 < device.bandwidth < 2e13
    assert device.ridge > 10


@pytest.mark.parametrize(
    ("target", "draft", "capacity", "fits"),
    [
        ("llama-3.1-8b", "llama-3.2-1b", 24e9, 4),
        ("llama-3.1-8b", "llama-3.2-1b", 80e9, 48),
        ("qwen3-8b", "qwen3-0.6b", 24e9, 4),
        ("llama-3.1-70b", "llama-3.2-1b", 80e9, None),
    ],
)
def test_requests_on_a_card(target: str, draft: str, capacity: float, fits: int | None) -> None:
    table = memory_table(BUILT_IN[target], DRAFTS[draft], capacity, SMCConfig())
    assert (table is None) == (fits is None), "without memory beside the models there is none"
    if table is not None:
        assert {mode.fits for mode in table.modes.values()} == {fits}
        assert table.advice is None, "no setting would make more of them fit"


#: MiB of memory, from an L4 to a B300, and how many of these SGLang 0.5.23 keeps.
KEPT = {23_034: 7279, 24_564: 7271, 32_607: 7271, 46_068: 7233, 81_559: 13865, 81_920: 13926}
KEPT |= {97_887: 13900, 143_771: 13946, 183_359: 26770, 275_040: 26954}


def test_what_is_kept_from_weights_and_kv() -> None:
    for card, kept in KEPT.items():
        assert reserved_bytes(card << 20) >> 20 == pytest.approx(kept, rel=0.01)


@pytest.mark.nightly
def test_sglang_keeps_as_much() -> None:
    """By its own reading of a server's arguments, on GPUs that are not there."""
    asked = {"model_path": str(PAIR / "target"), "device": "cuda", "load_format": "dummy"}
    asked |= {"speculative_algorithm": "SMC", "speculative_draft_model_path": str(PAIR / "draft")}
    script = REPOSITORY / "tests" / "support" / "pretended_gpu.py"
    told = printed(
        *(sys.executable, "-W", "ignore", script, *KEPT),
        input=json.dumps([asked]),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    found = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    for kept, one in zip(KEPT.values(), found, strict=True):
        assert one["running"] == 48
        assert kept == pytest.approx(one["reserved"], rel=0.01)


def test_states_of_all_requests_are_kept_aside() -> None:
    """One that SGLang has, and one for each particle, or each column if these are more."""
    states = States(layers=2, key_heads=1, value_heads=3, key_dim=4, value_dim=5)
    target = replace(TARGET, states=states)
    assert states.bytes == 2 * 3 * 4 * 5 * 4
    model = DRAFTS["llama-3.2-1b"]
    for n, copies in ((4, 9), (12, 13)):
        config = SMCConfig(num_particles=n, num_steps=7)
        assert state_bytes(target, model, config) == copies * 480
    assert state_bytes(TARGET, model, SMCConfig()) == 0
