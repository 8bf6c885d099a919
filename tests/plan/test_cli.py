"""``python -m sglang_smc.plan``, end to end."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_smc.plan import cli
from sglang_smc.plan.cli import main
from sglang_smc.plan.devices import Device

PAIR = ("--target", "llama-3.1-8b", "--draft", "llama-3.2-1b")
H200 = (*PAIR, "--device", "h200")


def rows(text: str) -> dict[str, list[str]]:
    """The table's cells by setting, without the mark of the best."""
    lines = text.split("\n\n")[1].splitlines()[2:]
    cells = [re.split(r"\s{2,}", line) for line in lines]
    return {first.removesuffix(" *"): rest for first, *rest in cells}


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*H200, "--particles", "4,8", "--steps", "4,8", "--acceptance", "0.5"]) == 0
    text = capsys.readouterr().out
    found = rows(text)
    smc = [f"SMC N={n} K={k}" for k in (4, 8) for n in (4, 8)]
    assert list(found) == ["AR", "SD K=4", "SD K=8", *smc]
    # 15.0 GB of weights and 1,026 tokens of KV at 4.8 TB/s.
    assert found["AR"] == ["1.00", "3.16", "15.1 GB", "15.5 GFLOP", "memory", "317", "1.00"]
    assert found["SD K=4"][0] == "1.94"
    assert found["SMC N=8 K=8"][0] == "9.00"
    assert "8.03 G parameters, 15 GB read a pass, 131 kB of KV a token" in text
    assert "Best: SMC N=4 K=8, at most 1,225 tokens/s, 3.86 times AR." in text
    assert "up to about 206 token rows" in text
    assert "upper bounds" in text and "change the quality" in text
    assert "does not fit" not in text


def test_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *H200, "--particles", "8", "--steps", "8", "--batch", "2")
    by_method = {setting["method"]: setting for setting in found["settings"]}
    assert list(by_method) == ["AR", "SD", "SMC"]
    smc = by_method["SMC"]
    assert smc["bytes"] == sum(smc["traffic"].values())
    assert smc["tokens_per_second"] == pytest.approx(2 * 9 / smc["seconds"])
    assert smc["speedup"] == smc["tokens_per_second"] / by_method["AR"]["tokens_per_second"]
    assert found["best"] == {"num_particles": 8, "num_steps": 8}
    assert smc["plain_wins_from"] == 26
    assert found["fits"] is True


@pytest.mark.parametrize(
    ("more", "faster"),
    [
        (("--dtype", "fp8"), True),
        (("--tp", "2"), True),
        (("--no-shared-prefix",), False),
        (("--context", "8192"), False),
        (("--tail", "256"), False),
        (("--kept", "6.5"), False),
    ],
)
def test_every_option_reaches_the_bound(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], faster: bool
) -> None:
    def speed(*arguments: str) -> float:
        found = as_json(capsys, *H200, "--particles", "8", "--steps", "8", *arguments)
        return found["settings"][-1]["tokens_per_second"]

    assert (speed(*more) > speed()) == faster
    assert speed(*more) != speed()


def test_kept_goes_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*H200, "--steps", "4,8", "--kept", "3.9,6.9", "--min-particles", "8"]) == 0
    found = rows(capsys.readouterr().out)
    assert "SMC N=4 K=4" not in found
    assert found["SMC N=8 K=4"][0] == "4.90"
    assert found["SMC N=8 K=8"][0] == "7.90"


def test_plain_decoding_wins_earlier_where_less_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--particles", "8", "--steps", "8")
    whole = as_json(capsys, *H200, *one)["settings"][-1]
    cut = as_json(capsys, *H200, *one, "--kept", "4")["settings"][-1]
    assert cut["plain_wins_from"] < whole["plain_wins_from"]


def test_models_that_do_not_fit_are_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    """141 GB of bf16 weights and the draft's, on 141 GB; eight of them are enough."""
    large = ("--target", "llama-3.3-70b", "--draft", "llama-3.2-1b", "--device", "h200")
    assert main([*large]) == 0
    assert "weights and KV take 14" in capsys.readouterr().out
    assert main([*large, "--tp", "8"]) == 0
    assert "does not fit" not in capsys.readouterr().out


def test_a_device_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(device: str, weight_bytes: float) -> Device:
        asked.append((device, weight_bytes))
        return Device("stopwatch", 1e12, 1e14)

    monkeypatch.setattr(cli, "measure", measure)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*PAIR, "--device", "measured"]) == 0
    assert "stopwatch: 1 TB/s, 100 TFLOP/s" in capsys.readouterr().out
    assert main([*PAIR, "--device", "measured:cuda"]) == 0
    assert asked == [("cpu", 2.0), ("cuda", 2.0)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*PAIR, "--device", "h300"), "'h300' is no known device. Known: a100, h100"),
        (("--target", "gpt-5", *H200[2:]), "'gpt-5' is neither a config.json"),
        ((*H200, "--steps", "4,8", "--kept", "3"), "--kept has 1 numbers and --steps has 2"),
        ((*H200, "--steps", "4", "--kept", "5"), "within 0 and the 4 steps"),
        ((*H200, "--min-particles", "99"), "No number of particles"),
        ((*PAIR, "--device", "measured:cpu", "--dtype", "fp8"), "not 1"),
        ((*H200, "--plot", "/no/such/folder/plan.png"), "there is no folder"),
    ],
)
def test_arguments_that_make_no_plan(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--batch", "0"), "0 is below 1"),
        (("--tail", "-1"), "-1 is below 0"),
        (("--particles", "4,x"), "invalid positives value"),
        (("--acceptance", "1.5"), "1.5 is not within 0 and 1"),
        (("--kept", "nan"), "not finite"),
        (("--dtype", "int3"), "invalid choice"),
    ],
)
def test_values_out_of_range(
    capsys: pytest.CaptureFixture[str], option: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*H200, *option])
    assert said in capsys.readouterr().err


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    assert main([*H200, "--plot", str(tmp_path / "plan.png")]) == 0
    assert capsys.readouterr().out.startswith("target")
    pixels = (image.imread(tmp_path / "plan.png")[..., :3] * 255).round().astype(int)
    seen = {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}
    for colour in ((0, 0, 0), (0, 0x72, 0xB2), (0xD5, 0x5E, 0), (0, 0x9E, 0x73)):
        assert colour in seen, colour  # AR, SD and two numbers of particles


def test_plot_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "sglang_smc.plan.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*H200, "--plot", str(tmp_path / "plan.png")]) == 2
    assert "pip install 'sglang-smc[plot]'" in capsys.readouterr().err


def test_as_a_command_it_imports_nothing_heavy() -> None:
    probe = (
        "import runpy, sys\n"
        "try: runpy.run_module('sglang_smc.plan', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'sglang', 'matplotlib', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", probe, *H200]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Best: SMC" in found.stdout
