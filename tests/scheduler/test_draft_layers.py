"""A draft whose layers run in four products each gives the texts of SGLang's own layers.

In float32, by the kernel's reference. A seeded text and its evidence depend on every logit of the
draft, in verification too: a draft in 8 bits gives those of a checkpoint of its rounded weights.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from head_laws import EAGLE3
from in_process import Server
from model_families import make_family, make_model
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from tiny_models import make_tiny_model, smc_arguments

from sglang_smc.ops import TORCH
from sglang_smc.round import parts

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
SERVER: dict[str, Any] = {"num_particles": 3, "num_steps": 3}


def make_draft(path: Path, kind: str, target: str, **more: Any) -> str:
    """A draft of sizes that kernels take."""
    if kind == EAGLE3:
        return make_model(path, kind, 2, target)
    return make_family(path, kind, **(WIDE | {"seed": 2} | more))


MODES: tuple[dict[str, Any], ...] = ({"custom_params": {"smc": {"mode": "exact"}}}, {})
ASKED = [
    {
        "input_ids": list(range(5, 20)),
        "sampling_params": {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": i, **mode},
    }
    for i, mode in enumerate(MODES)
]


@pytest.fixture
def skinny(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The products of layers that a server is to fuse, as no GPU is here."""
    found = mock.Mock(side_effect=TORCH.skinny)
    asks = lambda config, *_: None if config.draft_layers == "sglang" else found  # noqa: E731
    monkeypatch.setattr(parts, "skinny_for", asks)
    return found


def answers(server: Server) -> list[tuple[list[int], float | None]]:
    """Texts and their evidence."""
    replies = [server.generate(**one) for one in ASKED]
    return [(list(one.output_ids), one.meta.get("spec_smc_log_evidence")) for one in replies]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert [text for text, _ in found] == [text for text, _ in expected]
    evidence = [[one for _, one in of] for of in (found, expected)]
    assert evidence[0] == pytest.approx(evidence[1], abs=1e-4) and evidence[0][1] is not None


@pytest.mark.parametrize(
    ("kind", "num_layers"),
    [
        ("llama", 2),
        (EAGLE3, 1),
        *(pytest.param(f"qwen{n}", 2, marks=pytest.mark.nightly) for n in (2, 3)),
    ],
)
def test_texts_are_those_of_sglangs_layers(
    start: Callable[..., Server], skinny: mock.Mock, kind: str, num_layers: int, tmp_path: Path
) -> None:
    """Red where a layer's products, norms or residuals differ, or no layer runs so."""
    target = make_tiny_model(tmp_path / "target", hidden=128, layers=4, seed=3)
    arguments = smc_arguments(target, make_draft(tmp_path / "draft", kind, target), **SERVER)
    stock = answers(start(**arguments, overlap=True))
    fused = {"speculative_smc_draft_layers": "fused", "overlap": True}
    assert_same(answers(start(**arguments, **fused)), stock)
    assert skinny.call_count > 100 * num_layers


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(draft: str, *tables: str) -> str:
    """A checkpoint of the weights that rows of 8 bits stand for."""
    path = Path(shutil.copytree(draft, f"{draft}-rounded"))
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if name.split(".")[-2] in (*PROJECTIONS, *tables):
            by = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)  # rows of zeros
            weights[name] = (weight / by).round() * by
    save_file(weights, file, {"format": "pt"})
    return str(path)


@pytest.mark.parametrize(("kind", "table"), [("llama", "embed_tokens"), (EAGLE3, "lm_head")])
def test_a_draft_in_8_bits_is_one_of_rounded_weights(
    start: Callable[..., Server], skinny: mock.Mock, kind: str, table: str, tmp_path: Path
) -> None:
    """Before and after new weights, and in passes over prompts, too; so q is what is drawn from."""
    target = make_tiny_model(tmp_path / "target", hidden=128, layers=4, seed=3)
    tied: dict[str, Any] = {"tie_word_embeddings": True}
    drafts = [make_draft(tmp_path / "draft", kind, target, **tied)]
    small = smc_arguments(target, drafts[0], **SERVER, draft_layers="fused-int8")
    server = start(**small, overlap=True)
    found = [answers(server)]
    if kind != EAGLE3:
        drafts.append(make_draft(tmp_path / "new", kind, target, **tied, seed=5))
        update = {"model_path": target, "manifest": {"draft_model_path": drafts[1]}}
        assert server.ask(UpdateWeightFromDiskReqInput(**update, load_format="auto")).success
        found.append(answers(server))
    read = [(call.args[1].dtype, call.args[2].dtype) for call in skinny.call_args_list]
    assert {(torch.int8, None), (torch.int8, torch.float32)} == set(read)
    for draft, each in zip(drafts, found, strict=True):
        stock = start(**smc_arguments(target, rounded(draft, table), **SERVER), overlap=True)
        assert_same(each, answers(stock))
