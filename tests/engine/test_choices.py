"""What a request chooses for itself in `custom_params={"smc": ...}`, through a real engine."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_models import smc_arguments

pytestmark = pytest.mark.engine

WIDE = {"vocab_size": 64, "scale": 0.3}
CHOICES: list[dict[str, Any]] = [
    {},
    {"num_particles": 1},
    {"num_particles": 3, "num_steps": 1, "evidence_threshold": 0},
    {"num_particles": 2, "resample_at": "token", "ess_threshold": 1.0},
    {"resampling_method": "ssp", "selection": "argmax"},
    {"mode": "exact"},
    {"mode": "exact", "num_particles": 1, "num_steps": 2},
    {"mode": "mixed", "evidence_threshold": 0.1},
    {"mode": "auto", "num_particles": 2},
    {"power": 2.0},
    {"draft_temperature": 1.5, "num_steps": 3},
    {"max_lag": 1},
    {"return_particles": True},
]
PRESETS = {f"choice-{number}": choice for number, choice in enumerate(CHOICES)}
PROMPT = [7, 8, 9, 10]


@pytest.fixture
def running(engine: Callable[..., Any], tiny: Callable[..., str]) -> Any:
    pair = tiny(seed=1, **WIDE), tiny(seed=2, **WIDE)
    settings = {"num_particles": 4, "num_steps": 4, "max_lag": 32, "presets": json.dumps(PRESETS)}
    return engine(**smc_arguments(*pair, **settings))


def params(choice: dict[str, Any], seed: int = 5, **more: Any) -> dict[str, Any]:
    own = {"max_new_tokens": 24, "sampling_seed": seed, "temperature": 0.8, "ignore_eos": True}
    return {**own, "custom_params": {"smc": choice}, **more}


def ask(engine: Any, choices: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    return engine.generate(
        input_ids=[PROMPT] * len(choices),
        sampling_params=[params(choice, **more) for choice in choices],
    )


def test_requests_that_choose_differently_share_a_batch(running: Any) -> None:
    """Each answers as it does alone: no choice leaks into another's particles or tails."""
    together = ask(running, CHOICES)
    for choice, answer in zip(CHOICES, together, strict=True):
        alone = ask(running, [choice])[0]
        assert answer["output_ids"] == alone["output_ids"], choice
        info = answer["meta_info"]
        assert info["spec_smc_mode"] == choice.get("mode", "smc")
        assert info["spec_smc_num_particles"] == choice.get("num_particles", 4)
        assert info["spec_smc_num_steps"] == choice.get("num_steps", 4)
        assert 1.0 <= info["spec_smc_ess_min"] <= info["spec_smc_ess_mean"] <= 4.0
    texts = {tuple(answer["output_ids"]) for answer in together}
    assert len(texts) > len(CHOICES) // 2  # the choices do something


def test_a_preset_is_what_its_settings_are(running: Any) -> None:
    """By `lora_path`, a list of names for a batch or one for all of it."""
    asked = {"input_ids": [PROMPT] * len(CHOICES), "sampling_params": [params({})] * len(CHOICES)}
    named = running.generate(**asked, lora_path=list(PRESETS))
    wanted = [answer["output_ids"] for answer in ask(running, CHOICES)]
    assert [answer["output_ids"] for answer in named] == wanted
    one = running.generate(input_ids=PROMPT, sampling_params=params({}), lora_path="choice-2")
    assert one["output_ids"] == wanted[2] != wanted[0]
    with pytest.raises(ValueError, match="'choice-0', 'choice-1'"):
        running.generate(input_ids=PROMPT, sampling_params=params({}), lora_path="choice")


@pytest.mark.parametrize("max_new_tokens", [1, 2, 17])
def test_particles_come_back_with_their_weights(running: Any, max_new_tokens: int) -> None:
    choices = [{"return_particles": True, "num_particles": n} for n in (1, 3, 4)]
    for number, answer in zip(
        (1, 3, 4), ask(running, choices, max_new_tokens=max_new_tokens), strict=True
    ):
        particles = answer["meta_info"]["spec_smc_particles"]
        assert len(particles) == number
        assert sum(particle["weight"] for particle in particles) == pytest.approx(1.0)
        assert answer["output_ids"] in [particle["output_ids"] for particle in particles]
        assert {len(particle["output_ids"]) for particle in particles} == {max_new_tokens}
        assert 1 <= answer["meta_info"]["spec_smc_distinct_ancestors"] <= number


def test_a_tilt_is_kept_as_the_threshold_that_it_came_to(running: Any) -> None:
    """With that threshold and the same seed the text comes again, whatever was learned since."""
    (first,) = ask(running, [{"tilt": 0.1}])
    info = first["meta_info"]
    threshold = info["spec_smc_evidence_threshold"]
    assert info["spec_smc_mode"] == "auto" and threshold > 0
    ask(running, [{"mode": "mixed", "evidence_threshold": 0.5}] * 8, seed=11)
    again, moved = ask(running, [{"mode": "mixed", "evidence_threshold": threshold}, {"tilt": 0.1}])
    assert again["output_ids"] == first["output_ids"]
    assert moved["meta_info"]["spec_smc_evidence_threshold"] != threshold, "it has learned"


def test_no_tilt_is_exact(running: Any) -> None:
    none, exact = ask(running, [{"tilt": 0}, {"mode": "exact"}])
    assert none["output_ids"] == exact["output_ids"]
    assert none["meta_info"].get("spec_smc_evidence_threshold") is None
    rounds = none["meta_info"]["spec_smc_rounds_ct"]
    assert none["meta_info"]["spec_smc_exact_ct"] == rounds > 0


def test_a_lag_of_one_emits_all_that_is_drawn(running: Any) -> None:
    """Each round settles its columns and the target's token; a longer lag keeps some back."""
    short, long = (
        list(_counts(running, {"max_lag": lag, "evidence_threshold": 0})) for lag in (1, 32)
    )
    assert set(short[1:-1]) == {5}, "K + 1"
    assert len(long) < len(short)


def _counts(running: Any, choice: dict[str, Any]) -> Iterator[int]:
    """New tokens of each chunk of a stream that has some."""
    before = 0
    asked = {"input_ids": PROMPT, "sampling_params": params(choice, temperature=1.5)}
    for chunk in running.generate(**asked, stream=True):
        count = chunk["meta_info"]["completion_tokens"]
        if count > before:
            yield count - before
        before = count


def test_without_asking_no_particles_come_back(running: Any) -> None:
    assert "spec_smc_particles" not in ask(running, [{}])[0]["meta_info"]


def test_only_weighted_answers_have_an_evidence(running: Any) -> None:
    modes = ("smc", "exact", "mixed", "auto")
    found = [a["meta_info"] for a in ask(running, [{"mode": mode} for mode in modes])]
    smc, exact, mixed, auto = (info["spec_smc_log_evidence"] for info in found)
    assert smc != 0.0
    assert exact == 0.0
    assert mixed is None
    assert auto is None
    assert found[1]["spec_smc_exact_ct"] == found[1]["spec_smc_rounds_ct"] > 0


def test_greedy_is_the_target_s_text_whatever_is_chosen(running: Any) -> None:
    """At temperature 0 every mode, N and K leaves the text of the target alone, and one chain."""
    answers = ask(running, CHOICES, temperature=0.0)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
    for choice, info in zip(CHOICES, (a["meta_info"] for a in answers), strict=True):
        assert info["spec_smc_mode"] == choice.get("mode", "smc")
        assert info["spec_smc_num_particles"] == info["spec_smc_particles_mean"] == 1
        assert info["spec_smc_all_zero_ct"] == 0, "wrong drafts are no alarm"
    (alone,) = answers[-1]["meta_info"]["spec_smc_particles"]
    whole = {"output_ids": answers[-1]["output_ids"], "text": answers[-1]["text"].lstrip()}
    assert alone == {**whole, "weight": 1.0, "log_weight": 0.0}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"num_particles": 5}, "num_particles=5; allowed: an integer from 1 to 4"),
        ({"num_steps": 0}, "num_steps=0; allowed: an integer from 1 to 4"),
        ({"particles": 4}, "unknown key 'particles'; allowed: "),
        ({"max_lag": 33}, "max_lag=33; allowed: an integer from 1 to 32"),
        ({"tilt": -1}, "tilt=-1; allowed: a finite number >= 0"),
        ({"tilt": 0.1, "mode": "smc"}, "no effect in mode 'smc'"),
        ({"mode": "fast"}, "mode='fast'; allowed: one of smc, exact, mixed, auto"),
        ({"mode": "exact", "ess_threshold": 0.5}, "no effect in mode 'exact'"),
        ({"mode": "mixed", "power": 2}, "no effect in mode 'mixed'"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    running: Any, choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(running, [choice])
    assert ask(running, [{}])  # and the engine lives
