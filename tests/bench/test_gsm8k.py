"""The study of GSM8K: how it grades, and what it compares."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from gsm8k.run import GSM8K, Gsm8k, is_right
from speed_stand_ins import Runner
from study import BenchError

PROBLEM = {"question": "How much?", "answer": "Add 1,000 and 8.\n#### 1,008"}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("So it is \\boxed{1008}.", True),
        ("So it is \\boxed{\\$1,008.00}, not 9.", True),
        ("1008 is one, \\boxed{9} the other", False),
        ("He pays 8 and gets 1008.", True),
        ("He gets 1008 and pays 8.", False),
        ("No number.", False),
    ],
)
def test_the_boxed_number_counts_or_else_the_last(text: str, right: bool) -> None:
    assert is_right(text, PROBLEM) is right


def reply(engine: str, index: int, params: dict[str, Any]) -> dict[str, Any]:
    """The modes are right on even problems, plain decoding on all but the first."""
    smc = params.get("custom_params")
    right = index % 2 == 0 if smc else index
    info = {"completion_tokens": 9, "spec_verify_ct": 4, "finish_reason": {"type": "stop"}}
    if index == 3:  # cut off
        info["finish_reason"] = {"type": "length"}
    return {"text": f"\\boxed{{{1008 if right else 7}}}", "output_ids": [5], "meta_info": info}


def test_modes_are_compared_problem_by_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(PROBLEM) + "\n" for _ in range(8)))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(Gsm8k, "source", GSM8K._replace(sha256=sha256))
    monkeypatch.setattr(Gsm8k, "prompt", lambda *_: [1])
    monkeypatch.setattr("real.run.PUBLISHED", tmp_path / "none")
    monkeypatch.setattr("real.run.checkpoint", lambda name: Path("/models") / name)
    asked = ("--problems", "8", "--prompts", str(path))
    bench = Runner(Gsm8k, tmp_path, monkeypatch, reply, asked)
    assert bench() == 0
    assert bench.started == ["coder-1.5b", "coder-1.5b+coder-0.5b"]
    rows = bench.rows()
    assert rows["plain decoding"].accuracy.mean == pytest.approx(6 / 8)
    assert rows["exact"].accuracy.mean == pytest.approx(4 / 8)
    assert rows["exact"].difference.mean == pytest.approx(-2 / 8)
    assert rows["plain decoding"].difference is None
    path.write_text("{}")
    with pytest.raises(BenchError, match="Get grade_school_math"):
        GSM8K.rows(path)
