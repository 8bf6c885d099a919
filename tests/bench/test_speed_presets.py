"""What the speed benchmark plans: models, cells, prompts, and engines for them."""

from pathlib import Path

import pytest
from speed import presets
from speed.engines import SIMULATED_ACCEPTANCE, environment, settings
from speed.grid import AR, AR_STOCK, BLOCK, CHAIN, Cell, System, systems
from speed.measure import WARM_UP, WARM_UP_TOKENS, work
from speed.presets import CPU, PRESETS

GPU_8B, GPU_70B = PRESETS["h200-8b"], PRESETS["h200-70b"]
B8 = System(BLOCK, 8, 8)


def test_presets_have_the_parameters_that_they_claim() -> None:
    millions = {
        name: [shape.num_parameters / 1e6 for shape in (preset.pair.target, preset.pair.draft)]
        for name, preset in PRESETS.items()
    }
    assert millions["cpu"] == pytest.approx([101, 11.4], rel=0.02)
    assert millions["h200-8b"] == pytest.approx([8030, 1236], rel=0.002)
    assert millions["h200-70b"] == pytest.approx([70554, 1236], rel=0.002)
    assert (GPU_70B.pair.quantization, GPU_8B.pair.quantization) == ("fp8", None)


def test_all_systems_get_the_same_prompts_and_each_repeat_others() -> None:
    ours, plain = (work(Cell(system, 2, 256), 0, CPU) for system in (B8, System(AR)))
    assert ours == plain
    assert [len(prompt) for prompt in ours.prompts] == [256, 256]
    assert ours.prompts[0] != ours.prompts[1]
    assert work(Cell(B8, 2, 256), 1, CPU).prompts[0] != ours.prompts[0]
    tokens = {token for prompt in ours.prompts for token in prompt}
    assert min(tokens) >= 2 and max(tokens) < CPU.pair.target.vocab_size
    assert ours.params[1]["max_new_tokens"] == CPU.new_tokens and ours.params[1]["ignore_eos"]
    assert work(Cell(B8, 1, 256), WARM_UP, CPU).params[0]["max_new_tokens"] == WARM_UP_TOKENS


def test_engines_differ_by_their_speculation_alone() -> None:
    plain = settings(System(AR), CPU)
    assert settings(System(AR_STOCK), CPU) == plain
    for system in systems(CPU):
        found = settings(system, CPU)
        other = {key for key in found if found[key] != plain.get(key)}
        assert {key for key in other if not key.startswith("speculative_")} <= {"max_total_tokens"}


def test_acceptance_is_simulated_for_dummy_weights_alone() -> None:
    chain = System(CHAIN)
    assert environment(chain, CPU) == {"SGLANG_SIMULATE_ACC_LEN": str(SIMULATED_ACCEPTANCE[CHAIN])}
    real = presets.replace(CPU, pair=CPU.pair._replace(folders=(Path("t"), Path("d"))))
    assert (environment(chain, real), settings(chain, real)["load_format"]) == ({}, "auto")
    assert environment(B8, CPU) == environment(System(AR), CPU) == {}
    assert environment(System(AR_STOCK), GPU_8B) == {"SGLANG_PLUGINS": "none"}
