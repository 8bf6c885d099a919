"""``sglang-smc convert``: what it writes for stock SGLang, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_drafts import read, rewrite, write

from sglang_smc_tools import convert

PAIR = Path(__file__).parents[3] / "bench" / "pair"


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_the_shipped_heads_come_back(
    kind: str, copied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the weights of the source, linked or copied."""
    source = rewrite(PAIR / kind, tmp_path / "published")
    words = [source, str(tmp_path / "stock"), *(["--copy"] if copied else [])]
    assert convert.main(words) == 0
    assert "--speculative-algorithm" in capsys.readouterr().out
    told, weights = read(tmp_path / "stock")
    shipped, _ = read(PAIR / kind)
    ours = {"dtype", "num_target_layers", "bos_token_id", "rope_theta", "use_sliding_window"}
    assert {name: told.get(name) for name in shipped.keys() - ours} == {
        name: shipped[name] for name in shipped.keys() - ours
    }
    assert not [name for name in told if "speculators" in name]
    assert weights.keys() == read(Path(source))[1].keys()
    assert (tmp_path / "stock" / "model.safetensors").is_symlink() != copied


def norms(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    own = {f"layers.0.self_attn.{name}.weight": torch.ones(64) for name in ("q_norm", "k_norm")}
    return weights | own


@pytest.mark.parametrize(
    ("settings", "change", "told"),
    [
        ({"norm_before_residual": True}, dict, "has a norm before the residual"),
        ({}, norms, "has norms of queries and keys"),
        ({}, lambda weights: {"fc.weight": weights["fc.weight"]}, "lacks tensors norm.weight"),
        ({"speculators_model_type": "peagle"}, dict, "is a checkpoint of peagle"),
        ({"norm_of_tomorrow": True}, dict, "sets norm_of_tomorrow"),
    ],
)
def test_what_stock_sglang_would_not_compute_is_refused(
    settings: dict[str, Any],
    change: Any,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = rewrite(PAIR / "eagle3", tmp_path / "published", **settings)
    config, weights = read(Path(source))
    write(Path(source), config, change(weights))
    assert convert.main([source, str(tmp_path / "stock")]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "stock").exists()


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = rewrite(PAIR / "eagle3", tmp_path / "published")
    assert convert.main([source, source]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert "speculators_model_type" in json.loads((Path(source) / "config.json").read_text())
