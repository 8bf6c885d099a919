"""A draft whose layers run in four products each gives the texts of SGLang's own layers.

In float32, by the kernel's reference. A seeded text and its evidence depend on every logit of the
draft.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from head_laws import EAGLE3
from in_process import Server
from model_families import make_family, make_model
from tiny_models import make_tiny_model, smc_arguments

from sglang_smc.ops import TORCH
from sglang_smc.proposers import assembly
from sglang_smc.round import parts

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
SERVER: dict[str, Any] = {"num_particles": 3, "num_steps": 3}


def make_draft(path: Path, kind: str, target: str) -> str:
    """A draft of sizes that kernels take."""
    if kind == EAGLE3:
        return make_model(path, kind, 2, target)
    return make_family(path, kind, seed=2, **WIDE)


@pytest.mark.parametrize(
    ("kind", "num_layers"),
    [
        ("llama", 2),
        (EAGLE3, 1),
        *(pytest.param(f"qwen{n}", 2, marks=pytest.mark.nightly) for n in (2, 3)),
    ],
)
def test_texts_are_those_of_sglangs_layers(
    start: Callable[..., Server], kind: str, num_layers: int, tmp_path: Path
) -> None:
    """Red where a layer's products, norms or residuals differ, or no layer runs so."""
    target = make_tiny_model(tmp_path / "target", hidden=128, layers=4, seed=3)
    arguments = smc_arguments(target, make_draft(tmp_path / "draft", kind, target), **SERVER)
    own = {"max_new_tokens": 24, "ignore_eos": True}
    modes = {"custom_params": {"smc": {"mode": "exact"}}}, {}
    requests = [
        {"input_ids": list(range(5, 20)), "sampling_params": {**own, "sampling_seed": i, **mode}}
        for i, mode in enumerate(modes)
    ]
    stock = [start(**arguments, overlap=True).generate(**one) for one in requests]
    skinny, fused = mock.Mock(side_effect=TORCH.skinny), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "skinny_for", lambda *_: skinny)
        fuse = assembly.fuse_layers
        patch.setattr(assembly, "fuse_layers", lambda *of: fused.append(fuse(*of)) or fused[-1])
        server = start(**arguments, overlap=True, random_seed=1)  # not the one before
        found = [server.generate(**one) for one in requests]
    assert fused == [num_layers] and skinny.call_count > 100 * num_layers
    assert [reply.output_ids for reply in found] == [reply.output_ids for reply in stock]
    evidence = [[reply.meta.get("spec_smc_log_evidence") for reply in of] for of in (found, stock)]
    assert evidence[0] == pytest.approx(evidence[1], abs=1e-4) and evidence[0][1] is not None
