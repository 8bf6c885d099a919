"""``sglang-smc convert``: what it writes for stock SGLang, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_drafts import read, rewrite, write

from sglang_smc.drafts import reading
from sglang_smc_tools import convert

DOMINO = {"projector_type": "domino", "gru_hidden_dim": 4, "emb_dim": 4, "shift_label": True}
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


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_there_and_back_is_what_there_was(kind: str, tmp_path: Path) -> None:
    """From SGLang's keys to those of speculators and back; the target's name and K are new."""
    place = str(tmp_path / "theirs")
    target = str(PAIR / "target")
    assert convert.main([str(PAIR / kind), place, "--verifier", target]) == 0
    told, there = read(Path(place))
    assert told["speculators_config"]["verifier"]["name_or_path"] == target
    assert reading.num_tokens(told) == {"eagle3": 3, "dflash": 8, "dspark": 8}[kind]
    assert convert.main([place, str(tmp_path / "back")]) == 0
    found, back = read(tmp_path / "back")
    shipped, given = read(PAIR / kind)
    left_out = {"num_target_layers", "rope_theta", "bos_token_id", "use_sliding_window"}
    kept = shipped.keys() - left_out
    assert {name: found.get(name) for name in kept} == {name: shipped[name] for name in kept}
    own = {name.replace("midlayer.", "layers.0."): weight for name, weight in given.items()}
    for tensors in (there, back):
        assert tensors.keys() == own.keys()
        assert all(torch.equal(weight, own[name]) for name, weight in tensors.items())


def broken(folder: Path, settings: dict[str, Any], files: dict[str, bytes | None]) -> str:
    """A shipped block head with other settings and files; None: without it."""
    config, weights = read(PAIR / "dspark")
    write(folder, config | settings, weights)
    for name, content in files.items():
        file = folder / name
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
    return str(folder)


INDEX = b'{"weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}'


@pytest.mark.parametrize(
    ("settings", "files", "told"),
    [
        ({}, {"config.json": None}, "nor a folder with one"),
        ({}, {"config.json": b"[1]"}, "config.json is not a JSON object"),
        ({}, {"config.json": b"\xff"}, "config.json is not JSON: 'utf-8' codec"),
        ({}, {"model.safetensors": None}, "has no weights"),
        ({}, {"model.safetensors": b""}, "model.safetensors cannot be read"),
        ({}, {"model.safetensors.index.json": INDEX}, "lacks model-00002-of-00002.safetensors"),
        ({}, {"model.safetensors.index.json": b"{"}, "index.json cannot be read"),
        ({"hidden_size": None}, {}, "no whole number for hidden_size"),
        ({"num_hidden_layers": None, "vocab_size": None}, {}, "for num_hidden_layers, vocab_size"),
        ({"markov_rank": None}, {}, "no whole number for markov_rank"),
        ({"dflash_config": [3]}, {}, "dflash_config of the configuration is no JSON object"),
        ({"dflash_config": {"target_layer_ids": [None]}}, {}, "is [None], no list of layers"),
        ({"dflash_config": None}, {}, "names no layers of the target that it reads"),
        (
            {"block_size": "eight"},
            {},
            "block_size of the configuration is 'eight', no whole number",
        ),
        (
            {"speculators_config": {"proposal_methods": ["greedy"]}},
            {},
            "proposal_methods of the configuration is ['greedy'], no list of objects",
        ),
    ],
)
def test_a_partial_folder_is_refused_by_what_it_lacks(
    settings: dict[str, Any],
    files: dict[str, bytes | None],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of these ended with a traceback, or were written as if whole."""
    source = broken(tmp_path / "source", settings, files)
    words = [source, str(tmp_path / "theirs"), "--verifier", str(PAIR / "target")]
    assert convert.main(words) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "theirs").exists()


def test_a_layer_that_transformers_refuses_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = rewrite(PAIR / "dflash", tmp_path / "published")
    config, weights = read(Path(source))
    config["transformer_layer_config"]["hidden_size"] = None
    write(Path(source), config, weights)
    assert convert.main([source, str(tmp_path / "stock")]) == 2
    assert "transformer_layer_config of the configuration cannot be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["MiMoMTP"]}, "is a checkpoint of MiMoMTP"),
        ({"dflash_config": DOMINO}, "sets projector_type, which speculators has no part for"),
    ],
)
def test_what_speculators_has_no_part_for_is_refused(
    change: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights = read(PAIR / "dflash")
    config["dflash_config"] |= change.pop("dflash_config", {})
    source = write(tmp_path / "source", config | change, weights)
    words = [source, str(tmp_path / "theirs"), "--verifier", str(PAIR / "target")]
    assert convert.main(words) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "theirs").exists()


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
