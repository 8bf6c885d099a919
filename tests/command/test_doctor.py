"""``sglang-smc doctor``: what it finds, and that each fault is found. No model is loaded."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_smc.command import doctor, findings, machine, pair
from sglang_smc.command.findings import FAIL, OK, WARNING, Finding
from sglang_smc.memory.arena import arena
from sglang_smc.options.server import SMCConfig
from sglang_smc.plan import proposals
from sglang_smc.plan.devices import Device, named
from sglang_smc.plan.memory import hidden_bytes
from sglang_smc.plan.shapes import BUILT_IN

PAIR = Path(__file__).parents[2] / "bench" / "pair"


def options(*given: str) -> argparse.Namespace:
    found = doctor.parser().parse_args(["--target", "t", "--draft", "d", *given])
    found.mem_fraction = found.mem_fraction or 0.88
    return found


def of_built_in(device: Device, *given: str) -> dict[str, Finding]:
    asked = options(*given)
    asked.target, asked.draft = "llama-3.1-8b", "llama-3.2-1b"
    return {one.about: one for one in pair.findings(asked, device, None)}


def test_this_environment_and_the_shipped_pair_are_sound(tmp_path: Path) -> None:
    """As a user runs it: in a process of its own, which has the hooks put in force."""
    command = [sys.executable, "-m", "sglang_smc.command", "doctor", "--json"]
    command += ["--target", str(PAIR / "target"), "--draft", str(PAIR / "draft")]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    listed = json.loads(found.stdout)
    by_name = {one["about"]: one for one in listed}
    assert not [one for one in listed if one["level"] == FAIL]
    assert by_name["hooks"]["numbers"]["count"] > 20
    assert by_name["vocabulary"]["numbers"] == {"tokens": 512}
    assert by_name["server arguments"]["level"] == OK
    assert by_name["mode smc"]["numbers"]["arena"] == 105
    assert all(one["do"] for one in listed if one["level"] == WARNING)


# --- The machine


def test_without_sglang_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_version", lambda name: None if name == "sglang" else "1")
    *_, last = machine.findings()
    assert (last.level, last.about) == (FAIL, "packages")
    assert "sglang not installed" in last.found and "pip install" in last.do


def test_another_release_fails_with_the_words_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_smc.server import compat

    monkeypatch.delenv(compat.SKIP_VERSION_ENV, raising=False)
    monkeypatch.setattr(compat, "release", lambda: "0.5.19")
    assert machine._release() == findings.fail(
        "sglang", machine._version("sglang") or "", compat.problem() or ""
    )


def point(value: str) -> Any:
    return SimpleNamespace(name="smc", value=value)


@pytest.mark.parametrize(
    ("points", "listed", "level", "says"),
    [
        ([], "", FAIL, "no smc"),
        (["a:b"], "other,more", FAIL, "keeps smc out"),
        (["a:b", "c:d"], "", WARNING, "again c:d"),
        (["a:b"], "other, smc", OK, "smc = a:b"),
    ],
)
def test_entry_points(
    points: list[str], listed: str, level: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "entry_points", lambda group: [point(value) for value in points])
    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    found = machine._entry_point(*machine.ENTRY_POINTS[0])
    assert found.level == level and says in found.found


def test_a_hook_that_does_not_land_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_smc.server import hooks

    def refuse(group: Any) -> None:
        raise RuntimeError("it did not land: x.y")

    for name in ("put_in_force", "require_landed"):
        monkeypatch.setattr(hooks, name, refuse)
    found = machine._hooks()
    assert found.level == FAIL and "x.y" in found.found and found.do


def test_a_cpu_that_does_not_multiply_bfloat16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_smc import dtype

    monkeypatch.setattr(dtype, "default_dtype", lambda: "float32")
    assert machine._cpu().level == WARNING
    monkeypatch.setattr(dtype, "default_dtype", lambda: "bfloat16")
    assert machine._cpu().level == OK


# --- A pair


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(PAIR / "draft", tmp_path / "draft"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_same_vocabulary(draft: Path) -> None:
    assert pair._vocabularies(str(PAIR / "target"), str(draft)).level == OK


def test_another_size_of_vocabulary(draft: Path) -> None:
    edit(draft / "config.json", vocab_size=511)
    found = pair._vocabularies(str(PAIR / "target"), str(draft))
    assert found.level == FAIL and "512 in the target and 511 in the draft" in found.found


def test_padding_is_no_other_size_of_vocabulary(draft: Path) -> None:
    edit(draft / "config.json", vocab_size=576)
    assert pair._vocabularies(str(PAIR / "target"), str(draft)).level == OK


def test_two_tokens_that_changed_places(draft: Path) -> None:
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = pair._vocabularies(str(PAIR / "target"), str(draft))
    assert found.level == FAIL and "2 tokens differ: 'a'" in found.found


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        found = pair._vocabularies(str(PAIR / "target"), str(folder))
        assert found.level == FAIL and "cannot be read" in found.found


@pytest.fixture
def _kept_environment() -> Iterator[None]:
    """Resolving server arguments exports some of them as environment variables."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("_kept_environment")
def test_a_family_that_is_not_supported_is_refused(draft: Path) -> None:
    asked = options()
    asked.target, asked.draft = str(PAIR / "target"), str(PAIR / "draft")
    assert pair._accepted(asked).level == OK
    edit(draft / "config.json", architectures=["LlamaForSequenceClassification"])
    asked.draft = str(draft)
    found = pair._accepted(asked)
    assert found.level == FAIL and "has no next-token head" in found.do


@pytest.mark.parametrize("device", ["l4", "h100"])
def test_memory_is_that_of_weights_and_arenas(device: str) -> None:
    """By hand: 16 bits a number, 128 KiB and 32 KiB of KV a token."""
    target, draft = BUILT_IN["llama-3.1-8b"], BUILT_IN["llama-3.2-1b"]
    weights = 2 * (target.num_parameters + draft.num_parameters)
    room = 0.88 * (named(device).capacity or 0) - 1.5e9 - weights
    slots = int(room / ((128 + 32) * 1024))
    found = of_built_in(named(device))
    assert found["memory"].numbers is not None
    assert found["memory"].numbers["slots"] == slots
    for mode in ("smc", "exact"):
        own = arena(SMCConfig(mode=mode), 4096)
        about = next(about for about in found if about.startswith(f"mode {mode}"))
        fitting = slots // (4096 + own)
        assert found[about].numbers == {"arena": own, "requests": fitting}
        assert found[about].level == (OK if fitting >= 8 else WARNING if fitting else FAIL)


def test_a_shorter_lag_is_advised_where_it_makes_room() -> None:
    """Of 24 GB little is left beside 8B + 1B; a lag of 16 makes room for twelve requests."""
    asked = "--context", "512", "--requests", "8"
    found = of_built_in(named("l4"), *asked, "--max-lag", "256")
    assert found["mode smc"].level == WARNING
    advised = (found["advice"].numbers or {})["max_lag"]
    assert advised < 256 and f"--speculative-smc-max-lag {advised}" in found["mode smc"].do
    again = of_built_in(named("l4"), *asked, "--max-lag", str(advised))
    assert again["mode smc"].level == OK


def test_mode_auto_is_advised_where_no_lag_makes_room() -> None:
    found = of_built_in(named("l4"), "--context", "512", "--requests", "11")
    assert "auto" in found["mode smc"].do and "mode auto" in found["advice"].found


def test_round_graphs_are_those_that_memory_holds() -> None:
    """By hand, for 7.6 GB less prefill: a fourth of a share for rounds call by call."""
    asked = options("--device", "l40s", "--target", "llama-3.1-8b", "--draft", "llama-3.2-1b")
    asked.mem_fraction = None
    (found,) = [one for one in doctor.pair_findings(asked) if one.about == "round graphs"]
    share, each = 0.8 * 0.81 * (7_270 << 20), 128_256 * 864
    launched = int(share / 4 / each)
    pool = share - launched * each
    most = [min(int(pool / 128_256 / rows), 48) for rows in (464, 720, 864)]
    assert found.numbers == {"recorded": most, "launched": launched}
    assert found.level == OK and most[0] == 48 and most[2] < 48
    tight = of_built_in(named("l4"), "--mem-fraction", "0.95")["round graphs"]
    assert tight.level == WARNING and "--mem-fraction" in tight.do


def test_models_that_do_not_fit_fail() -> None:
    asked = options()
    asked.target, asked.draft = "llama-3.1-70b", "llama-3.2-1b"
    found = {one.about: one for one in pair.findings(asked, named("h100"), None)}
    assert found["memory"].level == FAIL and not any(about.startswith("mode") for about in found)
    asked.tp = 4
    assert {one.level for one in pair.findings(asked, named("h100"), None)} == {OK}


def test_speed_is_that_of_the_plan() -> None:
    found = of_built_in(named("h100"))["speed"]
    assert found.level == OK and found.numbers is not None
    assert 1 < found.numbers["times_ar"] < 9
    slow = Device("slow", 1e12, 1e11, 80e9)  # bound by compute from the first token
    found_there = of_built_in(slow)
    assert found_there["speed"].level == found_there["advice"].level == WARNING


def test_known_models_of_other_families_have_other_vocabularies() -> None:
    asked = options()
    asked.target, asked.draft = "llama-3.1-8b", "qwen3-0.6b"
    found = {one.about: one for one in pair.findings(asked, named("h100"), None)}
    assert found["vocabulary"].level == FAIL and "128256 and 151936" in found["vocabulary"].found


@pytest.mark.parametrize("draft", ["eagle3-8b", "dflash-8b", "ngram", "ngram+llama-3.2-1b"])
def test_drafts_beside_models_have_their_arithmetic(draft: str) -> None:
    asked = options()
    asked.target, asked.draft = "llama-3.1-8b", draft
    found = {one.about: one for one in pair.findings(asked, named("h100"), None)}
    assert {one.level for one in found.values()} == {OK}
    head = proposals.from_config(draft)
    states = 8 * hidden_bytes(head, asked.num_particles, asked.num_steps)  # of --requests
    weights = BUILT_IN["llama-3.1-8b"].resident_bytes + head.resident_bytes
    room = 0.88 * 80e9 - 1.5e9 - states - weights
    slots = int(room / (131_072 + head.kv_bytes_per_token))
    assert (found["memory"].numbers or {})["slots"] == slots
    times = (found["speed"].numbers or {})["times_ar"]
    with_model = (of_built_in(named("h100"))["speed"].numbers or {})["times_ar"]
    assert (times == with_model) == draft.endswith("1b") and times >= with_model


@pytest.mark.parametrize(
    ("target", "draft", "given", "about", "do"),
    [
        ("llama-3.1-70b", "eagle3-8b", (), "draft", "4096 and the target's 8192"),
        ("llama-3.1-8b", "dflash-8b", ("--num-steps", "16"), "draft", "at most 15 steps"),
        ("llama-3.1-8b", "ngram+qwen3-0.6b", (), "vocabulary", "target's family"),
    ],
)
def test_drafts_that_do_not_go_with_the_target(
    target: str, draft: str, given: tuple[str, ...], about: str, do: str
) -> None:
    asked = options(*given)
    asked.target, asked.draft = target, draft
    (found,) = pair.findings(asked, named("h100"), None)
    assert (found.level, found.about) == (FAIL, about) and do in found.do


def test_a_head_is_not_asked_for_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the target's tokens; a folder that is no head is asked."""
    config = json.loads((PAIR / "target" / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(pair, "_accepted", lambda asked: findings.ok("server arguments", "yes"))
    asked = options()
    for draft, expected in ((tmp_path, False), (PAIR / "draft", True)):
        asked.target, asked.draft = str(PAIR / "target"), str(draft)
        found = {one.about for one in pair.findings(asked, named("h100"), None)}
        assert "memory" in found and ("vocabulary" in found) == expected


def test_models_of_8_bits_are_computed_as_the_device_does(draft: Path) -> None:
    asked = options("--device", "h100")
    asked.target, asked.draft = str(draft), "llama-3.2-1b"
    assert doctor._device(asked) == (named("h100"), False)
    edit(draft / "config.json", quantization_config={"quant_method": "fp8"})
    assert doctor._device(asked) == (named("h100", 1.0), False)


def test_a_model_whose_shape_is_unknown_has_no_arithmetic(draft: Path) -> None:
    edit(draft / "config.json", architectures=["MixtralForCausalLM"])
    asked = options()
    asked.target, asked.draft = str(draft), "llama-3.2-1b"
    found = [one for one in pair.findings(asked, named("h100"), None) if one.about == "arithmetic"]
    assert [one.level for one in found] == [WARNING] and "Mixtral" in found[0].do


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


@pytest.mark.parametrize(("level", "status"), [(OK, 0), (WARNING, 0), (FAIL, 1)])
def test_it_fails_where_something_does(
    level: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = Finding(level, "it", "found", "mend it" if level != OK else "")
    monkeypatch.setattr(machine, "findings", lambda: iter([one]))
    assert doctor.main([]) == status
    assert capsys.readouterr().out.startswith(level)
    assert doctor.main(["--json"]) == status
    assert json.loads(capsys.readouterr().out) == [findings.as_dict(one)]


def test_a_pair_is_not_looked_at_on_an_installation_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "findings", lambda: iter([findings.fail("it", "gone", "mend")]))
    assert [one.about for one in doctor.examine(options())] == ["it", "pair"]
