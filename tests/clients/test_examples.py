"""The programs in examples/, as a user starts them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from http_server import Server
from pair.task import check, held_out
from programs import OFFLINE, printed

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SOLVED = held_out(1)  # at temperature 0, by the target


def run(script: str, *arguments: str) -> str:
    return printed(sys.executable, EXAMPLES / script, *arguments, env=OFFLINE)


def test_chat_streams_answers_to_questions_one_after_another(server: Server) -> None:
    asked = ["--url", f"{server.url}/v1", "--mode", "exact", "--temperature", "0"]
    lines = run("chat.py", *asked, SOLVED.question, "And now?").splitlines()
    last = next(i for i, line in enumerate(lines) if "####" in line)
    assert check("\n".join(lines[: last + 1]), SOLVED)
    assert len(lines) > last + 1


def test_a_power_is_drawn_and_voted_on(server: Server) -> None:
    """The vote sums the weights of particles with one number, and its text is one of these."""
    asked = ["--url", f"{server.url}/v1", "--power", "2", "--resampling-method", "chopthin"]
    lines = run("power.py", *asked, "--vote", SOLVED.question).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("vote: "))
    listed = [line.split() for line in lines[:at]]
    winner, share = re.fullmatch(r"vote: (\S+) \((\d+)% of the weight\)", lines[at]).groups()
    by_hand = sum(float(weight) for weight, number in listed if number == winner)
    assert len(listed) > 1 and sum(float(weight) for weight, _ in listed) == pytest.approx(
        1, abs=0.01
    )
    assert by_hand == pytest.approx(int(share) / 100, abs=0.01)
    assert lines[-1] == f"#### {winner}" == f"#### {SOLVED.number}"


def test_its_hub_asks_once_for_all_particles(server: Server) -> None:
    pytest.importorskip("its_hub")
    asked = ["--url", f"{server.url}/v1", "--budget", "4", SOLVED.question]
    *listed, text = run("its_hub_power.py", *asked).split("\n", 4)
    assert [float(line.split()[0]) >= 0 for line in listed] == [True] * 4
    assert check(text, SOLVED)


def test_the_library_answers_by_two_models_in_transformers() -> None:
    text = run("library.py")
    assert "####" in text and text.rstrip().endswith("tokens a pass of the target")


def test_the_page_of_the_library_runs_block_by_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "library.md").read_text()
    cells: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(code, cells)
    told = capsys.readouterr().out
    assert told.count("#### 47") == 2, "the first text and the lossless one solve it"
    assert cells["rounds"].run(cells["chat"], seed=1).num_rounds > 2


@pytest.mark.nightly  # a minute, most of it imports
def test_offline_answers_in_each_mode_and_tells_how() -> None:
    streamed, *modes = run("offline.py", SOLVED.question).split("\n--- ")
    assert streamed.strip()
    assert [part.split("\n", 1)[0] for part in modes] == ["smc", "auto", "exact"]
    for part in modes:
        name, text = part.split("\n", 1)
        assert f"'spec_smc_mode': '{name}'" in text
        assert "'spec_smc_rounds_ct': " in text and "'spec_smc_rounds_ct': 0" not in text


@pytest.mark.nightly  # two engines of its own
def test_grpo_samples_from_the_weights_that_it_has_sent(tmp_path: Path) -> None:
    """Importance ratios of old weights would differ from 1, at this learning rate."""
    sizes = ("--steps", "3", "--problems", "2", "--samples", "4", "--learning-rate", "1e-3")
    run("grpo.py", "--out", str(tmp_path / "grpo"), "--methods", "AR", "exact", *sizes)
    of_methods = json.loads((tmp_path / "grpo.json").read_text())["steps"]
    ratios = [step["ratio"] for steps in of_methods.values() for step in steps]
    assert ratios == pytest.approx([1.0] * 6, abs=1e-4)
    assert (tmp_path / "grpo.png").exists()


@pytest.mark.nightly  # an engine of its own, and a kernel
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder beside the repository's: its answers are steered, shown and drawn."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(EXAMPLES / "steering.ipynb", as_version=4)
    for cell in notebook.cells:  # the page goes elsewhere than into examples/
        cell.source = cell.source.replace('Path("steering.html")', f"Path({str(tmp_path)!r}, 'p')")
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}}
    )
    client.execute()
    outputs = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
    texts = {name: "".join(one.get("text", "") for one in of) for name, of in outputs.items()}
    assert texts["asked"].count("####") == 2 and texts["voted"].startswith("[('")
    assert texts["power"].startswith("[('"), "the vote of a power's particles"
    assert "Particles(8" in outputs["shown"][0]["data"]["text/plain"]
    assert "image/png" in outputs["plotted"][0]["data"]
    assert "<canvas" in (tmp_path / "p").read_text()
