"""What the speed benchmark plans: models, cells, prompts, and engines for them."""

import itertools
from pathlib import Path

import pytest
from speed import presets
from speed.engines import SIMULATED_ACCEPTANCE, environment, launch, settings
from speed.grid import AR, AR_STOCK, BLOCK, CHAIN, EXACT, NGRAM, TREE, Cell, System, cells, systems
from speed.measure import WARM_UP, WARM_UP_TOKENS, work
from speed.presets import CPU, PRESETS, REFERENCE_SWEEP, write_models

from sglang_smc.options.server import SERVER_ARGS_FIELDS
from sglang_smc.plan.shapes import from_config

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


def test_the_reference_sweep_is_covered() -> None:
    sweep = {(8, 8), (8, 10), (6, 10), (8, 12), (8, 16), (6, 8), (4, 8), (6, 12)}
    assert set(REFERENCE_SWEEP) == sweep
    for preset in (GPU_8B, GPU_70B):
        found = {(s.num_particles, s.num_steps) for s in systems(preset) if s.family == BLOCK}
        assert found == sweep
    assert GPU_8B.batches == (1, 4, 8, 16, 32)
    assert GPU_8B.prompts == (256, 1024, 4096)


@pytest.mark.parametrize("pair", [p.pair for p in PRESETS.values()], ids=lambda pair: pair.name)
def test_dummy_models_have_the_shapes(pair: presets.Pair, tmp_path: Path) -> None:
    target, draft = write_models(pair._replace(name="x"), tmp_path) if _small(pair) else (None,) * 2
    if target is None or draft is None:  # a tokenizer of 128,256 words takes a while
        assert from_config(presets.config(pair.target)) == pair.target
        return
    assert (from_config(target), from_config(draft)) == (pair.target, pair.draft)
    assert (target / "tokenizer.json").exists()


def _small(pair: presets.Pair) -> bool:
    return pair.target.vocab_size < 100_000


def test_cells_stand_engine_by_engine_and_can_be_picked() -> None:
    order = [cell.system for cell in cells(CPU)]
    assert order[0].family == AR
    assert len(dict.fromkeys(order)) == sum(a != b for a, b in itertools.pairwise(order)) + 1
    assert {s.family for s in order} == {AR, AR_STOCK, CHAIN, TREE, NGRAM, BLOCK, EXACT}
    picked = cells(GPU_8B, ("smc-block-n8-k8-*", "ar-b*"), (1, 4), (256,))
    assert [cell.slug for cell in picked] == [
        "ar-b1-p256",
        "ar-b4-p256",
        "smc-block-n8-k8-b1-p256",
        "smc-block-n8-k8-b4-p256",
    ]


def test_all_systems_get_the_same_prompts_and_each_repeat_others() -> None:
    ours, plain = (work(Cell(system, 2, 256), 0, CPU) for system in (B8, System(AR)))
    assert ours == plain
    assert [len(prompt) for prompt in ours.prompts] == [256, 256]
    assert ours.prompts[0] != ours.prompts[1]
    assert work(Cell(B8, 2, 256), 1, CPU).prompts[0] != ours.prompts[0]
    tokens = {token for prompt in ours.prompts for token in prompt}
    assert min(tokens) >= 2 and max(tokens) < CPU.pair.target.vocab_size
    assert ours.params[1] == {
        "temperature": 0.7,
        "max_new_tokens": CPU.new_tokens,
        "ignore_eos": True,
        "sampling_seed": 1,
    }
    assert work(Cell(B8, 1, 256), WARM_UP, CPU).params[0]["max_new_tokens"] == WARM_UP_TOKENS


def test_engines_differ_by_their_speculation_alone() -> None:
    plain = settings(System(AR), CPU)
    assert settings(System(AR_STOCK), CPU) == plain
    for system in systems(CPU):
        found = settings(system, CPU)
        other = {key for key in found if found[key] != plain.get(key)}
        assert {key for key in other if not key.startswith("speculative_")} <= {"max_total_tokens"}


def test_smc_keeps_whole_blocks_or_verifies() -> None:
    block, exact = settings(B8, CPU), settings(System(EXACT, 4, 8), CPU)
    assert block["speculative_smc_evidence_threshold"] == 0
    assert (block["speculative_smc_mode"], exact["speculative_smc_mode"]) == ("smc", "exact")
    assert "speculative_smc_evidence_threshold" not in exact
    assert (exact["speculative_smc_num_particles"], exact["speculative_num_steps"]) == (4, 8)
    known = {*SERVER_ARGS_FIELDS.values(), "speculative_algorithm"}
    assert {key for key in block if key.startswith("speculative_")} <= known


def test_acceptance_is_simulated_for_dummy_weights_alone() -> None:
    chain = System(CHAIN)
    told = {"SGLANG_SIMULATE_ACC_LEN": str(SIMULATED_ACCEPTANCE[CHAIN])}
    assert environment(chain, CPU) == told
    folders = (Path("t"), Path("d"))
    real = presets.replace(CPU, pair=CPU.pair._replace(folders=folders))
    assert environment(chain, real) == {}
    assert settings(chain, real)["load_format"] == "auto"
    assert environment(B8, CPU) == environment(System(AR), CPU) == {}


def test_the_plugin_is_left_out_where_it_can_be() -> None:
    stock = System(AR_STOCK)
    assert environment(stock, CPU) == {"SGLANG_PLUGINS": "smc_cpu"}
    assert environment(stock, GPU_8B) == {"SGLANG_PLUGINS": "none"}


def test_only_those_that_draft_get_a_draft_model() -> None:
    models = (Path("t"), Path("d"))
    with_draft = {
        system.family
        for system in systems(CPU)
        if "speculative_draft_model_path" in launch(system, CPU, models).arguments
    }
    assert with_draft == {CHAIN, TREE, BLOCK, EXACT}


def test_the_pool_holds_the_arenas_of_the_largest_batch() -> None:
    for preset in PRESETS.values():
        for system in systems(preset):
            if system.family in (BLOCK, EXACT):
                n, k = system.num_particles or 0, system.num_steps or 0
                text = max(preset.prompts) + preset.new_tokens + k
                tokens = settings(system, preset)["max_total_tokens"]
                assert tokens > max(preset.batches) * (text + n * (256 + k))
