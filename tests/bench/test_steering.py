"""The study of steering: its potentials, its choices, what a run keeps, its tables and its page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from answers import MAX_PROBLEMS
from answers import tokenizer as load_tokenizer
from pair.task import held_out
from speed_stand_ins import Replying, Runner
from steering import run as steering
from steering.judge import Judge
from steering.steps import Steps, wrong_steps

from sglang_smc.potentials import Potential, Text
from sglang_smc_tools.testing import check_potential

# --- The potentials


@pytest.mark.parametrize(
    ("output", "of_prefix", "of_whole"),
    [
        ("So 1+2=3.\nAnd 3x4=12", 0, 0),
        ("So 1+2=4.\nAnd 3x4=13.", 2, 2),
        ("So 1+2=4", 0, 1),  # may go on
        ("7-9=-2 and 9-7=2.", 0, 0),
        ("8/2=4. 9/2=4. 9/0=0.", 2, 2),
    ],
)
def test_wrong_steps_are_counted(output: str, of_prefix: int, of_whole: int) -> None:
    found = [wrong_steps(output, is_whole=is_whole) for is_whole in (False, True)]
    assert found == [of_prefix, of_whole]


def texts(potential: Potential, tokenizer: Any, count: int) -> list[Text]:
    found = []
    for index in range(count):
        item = held_out(index)
        for output in (item.answer, item.answer.replace("1", "7")):
            ids = [tokenizer(part)["input_ids"] for part in (item.question, output)]
            found.append(Text(*ids, potential.Args(), tokenizer.decode))
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer()


@pytest.mark.parametrize("kind", [Steps, Judge])
def test_both_are_sound_and_prefer_right_answers(kind: type[Potential], tokenizer: Any) -> None:
    """Red where padding changes what the model says, or a rule forgets a mistake."""
    potential = kind()
    potential.open()
    results = check_potential(potential, texts(potential, tokenizer, 2), most_beginnings=6)
    assert not [result.note for result in results if result.failed]
    values = potential.complete(texts(potential, tokenizer, count=8))
    assert sum(values[0::2]) > sum(values[1::2])


# --- Choices


def test_choices_by_hand() -> None:
    """Red where texts without an answer vote, or a tie goes to the last."""
    assert list(map(steering.number_of, ["#### 1", "x\n#### -2\n", "nothing"])) == [1, -2, None]
    said = [1, 2, 2, None, None, None]
    assert steering.voted(said, [1.0] * 6, 2)
    assert steering.voted(said, [5.0, 2.0, 2.0, 9.0, 0.0, 0.0], 1)
    assert steering.voted(said, [2.0, 1.0, 1.0, 0.0, 0.0, 0.0], 1)
    assert not steering.voted([None], [1.0], 1)
    assert steering.best(said, [0.0, 3.0, 3.0, 1.0, 1.0, 1.0], 2)
    assert not steering.best([None, 1], [1.0, 0.0], 1)
    assert steering.drawn(said, [0.3, 0.2, 0.1, 0.4, 0.0, 0.0], 2) == pytest.approx(0.3)


# --- A run


def replying(tokenizer: Any) -> Replying:
    """Right in all even problems; particles are right but for the last, which weighs nothing."""

    def particle(text: str, weight: float) -> dict[str, Any]:
        """Of ten tokens, EOS and what is not shown among them."""
        ids = tokenizer(text)["input_ids"]
        return {"weight": weight, "output_ids": ids + [tokenizer.eos_token_id] * (10 - len(ids))}

    def reply(engine: str, index: int, params: dict[str, Any]) -> dict[str, Any]:
        right, wrong = f"#### {held_out(index).number}", "#### -1"
        info: dict[str, Any] = {"completion_tokens": 10}
        smc = params.get("custom_params", {}).get("smc")
        if smc:
            count = smc["num_particles"]
            info |= {"spec_verify_ct": 3, "spec_smc_rounds_ct": 3, "spec_smc_resample_ct": 2}
            info["spec_smc_ess_mean"] = count / 4
            alike = [particle(right, 1 / (count - 1))] * (count - 1)
            info["spec_smc_particles"] = [*alike, particle(wrong, 0.0)]
        text = right if smc or index % 2 == 0 else wrong
        return {"text": text, "output_ids": [5] * 10, "meta_info": info}

    return reply


class Constant(Potential):
    """Likes all."""

    Args = Steps.Args

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return [0.0] * len(texts)


class _NoArgs(Constant):
    Args = Potential.Args


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Runner:
    page = tmp_path / "steering.md"
    page.write_text("Before.\n{}\nold\n{}\nBehind.\n".format(*steering.MARKS))
    monkeypatch.setattr(steering, "PAGE", page)
    monkeypatch.setattr(steering, "shipped", lambda: {"steps": Constant(), "judge": _NoArgs()})
    return Runner(
        steering.Steering, tmp_path, monkeypatch, replying(tokenizer), ("--problems", "4")
    )


def test_a_whole_run_is_published(bench: Runner) -> None:
    """Red where cells are lost, samples share a seed, or some tokens are not counted."""
    assert bench("--publish") == 0
    assert bench.started == ["target", "target+draft", "target+target"]
    seeds = [one["sampling_seed"] for engine, one in bench.asked if engine == "target"]
    assert len(set(seeds)) == len(seeds) == 4 * max(steering.PARTICLES)
    assert {seed % MAX_PROBLEMS for seed in seeds} == {0, 1, 2, 3}
    rows = bench.rows()
    of_samples = 1 + len(steering.PARTICLES) * (1 + 2 * len(steering.POTENTIALS))
    of_particles = len(steering.PARTICLES) * 3 * len(steering.POTENTIALS)
    assert len(rows) == of_samples + 3 * of_particles
    majority, steered = rows["target: majority, N=8"], rows["target: SMC, vote by judge, N=8"]
    assert (majority.accuracy.mean, majority.tokens, majority.passes) == (0.5, 80.0, 10.0)
    assert (steered.accuracy.mean, steered.tokens, steered.passes) == (1.0, 80.0, 3.0)
    assert majority.ess is majority.resampled is None
    assert (steered.ess.mean, steered.resampled.mean) == pytest.approx((1 / 4, 2 / 3), rel=1e-5)
    assert bench.published() == set(steering.Steering.report.files)
    page = steering.PAGE.read_text()
    assert page.startswith("Before.\n") and page.endswith("Behind.\n") and "old" not in page
    assert steering.summaries(steering.shown(list(rows.values()))) in page
