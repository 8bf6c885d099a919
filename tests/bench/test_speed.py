"""The speed benchmark: who is asked what, how it resumes and refuses, its plan and its numbers."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import results
import study
import torch
from intervals import Interval, mean_of, speed_ratio
from safetensors.torch import load_file
from scipy.stats import ttest_ind
from speed import measure
from speed import run as speed
from speed.grid import (
    AR,
    AR_STOCK,
    BLOCK,
    CHAIN,
    CPU,
    CPU_EXPERTS,
    DRAFT,
    EXACT,
    EXACT_ADAPTIVE,
    EXPERTS,
    NGRAM,
    PRESETS,
    SIMULATED_ACCEPTANCE,
    TARGET,
    TREE,
    SpeedCell,
    System,
    cells,
    environment,
    quick,
    settings,
    systems,
)
from speed.measure import WARM_UP_TOKENS, work
from speed.peaked import write_pair
from speed.remote import EngineError, Work
from speed.report import CellRow, make_rows, markdown
from speed_stand_ins import FIRST, ORIGIN, SECONDS, SMC_SECONDS, Caller, FakeEngine, sample

from sglang_smc_tools.demo.serving import Launch

QUICK = ("--preset", "cpu", "--quick")
SYSTEMS = {
    system.slug: system for preset in (CPU, quick(CPU), CPU_EXPERTS) for system in systems(preset)
}


class Bench(Caller):
    """Systems of some families do not start, and block ones die of batches of a size."""

    refuses: frozenset[str] = frozenset()
    breaks_at: int | None = None

    @contextlib.contextmanager
    def running(self, launch: Launch, log: Path) -> Iterator[FakeEngine]:
        slug = log.stem.removeprefix("speed-")
        system = SYSTEMS["ar" if slug.endswith("-beside") else slug]
        self.started.append(slug)
        if system.family in self.refuses:
            raise EngineError("ValueError: no such backend")
        breaks_at = self.breaks_at if system.family == BLOCK else None
        yield FakeEngine(system, self.asked, self.budget, breaks_at)

    def counted(self) -> list[tuple[str, Work]]:
        """What was asked but for warm-ups."""
        tokens = WARM_UP_TOKENS
        return [(s, w) for s, w in self.asked if w.params[0]["max_new_tokens"] != tokens]

    def table(self, name: str) -> str:
        return (self.folder / name / "speed.md").read_text()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench(speed.main, tmp_path / "out")
    monkeypatch.setattr(measure, "running", found.running)
    monkeypatch.setattr(measure, "write_models", lambda *_, **__: None)
    monkeypatch.setattr(study, "PUBLISHED", tmp_path / "published")
    for module in (results, speed):
        monkeypatch.setattr(module, "provenance", lambda asked: {**ORIGIN, "settings": asked})
    return found


def test_every_cell_is_measured_in_turns_with_plain_decoding(bench: Bench, tmp_path: Path) -> None:
    """What does not start is written down with its reason."""
    bench.refuses = frozenset({CHAIN, TREE})
    assert bench(*QUICK, "--publish") == 0
    assert bench.started[0] == "ar"
    assert "- standalone-chain-b1-p256: ValueError: no such backend" in bench.table("cpu-quick")
    at = [slug for slug, _ in bench.counted()].index("smc-block-n4-k4")
    ours = bench.counted()[at - 1 : at + 3]
    assert [slug for slug, _ in ours] == ["ar", "smc-block-n4-k4"] * 2
    assert ours[0][1] == ours[1][1]
    folder = tmp_path / "published" / "speed" / "cpu-quick"
    assert {path.name for path in folder.iterdir()} == set(speed.REPORT.files)
    assert "no such backend" in (folder / "speed.csv").read_text()
    assert json.loads((folder / "provenance.json").read_text())["settings"]["weights"] == "dummy"
    assert bench(*QUICK) == 0
    assert bench.started == []  # it would say the same again
    assert bench(*QUICK, "--fresh", "--only", "standalone-chain*") == 0
    assert bench.started == ["standalone-chain-beside", "standalone-chain"]


def test_fixed_sizes_of_a_grid_share_an_engine(bench: Bench) -> None:
    """Their requests choose N; the adaptive server is another one."""
    assert bench("--preset", "cpu-experts", "--batch", "4", "--repeats", "1") == 0
    fixed = "smc-exact-n8-k4"
    adaptive = "smc-exact-adaptive-n8-k4"
    assert bench.started == [f"{fixed}-beside", fixed, f"{adaptive}-beside", adaptive]
    smc = [(slug, w.params[0].get("custom_params")) for slug, w in bench.counted() if slug != "ar"]
    chosen = [(fixed, {"smc": {"num_particles": n}}) for n in (8, 1, 2, 4)]
    assert smc == [*chosen, (adaptive, None)]
    assert "to the best fixed" in bench.table("cpu-experts")
    assert "to STANDALONE" not in bench.table("cpu-experts")


def test_runs_go_on_and_mix_no_measurements(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench(*QUICK, "--only", "smc-*", last=7) == 130
    assert "goes on from here" in bench.said
    first = bench.counted()
    assert bench(*QUICK, "--only", "smc-*") == 0
    ours = [(slug, str(w)) for slug, w in first + bench.counted() if slug != "ar"]
    assert len(ours) == len(set(ours)) == 6
    assert bench(*QUICK, "--only", "smc-*") == 0
    assert (bench.asked, bench.started) == ([], [])
    monkeypatch.setattr(measure, "code_fingerprint", lambda: {"plugin": "newer"})
    assert bench(*QUICK, "--only", "smc-block*") == 0
    assert bench.started == ["smc-block-n4-k4-beside", "smc-block-n4-k4"]
    assert "SMC exact N" not in bench.table("cpu-quick")
    assert bench(*QUICK, "--only", "nothing") == 1
    assert bench("--preset", "cpu", "--batch", "9") == 1 and "more than the 8" in bench.said


def test_a_cell_that_kills_its_engine_costs_itself_alone(bench: Bench) -> None:
    bench.breaks_at = 1
    assert bench("--preset", "cpu", "--only", "smc-block-n4-k4*") == 0
    assert bench.started == ["smc-block-n4-k4-beside", "smc-block-n4-k4"] * 2
    assert "- smc-block-n4-k4-b1-p256: OutOfMemoryError: too large" in bench.table("cpu")
    assert [len(w.prompts) for slug, w in bench.counted() if slug != "ar"] == [8, 8, 8]


def test_plain_decoding_blames_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: FakeEngine, _: Work) -> Any:
        raise EngineError("it died")

    bench.refuses = frozenset({AR})
    assert bench(*QUICK, "--only", "smc*") == 1
    assert "Plain decoding did not start: ValueError: no such backend" in bench.said
    bench.refuses = frozenset()
    monkeypatch.setattr(FakeEngine, "ask", die)
    assert bench(*QUICK, "--only", "smc*") == 1
    assert "Plain decoding failed beside smc-block" in bench.said
    assert '"part"' not in (bench.folder / "cpu-quick" / "results.jsonl").read_text()


# --- Its plan and its numbers


B8 = System(BLOCK, 8, 8)


def test_all_systems_get_the_same_prompts_and_each_repeat_others() -> None:
    ours, plain = (work(SpeedCell(system, 2, 256), 0, CPU) for system in (B8, System(AR)))
    assert ours == plain and ours.prompts[0] != ours.prompts[1]
    assert [len(prompt) for prompt in ours.prompts] == [256, 256]
    assert work(SpeedCell(B8, 2, 256), 1, CPU).prompts[0] != ours.prompts[0]
    tokens = {token for prompt in ours.prompts for token in prompt}
    assert min(tokens) >= 2 and max(tokens) < CPU.pair.target.vocab_size
    assert ours.params[1]["max_new_tokens"] == CPU.new_tokens and ours.params[1]["ignore_eos"]


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
    real = replace(CPU, pair=CPU.pair._replace(folders=(Path("t"), Path("d"))))
    assert (environment(chain, real), settings(chain, real)["load_format"]) == ({}, "auto")
    assert environment(B8, CPU) == environment(System(AR), CPU) == {}
    assert environment(System(AR_STOCK), PRESETS["h200-8b"]) == {"SGLANG_PLUGINS": "none"}


NOISE = (1.0, 1.2, 0.9)
ANY_CPU = replace(PRESETS["cpu"], dtype="float32")  # on any processor


def test_intervals_by_hand() -> None:
    # Of 1, 2, 3: variance 1, so the mean's is 1/3; Student's 97.5 % point is 4.3027 at two.
    half = 4.302653 / math.sqrt(3)
    assert mean_of([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - half, 2 + half, 3))
    assert speed_ratio([1.0, 2.0, 3.0]).high == pytest.approx(math.exp(2 + half))
    # One repeat says nothing of its spread.
    assert mean_of([2.0]) == (2.0, -math.inf, math.inf, 1)
    alone = speed_ratio([math.log(2)])
    assert (alone.mean, alone.low) == (pytest.approx(2), 0.0) and alone.high > 1e300
    assert speed_ratio([1.0], [1.0, 1.1]).low == 0.0


def test_a_ratio_of_independent_measurements_is_welchs() -> None:
    ours = [1.0, 2.0, 3.0]
    theirs = [1.0, 5.0]
    told = ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    found = speed_ratio(ours, theirs)
    assert found == pytest.approx((math.exp(-1), math.exp(told.low), math.exp(told.high), 2))


def result_of(cell: SpeedCell) -> dict[str, Any]:
    """Repeats of which noise hits plain decoding and the others alike."""
    if cell.system.family == NGRAM:
        return {"failed": "ImportError: no kernels"}
    asked = [(work(cell, repeat, ANY_CPU), slower) for repeat, slower in enumerate(NOISE)]
    beside = [] if cell.system.family == AR else [sample(System(AR), *one) for one in asked]
    found = {"samples": [sample(cell.system, *one) for one in asked], "beside": beside}
    return {key: list(map(asdict, some)) for key, some in found.items()}


@pytest.fixture(scope="module")
def rows() -> dict[str, CellRow]:
    """Every cell of the CPU preset, by slug."""
    every = cells(ANY_CPU, ANY_CPU.batches, ANY_CPU.prompts)
    found = make_rows(every, {cell.slug: result_of(cell) for cell in every}, ANY_CPU)
    return {row.slug: row for row in found}


def mean(value: Interval | None) -> float:
    assert value is not None
    return value.mean


def test_speeds_are_of_all_requests_but_for_prompts(
    rows: dict[str, CellRow],
) -> None:
    row = rows["smc-block-n8-k8-b8-p256"]
    tokens = ANY_CPU.new_tokens
    decoding = [95 * SMC_SECONDS * slower for slower in NOISE]
    expected = sum(8 * 95 / seconds for seconds in decoding) / 3
    assert mean(row.decode_tokens_per_second) == pytest.approx(expected)
    expected = sum(8 * tokens / (FIRST + seconds) for seconds in decoding) / 3
    assert mean(row.tokens_per_second) == pytest.approx(expected)
    assert mean(row.seconds_to_first) == FIRST
    assert row.tokens_per_round == pytest.approx(5)
    assert mean(row.round_seconds) == pytest.approx(sum(decoding) / 3 / 19)


def test_ratios(rows: dict[str, CellRow]) -> None:
    row = rows["smc-block-n8-k8-b1-p256"]
    assert row.ratio_to_ar == pytest.approx((5, 5, 5, 3))  # the noise is the same on both sides
    # To the tree, the faster of the two.
    assert mean(row.ratio_to_standalone) == pytest.approx(SECONDS[TREE] / SMC_SECONDS)
    plain = rows["ar-b1-p256"]
    assert (plain.ratio_to_ar, plain.ratio_to_standalone, plain.tokens_per_round) == (None, None, 1)
    stock = rows["ar-without-the-plugin-b1-p256"]
    assert mean(stock.ratio_to_ar) == pytest.approx(0.10 / 0.09)
    assert stock.ratio_to_standalone is None


def test_what_did_not_run_or_was_simulated_is_said(rows: dict[str, CellRow]) -> None:
    row = rows["ngram-b8-p256"]
    assert (row.refused, row.tokens_per_second) == ("ImportError: no kernels", None)
    assert rows["standalone-tree-b1-p256"].simulated_tokens_per_round == 4.47
    assert rows["smc-exact-n8-k8-b1-p256"].simulated_tokens_per_round is None
    assert markdown(list(rows.values()), "").count("(simulated)") == 4


def test_an_adaptive_server_is_beside_the_fastest_fixed_size() -> None:
    """Each by its ratio to the plain decoding beside it, whatever the machine did meanwhile."""
    slower = {1: 4.0, 2: 2.0, 4: 2.5, 8: 8.0}
    every = {}
    for cell in cells(CPU_EXPERTS, (4,), (32,)):
        asked = work(cell, 0, CPU_EXPERTS)
        n = cell.system.num_particles if cell.system.family == EXACT else None
        noise = 1.0 if n is None else 3.0
        ours = [sample(cell.system, asked, noise * slower.get(n or 0, 2.2))] * 2
        plain = [sample(System(AR), asked, noise)] * 2
        every[cell.slug] = {
            "samples": list(map(asdict, ours)),
            "beside": list(map(asdict, plain)),
        }
    found = {
        row.slug: row for row in make_rows(cells(CPU_EXPERTS, (4,), (32,)), every, CPU_EXPERTS)
    }
    adaptive = SpeedCell(System(EXACT_ADAPTIVE, 8, 4), 4, 32).slug
    assert mean(found[adaptive].ratio_to_fixed) == pytest.approx(2.0 / 2.2)
    assert [slug for slug, row in found.items() if row.ratio_to_fixed] == [adaptive]


def test_a_drawn_draft_is_its_target_s_first_layer(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_experts": 4, "moe_intermediate_size": 8, "vocab_size": 64}
    config = {**EXPERTS, **small, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 16}
    write_pair(config, 0.02, tmp_path / TARGET, tmp_path / DRAFT)
    target, draft = (load_file(tmp_path / one / "model.safetensors") for one in (TARGET, DRAFT))
    assert draft.keys() == {name for name in target if ".layers.1." not in name}
    assert all(torch.equal(weights, target[name]) for name, weights in draft.items())
    assert json.loads((tmp_path / DRAFT / "config.json").read_text())["num_hidden_layers"] == 1
    spread = target["model.layers.1.self_attn.o_proj.weight"].float().std()
    assert spread == pytest.approx(0.02, rel=0.2)
    assert target["lm_head.weight"].float().std() > 5 * spread, "logits are wide"
