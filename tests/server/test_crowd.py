"""Requests of every kind at once: each gets what it asked for, and nothing of its neighbours'."""

from typing import Any

from http_server import Server

from server.kinds import CHOICES, KINDS, asked

Answers = dict[str, dict[str, Any]]

#: Logits differ by 3e-6 with the batch and with what is cached of a prompt, which decides about one
#: draw in 100,000, or 0.2 of all texts here: more than these have another cause (alpha 6e-5).
FLIPS = 3


def texts(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Texts are the same but for what rounding may change."""
    pairs = zip(texts(found), texts(expected), strict=True)
    other = [index for index, (one, two) in enumerate(pairs) if one != two]
    assert len(other) <= FLIPS, other


def test_an_answer_follows_from_its_seed_alone(server: Server, crowd: Answers) -> None:
    """In the opposite order, and alone: red where a neighbour's tail, grammar or penalty leaks."""
    backwards = server.generate(list(KINDS.values())[::-1])[::-1]
    assert_same(backwards, list(crowd.values()))
    names = list(KINDS)[3::9]
    alone = [answer for name in names for answer in server.generate([KINDS[name]])]
    assert_same(alone, [crowd[name] for name in names])


def test_what_is_only_told_changes_no_text(crowd: Answers) -> None:
    """Traces and log-probabilities; what is chosen changes most of them."""
    plain, traced, scored = (
        [crowd[f"{kind} {index}"] for index in range(len(CHOICES))]
        for kind in ("choice", "trace", "logprobs")
    )
    assert_same(traced + scored, plain + plain)
    for index, answer in enumerate(plain):
        assert "spec_smc_trace" not in answer["meta_info"]
        assert "output_token_logprobs" not in answer["meta_info"]
        assert ("spec_smc_particles" in answer["meta_info"]) == (index == len(CHOICES) - 1)
    # At most 51 of these 79 differ, as there are three of each choice.
    assert len(set(map(str, texts(list(crowd.values()))))) >= 40


def test_meta_info_says_what_was_chosen_and_what_happened(crowd: Answers) -> None:
    for name, answer in crowd.items():
        info = answer["meta_info"]
        smc = KINDS[name]["sampling_params"]["custom_params"]["smc"]
        chosen = {"mode": "smc", "num_particles": 4, "num_steps": 4} | smc
        for key in ("mode", "num_particles", "num_steps"):
            assert info[f"spec_smc_{key}"] == chosen[key], (name, key)
        rounds = info["spec_smc_rounds_ct"]
        assert rounds == info["spec_verify_ct"] > 0
        assert 0 <= info["spec_smc_resample_ct"] <= rounds
        assert 1 <= info["spec_smc_distinct_ancestors"] <= chosen["num_particles"]
        if info["spec_smc_mode"] == "smc" and info["spec_smc_all_zero_ct"] == 0:
            assert 1.0 <= info["spec_smc_ess_min"] <= info["spec_smc_ess_mean"] <= 4.0, name
        assert info["spec_accept_length"] == info["completion_tokens"] / rounds
        histogram = info["spec_correct_drafts_histogram"]
        assert sum(histogram) == rounds
        proposed = info["spec_num_proposed_drafts"]
        assert (
            proposed == round(info["spec_smc_steps_mean"] * rounds) <= chosen["num_steps"] * rounds
        )
        assert ("spec_accept_rate" in info) == (proposed > 0)
        assert info["spec_num_correct_drafts"] <= min(proposed, info["completion_tokens"] - 1)
        counted = sum(i * count for i, count in enumerate(histogram))
        assert counted == info["spec_num_correct_drafts"]


def test_a_preset_is_what_its_settings_are(server: Server, crowd: Answers) -> None:
    """By `lora_path`: a name for each prompt of a batch, or one for all of it."""
    names = [f"choice-{index}" for index in range(len(CHOICES))]
    body = asked()
    body["sampling_params"].pop("custom_params")
    batch = {**body, "input_ids": [body["input_ids"]] * (len(names) + 1)}
    found = server.post("/generate", **batch, lora_path=[*names, None]).json()
    wanted = [crowd[name.replace("-", " ")] for name in names]
    assert_same(found, [*wanted, wanted[0]])
    one = server.post("/generate", **body, lora_path="choice-2").json()
    assert one["meta_info"]["spec_smc_num_particles"] == 3
    told = server.post("/load_lora_adapter", lora_name="choice-2", lora_path="/adapter").json()
    assert "a preset (--speculative-smc-presets) are both named 'choice-2'" in told["error_message"]
