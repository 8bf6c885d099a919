"""Heads: no text sees another one, and their folders; test_golden.py runs them in SGLang."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_smc_tools.distill.checkpoints import load_head, new_head
from sglang_smc_tools.distill.drafts import TrainableDraft, load_draft
from sglang_smc_tools.distill.heads import MTP
from sglang_smc_tools.distill.teacher import Example, Lesson, Teacher, collate

CPU = torch.device("cpu")
DEPTH = 3
ANCHORS = torch.tensor([[4, 7]])
WRONG_LAYERS = ((3,), (2, 0), (0, 0), (-1,), ())


@pytest.fixture(params=["eagle3", "mtp", "dflash", "dspark"])
def head(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> TrainableDraft:
    layers = {} if request.param == "mtp" else {"layer_ids": (0, 2)}
    new_head(request.param, target, tmp_path, **layers, dtype=torch.float32)
    return load_draft(tmp_path, target, CPU)


def lesson(
    teacher: Teacher, head: TrainableDraft, ids: list[int], other: list[int] | None = None
) -> Lesson:
    """Of a text, in a batch with another one."""
    rows = [Example(row, 2) for row in (ids, *([other] if other else []))]
    return teacher.teach(collate(rows, CPU), head.layer_ids)


TEXT = [3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 22, 23]


def test_states_before_an_anchor_are_read_and_no_others(
    head: TrainableDraft, teacher: Teacher
) -> None:
    """The first of them, too, and for the first anchor none that only the second one has."""
    given = lesson(teacher, head, TEXT)
    before = head.logits(teacher, given, ANCHORS, DEPTH)[:, 0]
    for place, is_read in ((0, True), (3, True), (4, False), (6, False), (11, False)):
        features = given.features.clone()
        features[:, place] += 5.0
        after = head.logits(teacher, given._replace(features=features), ANCHORS, DEPTH)[:, 0]
        assert torch.allclose(before, after, atol=1e-6) != is_read


def test_what_stands_beside_a_text_changes_nothing(head: TrainableDraft, teacher: Teacher) -> None:
    """Neither padding nor another text nor another anchor."""
    beside = lesson(teacher, head, TEXT, [2] * 20)
    alone = head.logits(teacher, lesson(teacher, head, TEXT), ANCHORS[:, :1], DEPTH)
    both = head.logits(teacher, beside, ANCHORS.expand(2, -1), DEPTH)
    assert torch.allclose(alone[0, 0], both[0, 0], atol=1e-5)


def test_a_head_of_some_tokens(target: Path, tmp_path: Path) -> None:
    hot = [2, 3, 5, 8, 13, 21]
    new_head("eagle3", target, tmp_path, hot_tokens=hot, num_heads=2, num_kv_heads=1, head_dim=8)
    stored = load_file(tmp_path / "model.safetensors")
    assert (stored["d2t"] + torch.arange(6)).tolist() == hot
    assert stored["t2d"].nonzero()[:, 0].tolist() == hot
    assert load_head(tmp_path, target).hot.tolist() == hot


def test_weights_come_back(head: TrainableDraft, target: Path, tmp_path: Path) -> None:
    """Under the names of public checkpoints, which may begin with `model.`; others are left."""
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    own = dict(head.module.named_parameters())
    if isinstance(head.module, MTP):  # all of SGLang's class begin so
        new_names = {name: name.replace("layer.", "model.mtp_layers.0.", 1) for name in own}
        assert set(stored) == set(new_names.values())
    else:
        new_names = {name: f"model.{name.replace('midlayer', 'layers.0')}" for name in own}
        assert set(stored) == set(own)
    renamed = {new_names[name]: weight.detach() + 1 for name, weight in own.items()}
    save_file({**renamed, "model.embed_tokens.weight": torch.zeros(1)}, file)
    again = load_draft(tmp_path, target, CPU)
    for name, weight in again.module.named_parameters():
        assert torch.equal(weight, own[name] + 1)


def test_a_seed_fixes_every_weight(head: TrainableDraft, target: Path, tmp_path: Path) -> None:
    """Red where one is drawn by torch's own state, as biases once were."""
    kind = type(head.module).__name__.lower()
    own = {name: weight.clone() for name, weight in head.module.named_parameters()}
    layers = {} if kind == "mtp" else {"layer_ids": (0, 2)}
    new_head(kind, target, tmp_path / "again", **layers, dtype=torch.float32)
    for name, weight in load_draft(tmp_path / "again", target, CPU).module.named_parameters():
        assert torch.equal(weight, own[name]), name


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        # The last of four layers cannot be had, and SGLang hands layers out in ascending order.
        *(("eagle3", {"layer_ids": ids}, "allowed: 0 to 2 .*ascending") for ids in WRONG_LAYERS),
        ("dflash", {"block_size": 1}, "block_size is 1; allowed: 2 or more"),
        ("dflash", {"mask_token_id": 24}, "mask_token_id is 24; allowed: 0 to 23"),
        ("eagle3", {"num_kv_heads": 3}, "4 heads cannot share 3"),
    ],
)
def test_refusals_of_sizes(kind: str, given: dict, said: str, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        new_head(kind, target, tmp_path, **given)


def test_refusals_of_heads(target: Path, tmp_path: Path) -> None:
    """Red where a head is run as if it were a simpler one."""
    new_head("eagle3", target, tmp_path)
    edits = [
        ({"norm_output": True}, r"sets norm_output in config\.json"),
        ({"num_hidden_layers": 2}, "sets num_hidden_layers in config"),
        ({"num_nextn_predict_layers": 2}, "sets num_nextn_predict_layers in config"),
        ({"layer_types": ["sliding_attention"]}, "sets layer_types in config"),
        ({"hidden_size": 48}, "hidden_size is 48, and 32 in the target"),
        ({"intermediate_size": 20}, r"size mismatch for midlayer.mlp.gate_proj.weight"),
    ]
    sound = (tmp_path / "config.json").read_text()
    for settings, said in edits:
        config = json.loads(sound) | settings
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=said):
            load_head(tmp_path, target)
    other = json.loads(sound) | {"architectures": ["Qwen2ForCausalLMEagle"]}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="head of class Qwen2ForCausalLMEagle, which is not"):
        load_draft(tmp_path, target, CPU)
    (tmp_path / "config.json").write_text(sound)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        load_head(tmp_path, target)
