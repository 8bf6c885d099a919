"""The study of real text: its prompts, its grid, and what it keeps."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from answers import MAX_PROBLEMS
from real import prompts as sources
from real import run as frame
from real.prompts import KINDS, LONGEST, NAMES, kind_of, others, prompts
from real.run import STANDALONE, Real, cells, settings
from speed_stand_ins import Runner, canned_scores
from study import BenchError

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

BOTH = ("--problems", "14", "--only", "coder-*-t0.7")
SERVER = SMCConfig(num_particles=frame.NUM_PARTICLES, num_steps=frame.MOST_STEPS)


class Words:
    """A tokenizer: a token a word."""

    def apply_chat_template(self, chat: Any, **how: Any) -> str:
        return chat[0]["content"]

    def __call__(self, text: str, **how: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


@pytest.fixture
def spec_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three questions of each category, of which the first of summaries is too long."""
    rows = [
        {"category": category, "turns": [f"{category} " * (1 + number), "more"]}
        for categories in KINDS.values()
        for category in categories
        for number in range(3)
    ]
    for row in rows:
        if row["turns"][0] == "summarization ":
            row["turns"][0] *= LONGEST + 1
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(sources, "SPEC_BENCH", sources.SPEC_BENCH._replace(sha256=sha256))
    return path


def test_kinds_take_turns_and_long_prompts_are_left_out(spec_bench: Path) -> None:
    words = prompts(spec_bench, Words(), 14)
    assert [kind_of(index) for index in range(7)] == list(NAMES)
    chat, maths, summaries = (words[NAMES.index(kind)] for kind in ("chat", "maths", "summaries"))
    assert [chat, maths] == [[len("writing")], [len("math_reasoning")]]
    assert words[7 + NAMES.index("maths")] == [len("math")]
    assert summaries == [len("summarization")] * 2
    left = others(spec_bench, Words(), 14)
    assert len(left) == 3 * sum(map(len, KINDS.values())) - 14 - 1  # nor the long one
    assert {"writing ", "roleplay "}.isdisjoint(left) and "reasoning " in left
    with pytest.raises(BenchError, match="no 280 prompts"):
        prompts(spec_bench, Words(), 280)
    spec_bench.write_text("{}")
    with pytest.raises(BenchError, match="Get data/spec_bench"):
        prompts(spec_bench, Words(), 14)


def test_the_server_takes_every_setting_within_the_rows_that_are_named() -> None:
    every = cells()
    assert len({cell.slug for cell in every}) == len(every)
    for cell in every:
        if cell.smc:
            config = request_config(SERVER, {"smc": cell.smc})
            assert cell.rows == config.num_particles * (config.num_steps + 1) <= 72
        elif cell.label in STANDALONE:
            engine = settings(cell.engine)
            assert cell.rows == engine["speculative_num_draft_tokens"] <= 72
            assert cell.draft_passes == engine["speculative_num_steps"]


def reply(engine: str, index: int, params: dict[str, Any]) -> dict[str, Any]:
    """Two tokens a pass of maths and one of others; twice as many of eight particles."""
    info: dict[str, Any] = {"completion_tokens": 49, "finish_reason": {"type": "length"}}
    smc = params.get("custom_params", {}).get("smc", {})
    fast = 1 + (kind_of(index) == "maths")
    info["spec_verify_ct"] = 48 // fast // (1 + (smc.get("num_particles") == 8))
    if smc.get("mode") == "auto":
        info |= {"spec_smc_tilt": 0.1, "spec_smc_tilt_information": 4.0}
    return {"text": "", "output_ids": [5] * 49, "meta_info": info}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(frame, "_prompts", lambda *_: [[1]] * MAX_PROBLEMS)
    monkeypatch.setattr(frame, "checkpoint", lambda name: Path("/models") / name)
    made = Runner(Real, tmp_path, monkeypatch, reply, BOTH)
    monkeypatch.setattr(frame, "PUBLISHED", tmp_path / "published")
    return made


def test_a_study_goes_on_from_what_is_published(
    bench: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench("--publish") == 0
    assert "coder-1.5b+coder-0.5b" in bench.started and "coder-1.5b" in bench.started
    rows = bench.rows()
    tree = rows["SGLang tree 8 / 8 / 72"]
    ours = rows["exact N=8 K=8"]
    assert tree.tokens_per_pass.mean == pytest.approx(14 * 48 / (12 * 48 + 2 * 24), rel=1e-5)
    assert (tree.maths, tree.chat, ours.maths) == (2, 1, 4)
    # Pass by pass on the same prompts twice as many, so that nothing is uncertain.
    assert ours.to_best_tree == pytest.approx((2, 2, 2, 14), abs=1e-5)
    assert rows["auto N=8 K=8"].server_tilt.mean == pytest.approx(0.1)
    assert ours.server_tilt is None
    page = (tmp_path / "published" / "real" / "real.md").read_text()
    assert "coder-1.5b (Q4_K_M, SHA-256 cc324af070c2)" in page
    assert "**coder, temperature 0.7**" in page
    assert re.search(r"^\| SGLang tree 8 / 8 / 72 \| 1\.08 \|$", page, re.M)
    asked = len(bench.asked)
    monkeypatch.setattr(frame, "load", lambda *folders: folders)
    monkeypatch.setattr(frame, "score", canned_scores)
    assert bench("--score") == 0 and bench.asked == []
    scored = bench.rows()
    assert scored["exact N=8 K=8"].tilt.mean == pytest.approx(-0.2)
    assert scored["SGLang n-grams"].tilt is None
    # Another folder, such as another machine's, begins with what is published.
    assert bench("--output-dir", str(tmp_path / "other"), "--problems", "21") == 0
    assert len(bench.asked) == asked // 2
