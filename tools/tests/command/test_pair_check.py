"""``sglang-smc doctor`` with --target and --draft: each misfit is found. No model is loaded."""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zoo
from model_families import CONFIGS
from published_drafts import read, rewrite, write

from sglang_smc.command import doctor, machine
from sglang_smc.command.machine import FAIL, OK, WARNING, Finding
from sglang_smc.kv.arena import arena
from sglang_smc.options.server import SMCConfig
from sglang_smc_tools import pair_check, start_check
from sglang_smc_tools.plan import shapes
from sglang_smc_tools.plan.devices import Device, named
from sglang_smc_tools.plan.roofline import Scenario
from sglang_smc_tools.plan.shapes import BUILT_IN, draft_from_config

PAIR = Path(__file__).parents[3] / "bench" / "pair"
TARGET = str(PAIR / "target")
LLAMA = ("--target", "llama-3.1-8b", "--draft", "llama-3.2-1b")


def options(*given: str) -> argparse.Namespace:
    found = doctor.parser().parse_args([*LLAMA, *given])
    found.mem_fraction = found.mem_fraction or 0.88
    pair_check.fill_in(found)
    return found


def accepted(*given: str) -> Finding:
    """Return what is said of the server arguments."""
    return next(start_check.findings(options(*given)))


def findings_of(device: Device | str, *given: str) -> dict[str, Finding]:
    """Of a pair, 8B and 1B where nothing else is given."""
    held = named(device) if isinstance(device, str) else device
    return {one.about: one for one in pair_check.findings(options(*given), held, None)}


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(PAIR / "draft", tmp_path / "draft"))


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def exchange_two_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (exchange_two_tokens, "2 tokens differ: 'a'"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "cannot be read"),
    ],
    ids=["exchanged", "no tokenizer"],
)
def test_vocabularies(draft: Path, spoil: Callable[[Path], Any], says: str) -> None:
    spoil(draft)
    found = pair_check._vocabularies(options("--target", TARGET, "--draft", str(draft)))
    assert found.level == FAIL and says in found.found


@pytest.fixture
def resolving() -> Iterator[None]:
    """With SMC's flags, and without what resolving server arguments exports."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.usefixtures("resolving")
def test_the_shipped_pair_goes_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "findings", lambda: iter(()))
    shipped = "--target", TARGET, "--draft", str(PAIR / "draft")
    assert doctor.main([*shipped, "--device", "h100", "--json"]) == 0
    found = {one["about"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["vocabulary"]["numbers"] == {"tokens": 512}
    assert found["server arguments"]["level"] == OK
    assert found["mode smc"]["numbers"]["arena"] == 105


@pytest.mark.usefixtures("resolving")
def test_a_family_that_is_not_supported_is_refused(draft: Path) -> None:
    edit(draft, architectures=["LlamaForSequenceClassification"])
    found = accepted("--target", TARGET, "--draft", str(draft))
    assert found.level == FAIL and "has no next-token head" in found.do


@pytest.mark.usefixtures("resolving")
def test_a_published_head_is_named_and_its_faults_are(tmp_path: Path) -> None:
    """By what the server says, from the files alone."""
    folder = rewrite(PAIR / "eagle3", tmp_path / "whole")
    said = pair_check._format(folder) or ""
    assert said.startswith("speculators eagle3, made for a/target, proposes K = 4")
    assert pair_check._format(str(PAIR / "eagle3")) is None and pair_check._is_head(folder)
    assert draft_from_config(folder) == draft_from_config(PAIR / "eagle3")
    given = "--target", TARGET, "--num-steps", "8", "--draft"
    assert accepted(*given, folder).level == OK
    config, weights = read(Path(folder))
    del weights["fc.weight"]
    found = accepted(*given, write(tmp_path / "cut", config, weights))
    assert found.level == FAIL and "lacks a tensor fc.weight" in (found.do or "")


@pytest.mark.usefixtures("resolving")
@pytest.mark.parametrize("count", [1, 0])
def test_without_a_draft_the_target_s_own_layer_drafts(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no tokenizer; beside linear attention a server has no radix cache."""
    config = CONFIGS["qwen3_5_text"] | {"vocab_size": 64, "mtp_num_hidden_layers": count}
    config |= {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(machine, "findings", lambda: iter(()))
    status = doctor.main(["--target", str(tmp_path), "--device", "h100", "--json"])
    found = {one["about"]: one for one in json.loads(capsys.readouterr().out)}
    assert "vocabulary" not in found
    if count == 0:  # what could draft: no built-in model has this vocabulary
        assert (status, found["draft"]["level"]) == (1, FAIL)
        assert found.keys() == {"draft", "published draft"}
        times = found["draft"]["numbers"]
        assert times["an EAGLE-3 head"] > times["n-gram matches alone"] and len(times) == 2
        return
    assert status == 0 and "with --disable-radix-cache" in found["server arguments"]["found"]
    target = shapes.from_config(tmp_path)
    weights = target.resident_bytes + shapes.draft_for(target, "mtp").resident_bytes
    assert found["memory"]["numbers"]["weight_bytes"] == weights


@pytest.mark.parametrize(
    ("target", "level", "says"),
    [
        ("Qwen/Qwen3-8B", OK, "dspark_qwen3_8b_block7 (Qwen3DSparkModel), --speculative-smc-mode "),
        ("moonshotai/Kimi-K3", WARNING, "for Kimi K3, K3.1: Inferact/Kimi-K3-DSpark"),
    ],
)
def test_a_model_s_name_finds_its_published_draft(
    target: str,
    level: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red where it asks for a folder; with a draft it still does."""
    monkeypatch.setattr(machine, "findings", lambda: iter(()))
    assert doctor.main(["--target", target, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["level"] == level and says in found["found"]
    tried = "not tried here" in found["found"]
    assert tried == (level == OK) and ("do" in found) == (level == WARNING)
    assert doctor.main(["--target", target, "--draft", "qwen3-0.6b"]) == 2


def test_drafts_for_a_target_are_compared() -> None:
    """By a round's bound; of the models with its vocabulary the smallest."""
    times = findings_of("h200", "--draft", "mtp")["draft"].numbers or {}
    assert list(times) == ["an EAGLE-3 head", "llama-3.2-1b", "n-gram matches alone"]
    target, draft = map(draft_from_config, LLAMA[1::2])
    load = Scenario(target, draft, named("h200"), pair_check.CONTEXT)
    assert times["llama-3.2-1b"] == pytest.approx(1e3 * load.smc(1, 8, 8).seconds)
    small = findings_of("h200", "--target", "llama-3.2-1b", "--draft", "mtp")["draft"].numbers or {}
    assert list(small) == ["an EAGLE-3 head", "n-gram matches alone"]


def test_several_layers_are_not_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.loads((PAIR / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | {"num_nextn_predict_layers": 3}))
    monkeypatch.setattr(start_check, "findings", lambda _: iter(()))
    found = findings_of("h200", "--target", str(tmp_path), "--draft", "mtp")
    assert "has 3 MTP layers" in (found["arithmetic"].do or "") and "draft" not in found


def test_what_makes_room_is_advised() -> None:
    """Of 24 GB little is left beside 8B + 1B: a lag of 16 makes room for twelve requests."""
    asked = "--context", "512", "--requests", "8"
    found = findings_of("l4", *asked, "--max-lag", "256")
    assert found["mode smc"].level == WARNING
    assert found["mode smc"].do.endswith("With --speculative-smc-max-lag 16 they fit.")
    assert findings_of("l4", *asked, "--max-lag", "16")["mode smc"].level == OK
    found = findings_of("l4", "--context", "512", "--requests", "11")  # no lag would
    assert "exact" in found["mode smc"].do and "-mode exact" in found["advice"].found
    assert "steps" not in found["advice"].found, "those that the server chooses"
    own = findings_of("l4", "--context", "512", "--requests", "11", "--num-steps", "4")
    assert own["advice"].found.endswith("num-particles 8 --speculative-num-steps 4")
    assert "advice" not in findings_of("l4", "--context", "100000"), "not one request fits"
    too_large = findings_of("l4", "--target", "llama-3.1-70b")
    assert too_large["memory"].level == FAIL and "advice" not in too_large


def test_round_graphs_are_those_that_memory_holds() -> None:
    """By hand, for 7.6 GB less prefill: a fourth of a share for rounds call by call."""
    asked = options("--device", "l40s")
    asked.mem_fraction = None
    (found,) = [one for one in pair_check.findings(asked) if one.about == "round graphs"]
    share = 0.8 * 0.81 * (7_270 << 20)
    each = 128_256 * 864
    launched = int(share / 4 / each)
    pool = share - launched * each
    most = [min(int(pool / 128_256 / rows), 48) for rows in (464, 720, 864)]
    assert found.numbers == {"recorded": most, "launched": launched}
    assert found.level == OK and most[0] == 48 and most[2] < 48
    tight = findings_of("l4", "--mem-fraction", "0.95")["round graphs"]
    assert tight.level == WARNING and "--mem-fraction" in tight.do


def test_speed_is_that_of_the_plan() -> None:
    found = findings_of("h100")["speed"]
    assert found.level == OK and 1 < (found.numbers or {})["times_ar"] < 9
    slow = findings_of(Device("slow", 1e12, 1e11, 80e9))  # bound by compute from the first token
    assert slow["speed"].level == slow["advice"].level == WARNING


def test_a_block_drafts_all_of_itself_where_no_k_is_given(tmp_path: Path) -> None:
    """As a server with that head; red where K is more than a published block has."""
    folders = [zoo.write(name, tmp_path / str(place)) for place, name in enumerate(BLOCKS)]
    drafts = ["dspark-8b", "dflash-8b", "ngram", LLAMA[3], *folders]
    found = [options("--draft", draft).num_steps for draft in drafts]
    assert found == [8, 15, 8, 8, *BLOCKS.values()]


#: Blocks by their name in `zoo`, and the K of each: an EAGLE head has 16.
BLOCKS = {
    "qwen3-8b+deepspec": 7,
    "qwen3.8-27b+dflash2": 7,
    "qwen3.6-35b+redhat-dspark": 8,
    "qwen3.6-35b+ornith-dspark": 7,
    "qwen3-8b+specforge-dspark": 7,
    "qwen3-8b+specforge-domino": 15,
    "qwen3-8b+specforge-eagle3": 16,
}


def test_recurrent_states_are_part_of_the_sum() -> None:
    """By hand: those of a prompt, and of 9 columns; red where 48 requests, a server's own, fail."""
    target = BUILT_IN["qwen3.5-27b"]
    assert target.states is not None
    for requests in ("8", "48"):
        given = ("--target", "qwen3.5-27b", "--draft", "mtp", "--requests", requests)
        found = findings_of("h200", *given)
        states = found["recurrent states"].numbers or {}
        draft = shapes.draft_for(target, "mtp")
        assert states["bytes"] == 10 * target.states.bytes + draft.hidden_state_bytes(8, 8)
        room = 0.88 * (named("h200").capacity or 0) - 1.5e9 - target.resident_bytes
        slots = (4096 + arena(SMCConfig(), 4096)) * (
            target.kv_bytes_per_token + draft.kv_bytes_per_token
        )
        fitting = int((room - draft.resident_bytes) / (states["bytes"] + slots))
        assert states["requests"] == fitting < 48
        assert (
            f"--max-running-requests {min(fitting, int(requests))}" in found["recurrent states"].do
        )
        assert (found["mode smc"].numbers or {})["requests"] == fitting
        assert not [one for one in found.values() if one.level == FAIL]


@pytest.mark.usefixtures("resolving")
def test_texts_are_at_most_as_long_as_the_target_takes() -> None:
    given = "--target", TARGET, "--draft", str(PAIR / "draft"), "--device", "h100", "--context"
    found = {one.about: one for one in start_check.findings(options(*given, "100000"))}
    assert found["context"].level == FAIL and "what the target takes" in found["context"].do
    assert "context" not in {one.about for one in start_check.findings(options(*given, "512"))}


@pytest.mark.parametrize(
    ("device", "draft"),
    [("l4", LLAMA[3]), *(("h100", name) for name in (LLAMA[3], "eagle3-8b", "dflash-8b", "ngram"))],
)
def test_memory_is_that_of_weights_states_and_arenas(device: str, draft: str) -> None:
    """By hand: 16 bits a number, 128 KiB of KV a token beside the draft's; matches are free."""
    given = "--draft", draft, "--num-steps", "8"
    shape = draft_from_config(draft)
    found = findings_of(device, *given)
    states = 8 * shape.hidden_state_bytes(8, 8)  # of --requests
    weights = 2 * BUILT_IN["llama-3.1-8b"].num_parameters + shape.resident_bytes
    room = 0.88 * (named(device).capacity or 0) - 1.5e9 - states - weights
    slots = int(room / (128 * 1024 + shape.kv_bytes_per_token))
    assert (found["memory"].numbers or {})["slots"] == slots
    for mode in ("smc", "exact"):
        own = arena(SMCConfig(mode=mode), 4096)
        (told,) = (one for about, one in found.items() if about.startswith(f"mode {mode}"))
        fitting = slots // (4096 + own)
        assert told.numbers == {"arena": own, "requests": fitting}
        assert told.level == (OK if fitting >= 8 else WARNING if fitting else FAIL)
    times, with_model = (
        (one["speed"].numbers or {})["times_ar"] for one in (found, findings_of(device))
    )
    assert (times == with_model) == draft.endswith("1b") and times >= with_model


def test_weights_in_8_bits_take_16_on_a_cpu(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose platform dequantizes them; red where doctor says that twice as large a model fits."""
    monkeypatch.setattr(start_check, "findings", lambda _: iter(()))
    weights = []
    for method in ("fp8", None):
        edit(draft, quantization_config=method and {"quant_method": method})
        given = options("--target", str(draft), "--draft", str(PAIR / "draft"))
        cpu = Device("cpu", 1e11, 1e12, 32e9)
        found = {one.about: one for one in pair_check.findings(given, cpu, most_slots=1 << 17)}
        weights.append((found["memory"].numbers or {})["weight_bytes"])
    assert weights[0] == weights[1]


BIG = ("--target", "llama-3.1-70b")


@pytest.mark.parametrize(
    ("given", "about", "says"),
    [
        ((*BIG, "--draft", "eagle3-8b"), "draft", "4096 and the target's 8192"),
        (("--draft", "dflash-8b", "--num-steps", "16"), "draft", "at most 15 steps"),
        (("--draft", "qwen3-0.6b"), "vocabulary", "target's family"),
        (("--draft", "qwen3-0.6b"), "vocabulary", "128256 and 151936"),
        (BIG, "memory", "split it (--tp)"),
    ],
)
def test_pairs_that_do_not_go_together(given: tuple[str, ...], about: str, says: str) -> None:
    found = findings_of("h100", *given)
    assert found[about].level == FAIL and says in found[about].found + found[about].do
    assert not (about == "memory" and any(name.startswith("mode") for name in found))


def test_devices_share_a_large_target() -> None:
    assert {one.level for one in findings_of("h100", *BIG, "--tp", "4").values()} == {OK}


def test_a_head_needs_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the target's tokens; a draft model is asked for its own above."""
    config = json.loads((PAIR / "target" / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(start_check, "findings", lambda _: iter(()))
    found = findings_of("h100", "--target", TARGET, "--draft", str(tmp_path))
    assert "memory" in found and "vocabulary" not in found
    edit(tmp_path, architectures=["Eagle3DeepseekV2ForCausalLM"])  # which the planner does not know
    found = findings_of("h100", "--target", TARGET, "--draft", str(tmp_path))
    assert "arithmetic" in found and "vocabulary" not in found


def test_what_configurations_say(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 bits it is computed as the device does; of an unknown shape there is no arithmetic."""
    given = "--device", "h100", "--target", str(draft)
    monkeypatch.setattr(pair_check, "_misfit", lambda *_: None)
    monkeypatch.setattr(pair_check, "named", seen := mock.Mock(return_value=named("h100")))
    list(pair_check.findings(options(*given)))
    edit(draft, quantization_config={"quant_method": "fp8"})
    list(pair_check.findings(options(*given)))
    assert seen.call_args_list == [mock.call("h100", 2.0), mock.call("h100", 1.0)]
    edit(draft, architectures=["Starcoder2ForCausalLM"], quantization_config=None)
    (found,) = pair_check.findings(options(*given))
    assert (found.about, found.level) == ("arithmetic", WARNING) and "Starcoder2" in found.do


# --- The command


@pytest.mark.parametrize(
    "given",
    [
        ["--target", "t"],
        ["--device", "h100"],
        ["--target", "t", "--draft", "qwen3-8b"],
        ["--target", "dflash-8b", "--draft", "qwen3-8b"],
        ["--target", "qwen3-8b", "--draft", "qwen3-0.6b", "--num-particles", "2000"],
    ],
)
def test_arguments_that_make_no_question(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "findings", lambda: iter(()))
    assert doctor.main(given) == 2
    assert "error:" in capsys.readouterr().err


def test_a_drafter_of_ones_own_is_imported() -> None:
    """Red where doctor passes a class that a server refuses."""
    path = "sglang_smc.proposers.ngram:UniformDraft"
    found = findings_of("h200", "--draft", path)["draft"]
    assert found.level == OK and f"{path}, a DraftProposer of your own, runs no m" in found.found
    pair_check.check(options("--draft", path))
    found = findings_of("h200", "--draft", "json:loads")["draft"]
    assert found.level == FAIL and "DraftProposer" in found.do
