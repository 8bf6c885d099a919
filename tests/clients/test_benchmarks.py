"""SGLang's own benchmark and evaluation clients, without a download."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from http_server import Server
from pair.task import held_out
from programs import OFFLINE, printed

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]


def client(module: str, *arguments: object) -> str:
    return printed(sys.executable, "-m", module, *arguments, env=OFFLINE)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat"])
def test_serving(server: Server, tmp_path: Path, backend: str) -> None:
    report = tmp_path / "serving.jsonl"
    sizes = ["--random-input-len", 32, "--random-output-len", 24, "--random-range-ratio", 1]
    client(
        "sglang.benchmark.serving",
        *("--backend", backend, "--base-url", server.url, "--dataset-name", "random-ids"),
        *(*sizes, "--num-prompts", 8, "--output-file", report),
    )
    (found,) = lines(report)
    assert found["completed"] == 8
    assert found["total_output_tokens"] == 8 * 24
    assert found["accept_length"] > 1


def test_one_batch_server(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "batches.jsonl"
    prompt = tmp_path / "prompt.txt"
    # SGLang's own --apply-chat-template sends the keys of transformers' answer as token ids.
    prompt.write_text(f"<|user|>{held_out(1).question}<|assistant|>")
    client(
        "sglang.benchmark.one_batch_server",
        *("--model", "None", "--base-url", server.url, "--skip-warmup"),
        *("--fixed-prompt-file", prompt, "--batch-size", 1, 4, "--output-len", 24),
        *("--result-filename", report),
    )
    found = lines(report)
    assert [case["batch_size"] for case in found] == [1, 4]
    assert all(case["output_throughput"] > 0 and case["acc_length"] > 1.5 for case in found)


def test_run_eval(server: Server, tmp_path: Path) -> None:
    """GSM8K's own scorer; the problems are given as a file, and the target solves these."""
    problems = tmp_path / "problems.jsonl"
    items = [held_out(index) for index in (2, 28, 36, 45, 66, 89, 95, 100, 108, 135)]
    problems.write_text(
        "".join(json.dumps({"question": i.question, "answer": i.answer}) + "\n" for i in items)
    )
    told = client(
        "sglang.test.run_eval",
        *("--base-url", server.url, "--eval-name", "gsm8k", "--api", "chat", "--num-shots", 0),
        *("--gsm8k-data-path", problems, "--num-examples", 10, "--num-threads", 8),
        *("--max-tokens", 160, "--temperature", 0),
    )
    score = re.search(r"^Score: ([\d.]+)", told, re.M)
    assert score is not None
    assert float(score[1]) >= 0.9  # one tie may fall another way
    assert "Speculative accept length (per-request, from meta_info): n=10" in told
