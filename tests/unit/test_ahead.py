"""Compiling while weights load: what a launching process starts, and where it starts nothing."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_smc.command import compile
from sglang_smc.kernels.attention.work import Chip
from sglang_smc.ops import compiling
from sglang_smc.options.server import SMCConfig
from sglang_smc.server import ahead

PAIR = Path(__file__).parents[2] / "bench" / "pair"
CONFIG = SMCConfig(mode="exact", num_particles=4, num_steps=3)
L40S = compiling.DEVICES["l40s"]


def arguments(**others: Any) -> Any:
    given = {"model_path": str(PAIR / "target"), "device": "cuda", "tp_size": 1}
    draft = {"speculative_draft_model_path": str(PAIR / "draft"), "trust_remote_code": True}
    return SimpleNamespace(**(given | draft | others))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that are started with a GPU present, and their environments."""
    found: list[Any] = []

    def popen(command: Sequence[str], env: dict[str, str], **_: Any) -> Any:
        found.append((command, env))
        return SimpleNamespace(communicate=lambda: ("warned\nno room\n", None), returncode=1)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(compiling.work, "chip_of", lambda _: L40S.chip)
    monkeypatch.setattr(ahead, "resolved", lambda given: given)
    monkeypatch.setattr(ahead, "config_of", lambda _: CONFIG)
    monkeypatch.setattr(ahead.subprocess, "Popen", popen)
    return found


def test_a_server_compiles_for_its_models_and_its_gpu(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red where the command takes other words, or sees the GPU that weights are loaded to."""
    monkeypatch.setattr(ahead.Thread, "start", ahead.Thread.run)
    with caplog.at_level(logging.WARNING):
        ahead.start(arguments())
    ((words, environment),) = started
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert words[:4] == [sys.executable, "-m", "sglang_smc.command", "compile"]
    options = compile.parser().parse_args(words[4:])
    assert compiling.target_named(options.device) == L40S and options.trust_remote_code
    sizes = compile.sizes_of(options)
    assert [(one.num_particles, one.num_steps) for one in sizes] == [(4, 3), (2, 3), (1, 3)]
    assert {one.columns for of in sizes for one in of.passes} == {(4,), (1, 2)}
    assert "could not compile while weights loaded: no room" in caplog.text


def test_drafts_without_a_model_of_their_own(started: list[Any]) -> None:
    own_layer = arguments(speculative_draft_model_path=arguments().model_path)
    for given, draft in (
        (own_layer, compile.MTP),
        (arguments(speculative_draft_model_path=None), compile.NGRAM),
    ):
        assert compile.parser().parse_args(ahead.words(given)).draft == draft


@pytest.mark.parametrize("lacking", ["GPU", "CUDA", "kernels", "device"])
def test_nothing_is_started_where_no_kernels_run(
    lacking: str, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if lacking == "CUDA":
        monkeypatch.setattr(torch.version, "cuda", None)
    if lacking == "kernels":
        monkeypatch.setattr(ahead, "config_of", lambda _: SMCConfig(kernels="torch"))
    ahead.start(arguments(device="cpu" if lacking == "device" else "cuda"))
    assert started == []


def test_a_command_that_cannot_start_ends_nothing(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def popen(*_: Any, **__: Any) -> None:
        raise OSError("no memory for a process")

    monkeypatch.setattr(ahead.subprocess, "Popen", popen)
    with caplog.at_level(logging.WARNING):
        ahead.start(arguments())
    assert "no memory for a process" in caplog.text


def test_a_gpu_may_be_named_by_its_numbers() -> None:
    named = compiling.target_named("sm_90:132:227")
    assert named == compiling.DEVICES["h200"]
    assert compiling.target_named("sm_86:84:99") == (86, Chip(84, 99 << 10))
