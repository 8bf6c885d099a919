"""The fidelity benchmark: what is asked and kept, what plain models say of it, and its numbers."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import MAX_PROBLEMS, Reply, grade, prompt_ids, tokenizer
from fidelity.run import Fidelity, FidelityCell, FidelityRow, cells, make_rows, markdown, note
from fidelity.scoring import ScoredAnswer, load, score
from intervals import Z95, paired_difference
from pair.task import held_out
from speed_stand_ins import graded_reply
from study import PAIR, BenchError

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.demo.cli import FIRST_PROBLEM

STUDY = Fidelity(Fidelity.parser().parse_args([]))


def test_the_server_takes_every_setting_and_none_is_measured_twice() -> None:
    server = SMCConfig()
    seen = set()
    every = cells((0.7,))
    for cell in every:
        if cell.smc:
            config = request_config(server, {"smc": cell.smc})
            assert cell.evidence_threshold in (None, config.effective_evidence_threshold)
            sizes = (config.num_particles, config.num_steps)
            threshold = config.effective_evidence_threshold
            seen.add((config.mode, *sizes, config.resample_at, threshold, config.lag))
    assert len(seen) == sum(cell.engine == "smc" for cell in every)


def test_the_engines_differ_by_model_and_smc_alone() -> None:
    target = STUDY.engine("target")
    smc = STUDY.engine("smc")
    assert STUDY.engine("draft") == target and smc == {**smc, **target}
    assert (smc["speculative_smc_num_particles"], smc["speculative_num_steps"]) == (8, 8)


def test_an_answer_that_was_cut_off_is_wrong_and_one_without_all_tokens_refused() -> None:
    whole = Reply(0, **graded_reply("target", 0, {}))
    cut = whole._replace(meta_info={**whole.meta_info, "finish_reason": {"type": "length"}})
    assert grade(whole).right and not grade(cut).right
    with pytest.raises(BenchError, match="with 3 tokens, of which 2 came"):
        grade(whole._replace(output_ids=[5, 1]))


def test_problems_of_a_table_are_below_all_others() -> None:
    """Whatever a table may be asked for: the demo's are larger."""
    last = STUDY.params_of(cells((0.7,))[0], 0, MAX_PROBLEMS - 1)
    assert last["sampling_seed"] == MAX_PROBLEMS - 1 < FIRST_PROBLEM
    with pytest.raises(SystemExit):
        Fidelity.parser().parse_args(["--problems", str(MAX_PROBLEMS + 1)])


N = 100
TILTS = {"AR target": 0.0, "AR draft": 0.9, "exact": 0.0, "auto c=4": 0.1}
LOST = {"AR target": 0, "AR draft": 50, "exact": 1, "auto c=4": 2}


def test_paired_interval_by_hand() -> None:
    # Ten problems: we alone solve 1, the reference alone 3, both 4, none 2. With one more of each:
    # (2 - 4) / 12, variance (6 / 12 - (2 / 12)^2) / 12 = 17 / 432.
    ours = {place: bit == "1" for place, bit in enumerate("1000111100")}
    reference = {place: bit == "1" for place, bit in enumerate("0111111100")}
    half = Z95 * math.sqrt(17 / 432)
    found = paired_difference(ours, reference)
    assert found == pytest.approx((-0.2, -1 / 6 - half, -1 / 6 + half, 10))
    same = paired_difference({1: True, 2: False, 3: True}, {1: True, 2: False, 4: False})
    assert same is not None and (same.mean, same.n) == (0.0, 2) and same.low < 0 < same.high
    assert paired_difference({1: True}, {2: True}) is None


def canned(cell: FidelityCell, lost: int, tilt: float) -> list[ScoredAnswer]:
    """Answers of which 90 less ``lost`` are right, in as many fewer passes.

    All have this tilt, give or take, and log p of -40 less ten times that.
    """
    info: dict[str, Any] = {"completion_tokens": 41}
    mode = (cell.smc or {}).get("mode")
    passes = 20 - lost
    if cell.smc:
        # As the server says it: nothing in the mode auto.
        evidence = None if mode == "auto" else -1.5
        info |= {
            "spec_verify_ct": passes,
            "spec_smc_num_particles": 8,
            "spec_smc_rounds_ct": passes,
            "spec_smc_resample_ct": passes / 2,
            "spec_smc_ess_mean": 4.0,
            "spec_smc_log_evidence": evidence,
        }
    if mode == "exact":
        info |= {"spec_smc_tilt": 0.1, "spec_smc_tilt_information": 4.0}
    return [
        ScoredAnswer(
            index=i,
            right=i < 90 - lost,
            output_ids=[1] * 41,
            info=info,
            log_p=-40.0 - 10 * tilt,
            innovation=tilt,
            tilt=10 * tilt + (-1) ** i,
            information=10.0,
            log_ratios=[tilt] * 41,
        )
        for i in range(N)
    ]


@pytest.fixture(scope="module")
def rows() -> dict[str, FidelityRow]:
    """All cells by slug: one of SMC solves the less the more tokens a pass it has."""
    answers = {}
    for place, cell in enumerate(cells((0.7, 1.0))):
        lost = LOST.get(cell.label, 3 + place % 9)
        tilt = TILTS.get(cell.label, 0.3)
        answers[cell] = canned(cell, lost, tilt)
    return {row.slug: row for row in make_rows(answers)}


def test_rows(rows: dict[str, FidelityRow]) -> None:
    target, exact, auto = (rows[slug] for slug in ("ar-target-t0.7", "exact-t0.7", "auto-c4-t1"))
    assert (target.accuracy.mean, target.difference, target.tokens_per_pass) == (0.9, None, 1.0)
    assert (target.log_p_difference, target.kl_at_least.mean) == (None, 0)
    assert rows["ar-draft-t1"].tokens_per_pass is None
    assert exact.difference is not None and exact.difference.mean == pytest.approx(-0.01)
    assert exact.tokens_per_pass == pytest.approx(40 / 19)
    half = Z95 / math.sqrt(4 * N)  # the server's own tilt stands where answers carry it
    assert exact.server_tilt == pytest.approx((0.1, 0.1 - half, 0.1 + half, N))
    smc = rows["smc-c0-t1"]
    assert (smc.ess_share, smc.resample_rate) == (0.5, 0.5)
    assert (auto.ess_share, auto.resample_rate) == (None, None)
    half = Z95 * math.sqrt(N / (N - 1) / N) / 10  # the tilts of answers are 1 apart, either way
    assert auto.tilt == pytest.approx((0.1, 0.1 - half, 0.1 + half, N))
    assert auto.server_tilt is None
    assert auto.innovation.mean == pytest.approx(0.1 / 41)
    assert auto.kl_at_least.mean == pytest.approx(41 * math.log(1 + 0.98 * math.expm1(0.1)))
    assert auto.log_p_difference is not None
    assert auto.log_p_difference.mean == pytest.approx(-1 / 41)


def test_the_evidence_bounds_pure_smc_only(rows: dict[str, FidelityRow]) -> None:
    found = rows["smc-c0-t0.7"].kl_at_most
    assert found is not None and (found.mean, found.n) == (1.5, N)
    assert {row.label for row in rows.values() if row.kl_at_most} == {"smc c=0"}
    assert markdown(list(rows.values()), "").count("KL to the target at most 1.50") == 2


def test_a_part_ends_with_all_its_files(rows: dict[str, FidelityRow], tmp_path: Path) -> None:
    """Hours of answers must not end in a picture that cannot be drawn."""
    some = [rows["ar-draft-t1"], rows["smc-c0-t1"]]
    text = Fidelity.report.write(tmp_path, some, {"problems": N}, note)
    assert (tmp_path / "fidelity.png").stat().st_size > 0
    for found, row in zip(Fidelity.report.read(tmp_path), some, strict=True):
        assert found.tilt == pytest.approx(row.tilt, rel=1e-5)
        assert (found.slug, found.ess_share) == (row.slug, pytest.approx(row.ess_share))
    assert "problems 0 to 99" in text and text == (tmp_path / "fidelity.md").read_text()


# --- Scores of the plain models


TEMPERATURE = 0.7


@pytest.mark.parametrize(("index", "length"), [(0, 20), (1, 9)], ids=["ended", "cut"])
def test_scores_are_those_of_a_slow_direct_computation(index: int, length: int) -> None:
    """Token by token, each behind its own prefix, with sums over the vocabulary in plain Python."""
    item = held_out(index)
    answer = tokenizer().encode(item.answer, add_special_tokens=False)[:length]
    answer += [tokenizer().eos_token_id] * (index == 0)
    models = load(PAIR / "target", PAIR / "draft")
    found = asdict(score(prompt_ids(item), answer, TEMPERATURE, models))
    expected = slowly(models, prompt_ids(item), answer)
    assert found.pop("log_ratios") == pytest.approx(expected.pop("log_ratios"), abs=2e-4)
    assert found == pytest.approx(expected, abs=2e-3)


def slowly(models: Any, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    sums = dict.fromkeys(("log_p", "innovation", "tilt", "information"), 0.0)
    log_ratios = []
    for place, token in enumerate(answer):
        p, q = (law_by_hand(model, [*prompt, *answer[:place]]) for model in models)
        entropy = -sum(a * math.log(a) for a in p)
        ratios = [math.log(b / a) for a, b in zip(p, q, strict=True)]
        mean = sum(a * x for a, x in zip(p, ratios, strict=True))
        sums["log_p"] += math.log(p[token])
        sums["innovation"] += math.log(p[token]) + entropy
        sums["tilt"] += ratios[token] - mean
        sums["information"] += sum(a * (x - mean) ** 2 for a, x in zip(p, ratios, strict=True))
        log_ratios.append(ratios[token])
    return {**sums, "log_ratios": log_ratios}


@torch.inference_mode()
def law_by_hand(model: Any, text: list[int]) -> list[float]:
    logits = model(input_ids=torch.tensor([text])).logits[0, -1].double()
    weights = [math.exp(value / TEMPERATURE) for value in logits.tolist()]
    return [weight / sum(weights) for weight in weights]
