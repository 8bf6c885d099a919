"""``python -m sglang_smc.plan --tokens-per-pass``: drafts side by side; and plans with heads."""

import json
import re
from pathlib import Path

import pytest

from sglang_smc.plan.cli import main
from sglang_smc.plan.devices import named
from sglang_smc.plan.proposals import from_config
from sglang_smc.plan.roofline import ar_step, round_cost
from sglang_smc.plan.shapes import from_config as model_from_config

TARGET = ("--target", "llama-3.1-8b")
DRAFTS = ("llama-3.2-1b", "eagle3-8b", "dflash-8b", "ngram")
ALL = (*TARGET, "--draft", *DRAFTS, "--device", "h200")
ONE = ("--particles", "8", "--steps", "8", "--context", "2000", "--tail", "0")
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}


def cells_of(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in text.split("\n\n")[1].splitlines()[2:]]


def model_weights(name: str) -> float:
    """Of the two that a plan below has: the head goes by its folder's name."""
    known = name if name == "llama-3.1-8b" else "eagle3-8b"
    return from_config(known).resident_bytes


def test_a_row_for_each_device_batch_and_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ALL, "h100", *ONE, "--batch", "1,16", "--tokens-per-pass", "5,7"]) == 0
    text = capsys.readouterr().out
    found = cells_of(text)
    keys = [(device, batch) for device in ("h200", "h100") for batch in ("1", "16")]
    assert [tuple(row[:4]) for row in found] == [
        (*key, "N=8 K=8", draft) for key in keys for draft in DRAFTS
    ]
    cost = round_cost(
        model_from_config("llama-3.1-8b"), from_config("dflash-8b"), named("h200"), 8, 8,
        context=2000,
    )  # fmt: skip
    times = [f"{1e3 * value:.3g}" for value in (*cost[:3], cost.seconds)]
    speeds = [f"{tokens / cost.seconds:,.0f}" for tokens in (5, 7)]
    assert found[2][4:] == [*times, "38", "314", *speeds]
    assert "eagle3-8b (eagle3): 425 M parameters, 749 MB read a pass, 4.1 kB of KV" in text
    assert "of the target's states 1.77 MB a request at N=8 K=8" in text
    assert "a pass reads the target's LM head, too" in text
    assert "on the host in microseconds" in text and "upper bounds" in text


def test_json_has_the_same_in_plain_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ALL, *ONE, "--batch", "16", "--tokens-per-pass", "6.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["drafts"]] == [row["draft"] for row in found["rows"]]
    for row in found["rows"]:
        parts = row["draft_seconds"] + row["target_seconds"] + row["rest_seconds"]
        assert row["seconds"] == pytest.approx(parts)
        speed = row["tokens_per_second"]["6.5"]
        assert speed == pytest.approx(16 * 6.5 / row["seconds"])
    plain = ar_step(model_from_config("llama-3.1-8b"), 16, 2000).seconds(named("h200"))
    assert found["rows"][0]["ar_tokens_per_second"] == pytest.approx(16 / plain)


def test_each_draft_has_the_steps_that_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    least = ("--min-particles", "16", "--tokens-per-pass", "3")
    assert main([*ALL, *least]) == 0
    settings = [(row[2], row[3]) for row in cells_of(capsys.readouterr().out)]
    steps = {name: {s for s, draft in settings if draft == name} for name in DRAFTS}
    assert steps["eagle3-8b"] == {"N=16 K=4", "N=16 K=8", "N=16 K=16"}
    assert steps["dflash-8b"] == {"N=16 K=4", "N=16 K=8"}


def test_drafts_of_one_name_go_by_their_paths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = [tmp_path / name / "head" for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(HEAD))
    given = [*TARGET, "--draft", *map(str, folders), "--device", "h200", *ONE]
    assert main([*given, "--tokens-per-pass", "5"]) == 0
    assert [row[3] for row in cells_of(capsys.readouterr().out)] == [str(one) for one in folders]


def test_a_head_has_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What proposes is named, and what a round of the best setting costs by who takes it."""
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    given = [*TARGET, "--draft", str(tmp_path), "--device", "h200"]
    assert main([*given, "--particles", "8", "--steps", "8", "--context", "2000"]) == 0
    text = capsys.readouterr().out
    assert f"draft   {tmp_path.name} (eagle3): 425 M parameters" in text
    assert "the draft takes 1.27 ms, the target 3.2 ms" in text
    assert "columns, 0.124 ms; 41 layers" in text
    assert main([*given, "--particles", "8", "--steps", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    smc = found["settings"][-1]
    assert found["draft"]["proposal"] == "eagle3"
    assert list(smc["seconds_by_pass"]) == ["draft", "verify", "follow"]
    assert sum(smc["seconds_by_pass"].values()) == pytest.approx(smc["seconds"])
    assert smc["layers"] == 41
    weights = sum(model_weights(found[name]["name"]) for name in ("target", "draft"))
    kv = (1024 + 8 * found["tail"]) * (131_072 + 4_096)
    states = 8 * 9 * 3 * 4096 * 2
    assert found["memory_bytes"] == pytest.approx(weights + kv + states, abs=1)


@pytest.mark.parametrize("draft", DRAFTS)
def test_each_draft_fits_a_card_that_holds_it(
    draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the 1B, weights alone are 18.5 GB; a head's states count for each request."""
    given = [*TARGET, "--draft", draft, "--device", "h100", "--context", "2000", "--json"]
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["memory"]["modes"]["smc"]["fits"] == 48


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (ALL, "--draft has 4 values.*--tokens-per-pass 5,6,7"),
        ((*TARGET, "--draft", "ngram", "--device", "h200", "h100"), "--device has 2 values"),
        ((*ALL[:4], "--device", "h200", "--batch", "1,2"), "--batch has 2 values"),
        ((*ALL, *ONE, "--tokens-per-pass", "10"), "8 steps yield 1 to 9"),
        ((*ALL, "--tokens-per-pass", "5", "--kept", "1,2,3"), "--kept is of a plan"),
        ((*ALL, "--tokens-per-pass", "5", "--acceptance", "0.5"), "--acceptance is of a plan"),
        ((*ALL, "--tokens-per-pass", "2", "--plot", "a.png"), "--plot is of a plan"),
        ((*ALL, "--tokens-per-pass", "2", "--min-particles", "99"), "No number of particles"),
        ((*ALL, "--steps", "16", "--tokens-per-pass", "5"), "at most 15 steps"),
        (("--target", "qwen3-4b", *ALL[2:], "--tokens-per-pass", "2"), "the target's 2560"),
    ],
)
def test_arguments_that_make_no_comparison(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(arguments) == 2
    assert re.search(said, capsys.readouterr().err)
