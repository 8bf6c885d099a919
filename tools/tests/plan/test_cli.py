"""``python -m sglang_smc_tools.plan``, end to end: one pair, and drafts side by side."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_plans import EAGLE3_8B

from sglang_smc_tools.plan import cli
from sglang_smc_tools.plan.cli import main
from sglang_smc_tools.plan.devices import Device, named
from sglang_smc_tools.plan.roofline import Scenario, ar_step
from sglang_smc_tools.plan.shapes import draft_from_config

Capture = pytest.CaptureFixture[str]
PAIR = ("--target", "llama-3.1-8b", "--draft", "llama-3.2-1b")
H200 = (*PAIR, "--device", "h200")
DRAFTS = ("llama-3.2-1b", "eagle3-8b", "dflash-8b", "ngram")
ALL = (*PAIR[:2], "--draft", *DRAFTS, "--device", "h200")
ONE = ("--particles", "8", "--steps", "8")
AT_2000 = (*ONE, "--context", "2000", "--tail", "0")


def table_of(text: str) -> list[list[str]]:
    """The table's cells, without the mark of the best."""
    lines = text.replace(" *", "").split("\n\n")[1].splitlines()[2:]
    return [re.split(r"\s{2,}", line) for line in lines]


def as_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_table(capsys: Capture) -> None:
    assert main([*H200, "--particles", "4,8", "--steps", "4,8", "--acceptance", "0.5"]) == 0
    text = capsys.readouterr().out
    found = {first: rest for first, *rest in table_of(text)}
    smc = [f"SMC N={n} K={k}" for k in (4, 8) for n in (4, 8)]
    assert list(found) == ["AR", "SD K=4", "SD K=8", *smc]
    # 15.0 GB of weights and 1,026 tokens of KV at 4.8 TB/s.
    assert found["AR"] == ["1.00", "3.16", "15.1 GB", "15.5 GFLOP", "memory", "317", "1.00"]
    assert (found["SD K=4"][0], found["SMC N=8 K=8"][0]) == ("1.94", "9.00")
    assert "Best: SMC N=4 K=8, at most 1,225 tokens/s, 3.86 times AR." in text
    assert "upper bounds" in text and "does not fit" not in text


def test_a_draft_of_hot_tokens_reads_that_part_of_its_lm_head(capsys: Capture) -> None:
    """In each of K passes, in bf16; a tied table stays, and the rows are a copy."""
    whole, cut = (
        as_json(capsys, *H200, *ONE, *more)["settings"][-1]["bytes"]
        for more in ((), ("--hot-tokens", "32000"))
    )
    assert whole - cut == 8 * (128256 - 32000) * 2 * 2048
    tied = draft_from_config("llama-3.2-1b")
    untied = draft_from_config("llama-3.1-8b")
    assert tied.with_head_of(9).num_parameters - tied.num_parameters == 9 * 2048
    assert untied.num_parameters - untied.with_head_of(9).num_parameters == (128256 - 9) * 4096
    for draft in ("eagle3-8b", "ngram", "llama-3.2-1b"):
        given = (*PAIR[:2], "--draft", draft, "--device", "h200", "--hot-tokens", "200000")
        assert main([*given]) != 0
        assert "--hot-tokens is 200000 with a draft" in capsys.readouterr().err


def test_a_reader_may_leave() -> None:
    """As `head` does: red for a traceback, or an error that is printed as Python ends."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sglang_smc_tools.plan", *H200]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_json_has_what_the_table_has(capsys: Capture) -> None:
    found = as_json(capsys, *H200, *ONE, "--batch", "2")
    ar, sd, smc = found["settings"]
    assert [one["method"] for one in (ar, sd, smc)] == ["AR", "SD", "SMC"]
    assert smc["bytes"] == sum(smc["traffic"].values())
    assert smc["tokens_per_second"] == pytest.approx(2 * 9 / smc["seconds"])
    assert smc["speedup"] == smc["tokens_per_second"] / ar["tokens_per_second"]
    assert found["best"] == {"num_particles": 8, "num_steps": 8} and found["fits"] is True
    cut = as_json(capsys, *H200, *ONE, "--kept", "4")["settings"][-1]
    assert cut["plain_wins_from"] < smc["plain_wins_from"] == 26


@pytest.mark.parametrize(
    ("more", "faster"),
    [
        (("--dtype", "fp8"), True),
        (("--draft-dtype", "fp8"), True),
        (("--draft-dtype", "int8"), True),
        (("--tp", "2"), True),
        (("--no-shared-prefix",), False),
        (("--context", "8192"), False),
        (("--tail", "256"), False),
        (("--kept", "6.5"), False),
    ],
)
def test_options_reach_the_bound(capsys: Capture, more: tuple[str, ...], faster: bool) -> None:
    plain, other = (
        as_json(capsys, *H200, *ONE, *given)["settings"][-1]["tokens_per_second"]
        for given in ((), more)
    )
    assert (other > plain) == faster and other != plain


def test_models_that_do_not_fit_are_said_to(capsys: Capture) -> None:
    """141 GB of bf16 weights and the draft's, on 141 GB; eight of them are enough."""
    large = ["--target", "llama-3.3-70b", *H200[2:]]
    for more, told in (((), True), (("--tp", "8"), False)):
        assert main([*large, *more]) == 0
        text = capsys.readouterr().out
        assert ("does not fit" in text) == ("weights and KV take 14" in text) == told


def test_a_device_is_measured(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(cli, "measure", lambda *of: asked.append(of) or Device("it", 1e12, 1e14))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*PAIR, "--device", "measured"]) == main([*PAIR, "--device", "measured:cuda"]) == 0
    assert "it: 1 TB/s, 100 TFLOP/s" in capsys.readouterr().out
    assert asked == [("cpu", 2.0), ("cuda", 2.0)]


def test_a_row_for_each_device_batch_and_draft(capsys: Capture) -> None:
    crowd = (*ALL, "h100", *AT_2000, "--batch", "1,16", "--tokens-per-pass", "5,7")
    assert main(crowd) == 0
    text = capsys.readouterr().out
    found = table_of(text)
    keys = [(device, batch) for device in ("h200", "h100") for batch in ("1", "16")]
    wanted = [(*key, "N=8 K=8", draft) for key in keys for draft in DRAFTS]
    assert [tuple(row[:4]) for row in found] == wanted
    target = draft_from_config("llama-3.1-8b")
    dflash = draft_from_config("dflash-8b")
    cost = Scenario(target, dflash, named("h200"), 2000).smc(1, 8, 8)
    times = [f"{1e3 * value:.3g}" for value in (*cost.parts, cost.seconds)]
    assert found[2][4:8] == times
    assert found[2][-2:] == [f"{tokens / cost.seconds:,.0f}" for tokens in (5, 7)]
    assert "eagle3-8b (eagle3): 425 M parameters, 749 MB read a pass, 4.1 kB of KV" in text
    rows = as_json(capsys, *crowd)["rows"]
    for row in rows:
        parts = row["draft_seconds"] + row["target_seconds"] + row["rest_seconds"]
        assert row["seconds"] == pytest.approx(parts)
        speed = row["batch"] * 7 / row["seconds"]
        assert row["tokens_per_second"]["7"] == pytest.approx(speed)
    plain = ar_step(target, 1, 2000).seconds(named("h200"))
    assert rows[0]["ar_tokens_per_second"] == pytest.approx(1 / plain)


def test_each_draft_has_the_steps_that_it_can(capsys: Capture) -> None:
    assert main([*ALL, "--min-particles", "16", "--tokens-per-pass", "3"]) == 0
    found = {(row[2], row[3]) for row in table_of(capsys.readouterr().out)}
    steps = {name: {s for s, draft in found if draft == name} for name in DRAFTS}
    assert steps["eagle3-8b"] == {"N=16 K=4", "N=16 K=8", "N=16 K=16"}
    assert steps["dflash-8b"] == {"N=16 K=4", "N=16 K=8"}


def test_a_head_has_a_plan(capsys: Capture, tmp_path: Path) -> None:
    """Name what a round costs by who takes it; drafts of one name go by their paths."""
    folders = [tmp_path / name / "head" for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(EAGLE3_8B))
    both = [*PAIR[:3], *map(str, folders), "--device", "h200", *AT_2000]
    assert main([*both, "--tokens-per-pass", "5"]) == 0
    assert [row[3] for row in table_of(capsys.readouterr().out)] == [str(one) for one in folders]
    found = as_json(capsys, *PAIR[:3], str(folders[0]), "--device", "h200", *ONE)
    smc = found["settings"][-1]
    assert found["draft"]["proposal"] == "eagle3" and smc["layers"] == 41
    assert list(smc["seconds_by_pass"]) == ["draft", "verify", "follow"]
    assert sum(smc["seconds_by_pass"].values()) == pytest.approx(smc["seconds"])
    weights = sum(draft_from_config(name).resident_bytes for name in ("llama-3.1-8b", "eagle3-8b"))
    kv = (1024 + 8 * found["tail"]) * (131_072 + 4_096)
    states = (8 * 9 + 11) * 3 * 4096 * 2
    assert found["memory_bytes"] == pytest.approx(weights + kv + states, abs=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*PAIR, "--device", "h300"), "'h300' is no known device. Known: a100, h100"),
        ((*H200, "--steps", "4,8", "--kept", "3"), "--kept has 1 numbers and --steps has 2"),
        ((*H200, "--steps", "4", "--kept", "5"), "within 0 and the 4 steps"),
        ((*H200, "--min-particles", "99"), "No number of particles"),
        ((*PAIR, "--device", "measured:cpu", "--dtype", "fp8"), "not 1"),
        ((*PAIR[:3], "dflash-8b", *H200[4:], "--draft-dtype", "int8"), "int8 with a draft of kind"),
        ((*H200, "--plot", "/no/such/folder/plan.png"), "there is no folder"),
        (ALL, "--draft has 4 values.*--tokens-per-pass 5,6,7"),
        ((*H200, "h100"), "--device has 2 values"),
        ((*H200, "--batch", "1,2"), "--batch has 2 values"),
        ((*ALL, *ONE, "--tokens-per-pass", "10"), "8 steps yield 1 to 9"),
        ((*ALL, "--tokens-per-pass", "5", "--kept", "1,2,3"), "--kept is of a plan"),
        ((*ALL, "--tokens-per-pass", "5", "--acceptance", "0.5"), "--acceptance is of a plan"),
        ((*ALL, "--tokens-per-pass", "2", "--plot", "a.png"), "--plot is of a plan"),
        ((*ALL, "--steps", "16", "--tokens-per-pass", "5"), "at most 15 steps"),
        ((*H200, "--batch", "0"), "0 is not at least 1"),
        ((*H200, "--tail", "-1"), "-1 is not at least 0"),
        ((*H200, "--particles", "4,x"), "invalid list value"),
        ((*H200, "--acceptance", "1.5"), "1.5 is not between 0 and 1"),
        ((*H200, "--kept", "nan"), "not finite"),
    ],
)
def test_what_makes_no_plan(capsys: Capture, arguments: tuple[str, ...], said: str) -> None:
    try:
        status = main(arguments)
    except SystemExit as stop:  # of argparse
        status = stop.code
    assert status == 2
    assert re.search(said, capsys.readouterr().err)


def test_plot(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AR, SD and two numbers of particles by their colours; without matplotlib what to install."""
    image = pytest.importorskip("matplotlib.image")
    plot = (*H200, "--plot", str(tmp_path / "plan.png"))
    assert main(plot) == 0
    pixels = (image.imread(plot[-1])[..., :3] * 255).round().astype(int).reshape(-1, 3)
    seen = set(map(tuple, pixels.tolist()))
    assert {(0, 0, 0), (0, 0x72, 0xB2), (0xD5, 0x5E, 0), (0, 0x9E, 0x73)} <= seen
    monkeypatch.delitem(sys.modules, "sglang_smc_tools.plan.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(plot) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
