"""SGLang's own classes load what is written here, and compute the same from it."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from programs import printed

from sglang_smc.tools.distill.checkpoints import new_head
from sglang_smc.upstream import IS_NEWER

SCRIPT = Path(__file__).with_name("as_sglang_runs_them.py")


@pytest.mark.slow
@pytest.mark.skipif(not IS_NEWER, reason="0.5.17 publishes its arguments otherwise")
def test_heads_compute_what_sglang_computes(target: Path, tmp_path: Path) -> None:
    """Red for a name, a shape, a norm's place, a mask, a position or a token that is off by one."""
    how = {"layer_ids": (0, 2), "dtype": torch.float32}
    hot = {"hot_tokens": range(3, 19), "num_kv_heads": 1, "head_dim": 16}
    folders = [
        new_head("eagle3", target, tmp_path / "eagle3", **how),
        new_head("eagle3", target, tmp_path / "hot", **hot, **how),
        new_head("dflash", target, tmp_path / "dflash", num_layers=2, block_size=5, **how),
    ]
    told = printed(
        sys.executable, SCRIPT, target, *folders, env={**os.environ, "SGLANG_PLATFORM": "smc_cpu"}
    )
    by_folder = json.loads(told.splitlines()[-1])
    # The token embedding is the target's.
    bare = [["model.embed_tokens.weight"], ["model.embed_tokens.weight"], []]
    assert [kind["bare"] for kind in by_folder.values()] == bare
    assert max(kind["difference"] for kind in by_folder.values()) < 1e-5
