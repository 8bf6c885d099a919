"""Drafts are read in the formats that they are published in; what is wrong with one is named."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published_drafts import as_speculators, read, rewrite, write
from sglang.srt import models
from sglang.srt.utils.hf_transformers_utils import get_config
from transformers import LlamaConfig

from sglang_smc.drafts import checkpoint, reading
from sglang_smc.drafts.heads import BY_CLASS, eagle3
from sglang_smc.models import draft_config, head_parts
from sglang_smc.models import head_kinds as kinds
from sglang_smc.proposers.dflash import BlockHead
from sglang_smc.proposers.dflash2 import DFlash2Head
from sglang_smc.proposers.domino import DominoHead
from sglang_smc.proposers.lilicorr import LiLiCorrHead

PAIR = Path(__file__).parents[2] / "bench" / "pair"
EAGLE3, DFLASH, DSPARK = (PAIR / name for name in ("eagle3", "dflash", "dspark"))
TARGET = SimpleNamespace(
    hf_config=LlamaConfig(hidden_size=256, vocab_size=512),
    hidden_size=256,
    vocab_size=512,
    num_hidden_layers=5,
    model_path=str(PAIR / "target"),
    revision=None,
)
IDS = eagle3.EAGLE3_LAYERS


def opened(folder: str | Path) -> Any:
    """What a server knows of a draft by its configuration, as read from a folder."""
    config = draft_config.read(get_config, str(folder), False)
    return SimpleNamespace(
        hf_config=config,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        model_path=str(folder),
        revision=None,
    )


def problems(folder: str | Path, num_steps: int = 4) -> list[str]:
    target: Any = TARGET
    return [one.what for one in kinds.draft_problems(opened(folder), target, num_steps)]


# --- Formats


@pytest.mark.parametrize("head", [EAGLE3, DFLASH, DSPARK], ids=lambda head: head.name)
def test_a_speculators_checkpoint_says_what_sglangs_keys_say(head: Path, tmp_path: Path) -> None:
    """Red where layers are counted as there, or a null or a flag of the target stays."""
    told = opened(rewrite(head, tmp_path)).hf_config.to_dict()
    plain = opened(head).hf_config.to_dict()
    assert told["architectures"] == plain["architectures"]
    read_here = ("hidden_size", "num_attention_heads", "rope_parameters", "head_dim", "vocab_size")
    read_here += ("eagle_config", "dflash_config", "block_size", "markov_rank")
    assert [told.get(name) for name in read_here] == [plain.get(name) for name in read_here]
    assert told["tie_word_embeddings"] is False and "target_hidden_size" not in told
    assert reading.num_tokens(told) == 4 and reading.target_name(told) == "a/target"
    assert reading.normalized(told) == told
    assert problems(tmp_path) == [] == problems(head)


def test_what_speculators_leaves_out_has_its_defaults() -> None:
    """A layer without a name is Qwen3's; its norms are known before a tensor is seen."""
    layer = {"hidden_size": 64, "num_hidden_layers": 1}
    told = {reading.SPECULATORS: "eagle3", "transformer_layer_config": layer}
    found = reading.normalized(told)
    assert found["head_dim"] == 128 and found["model_type"] == "qwen3" and found[eagle3.QK_NORM]
    assert "eagle_config" not in found


@pytest.mark.parametrize(
    ("kind", "given", "drafts"),
    [
        ("dspark", {}, False),  # of before July 2026
        ("dspark", {"sample_from_anchor": True}, True),
        ("dspark", {"sample_from_anchor": False}, False),
        ("dflash", {}, False),
        ("dflash", {"sample_from_anchor": True}, True),
    ],
)
def test_the_anchor_drafts_by_the_rules_of_a_files_age(
    kind: str, given: dict[str, Any], drafts: bool
) -> None:
    config, _ = read(PAIR / kind)
    told = as_speculators(config)
    del told["sample_from_anchor"]
    found: Any = SimpleNamespace(hf_config=LlamaConfig(**reading.normalized(told | given)))
    assert kinds.drafter_of(found).first_row(found) == 1 - drafts


@pytest.mark.parametrize("given", [True, False])
def test_a_block_is_as_long_as_its_rows_that_draft(given: bool, tmp_path: Path) -> None:
    """8 rows draft 8 tokens from the anchor on, 7 without it."""
    folder = rewrite(DSPARK, tmp_path, sample_from_anchor=given)
    assert (problems(folder, num_steps=8) == []) == given
    assert problems(folder, num_steps=7) == []


def test_eagles_authors_class_is_that_of_heads(tmp_path: Path) -> None:
    """Their files are pickled, in float16."""
    config, tensors = read(EAGLE3)
    named = config | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(named))
    half = {name: one.half() for name, one in tensors.items()}
    torch.save(half, tmp_path / "pytorch_model.bin")
    assert kinds.kind_of(opened(tmp_path)) == "eagle3"
    assert problems(tmp_path) == []


def nested(*sections: str, **more: Any) -> dict[str, Any]:
    """Return the shipped DSpark head's configuration with the Markov head's in sections."""
    config, _ = read(DSPARK)
    markov = {name: config.pop(name) for name in ("markov_rank", "markov_head_type")}
    for name in sections:
        config[name] = config.get(name, {}) | markov
    return config | {"architectures": ["DSparkDraftModel"]} | more


@pytest.mark.parametrize("sections", [("dflash_config",), ("dspark_config",)])
def test_a_markov_head_is_read_within_its_section(sections: tuple[str], tmp_path: Path) -> None:
    """SpecForge writes it so, and SGLang's class reads the settings outside."""
    config = nested(*sections)
    config["dflash_config"] |= {"projector_type": "dspark", "sample_from_anchor": False}
    write(tmp_path, config, read(DSPARK)[1])
    assert problems(tmp_path) == []
    told = opened(tmp_path).hf_config.to_dict()
    assert (told["markov_rank"], told["sample_from_anchor"]) == (64, False)
    assert "dspark_config" not in told and reading.normalized(told) == told
    assert BY_CLASS["DSparkDraftModel"].sizes(config) == BY_CLASS["DSparkDraftModel"].sizes(told)  # pyright: ignore[reportOptionalCall]


def test_a_setting_has_one_value() -> None:
    with pytest.raises(ValueError, match="markov_rank of the configuration is 9 in one section"):
        reading.normalized(nested("dflash_config", markov_rank=9))
    assert reading.normalized(nested("dflash_config", markov_rank=64))["markov_rank"] == 64


VLLM = ["Eagle3LlamaForCausalLM", "Eagle3Qwen3vlForCausalLM"]


@pytest.mark.parametrize("name", VLLM)
def test_vllms_class_of_eagle3_is_sglangs(name: str, tmp_path: Path) -> None:
    config, tensors = read(EAGLE3)
    write(tmp_path, config | {"architectures": [name]}, tensors)
    assert problems(tmp_path) == [] and kinds.kind_of(opened(tmp_path)) == "eagle3"


def test_specforges_domino_is_a_block_with_a_projector() -> None:
    config, _ = read(DFLASH)
    told = reading.normalized(config | {"architectures": ["DominoDraftModel"]})
    assert kinds.drafter_of(SimpleNamespace(hf_config=LlamaConfig(**told))) is DominoHead  # pyright: ignore[reportArgumentType]


def test_a_block_is_causal_where_vllm_says_so() -> None:
    config, _ = read(DFLASH)
    for causal in (True, False):
        config["dflash_config"]["causal"] = causal
        assert reading.normalized(config)["is_causal"] is causal


@pytest.mark.parametrize("head", [EAGLE3, DFLASH, DSPARK], ids=lambda head: head.name)
def test_what_concerns_training_is_no_setting(head: Path, tmp_path: Path) -> None:
    """Releases 0.5 and 0.6 save the first."""
    rewrite(head, tmp_path, max_anchors=3072, embed_requires_grad=True)
    assert problems(tmp_path) == []


def test_another_file_is_read_in_place_of_config_json(tmp_path: Path) -> None:
    """Of `--decrypted-draft-config-file`, as stock SGLang does."""
    config, tensors = read(EAGLE3)
    write(tmp_path, {"ciphered": True}, tensors)
    file = tmp_path / "flat.json"
    file.write_text(json.dumps(config))
    names = ("speculative_draft_model_path", "decrypted_draft_config_file", "model_path")
    given = dict(zip(names, (str(tmp_path), str(file), "target"), strict=True))
    given |= {"speculative_draft_model_revision": None, "trust_remote_code": False}
    assert kinds.reads_states(SimpleNamespace(**given))


def test_a_downloaded_name_is_read_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--a--head"
    rewrite(EAGLE3, repository / "snapshots" / "1f")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1f")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert draft_config.read(get_config, "a/head", False).eagle_config == {IDS: [0, 2, 3]}


# --- What is wrong with a checkpoint


def without(*names: str) -> Any:
    return lambda tensors: {name: one for name, one in tensors.items() if name not in names}


def behind(prefix: str) -> Any:
    return lambda tensors: {prefix + name: one for name, one in tensors.items()}


def plus(**more: torch.Tensor) -> Any:
    return lambda tensors: tensors | {name.replace("_0_", ".0."): one for name, one in more.items()}


def cut(rows: int, d2t: torch.Tensor | None) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = tensors | {"lm_head.weight": tensors["lm_head.weight"][:rows]}
        return found if d2t is None else found | {"d2t": d2t}

    return change


FEW = {"draft_vocab_size": 448}
ZEROS = torch.zeros(448, dtype=torch.int64)
NORM = torch.ones(64)


@pytest.mark.parametrize(
    ("settings", "change", "told"),
    [
        ({}, behind("head."), "has tensors .* that LlamaForCausalLMEagle3 has no place for"),
        ({}, without("fc.weight"), r"lacks a tensor fc\.weight that"),
        ({}, plus(extra=NORM), "has a tensor extra that .* has no place for"),
        (FEW, cut(448, None), "has draft_vocab_size 448 and no d2t"),
        (FEW, cut(448, torch.arange(64, 512)), "the target's ids themselves in d2t"),
        (FEW, cut(448, ZEROS[:400]), r"has a d2t of \[400\], and draft_vocab_size is 448"),
        (FEW, cut(448, ZEROS + 100), "whose ids run from 100 to 547"),
        (FEW, cut(448, ZEROS - torch.arange(448)), "and do not ascend"),
        (FEW, cut(400, ZEROS), r"lm_head\.weight of \[400, 256\] instead of \[448, 256\]"),
        ({"eagle_config": {IDS: [0, 2, 2]}}, None, r"layers \[0, 2, 2\] .* \[2\] more than once"),
        ({"eagle_config": {}}, None, r"layers \[1, 1, 1\] .* more than once"),
    ],
)
def test_a_head_that_would_draft_noise_is_refused(
    settings: dict[str, Any], change: Any, told: str, tmp_path: Path
) -> None:
    """All of these loaded, and drafted one token a pass."""
    config, tensors = read(EAGLE3)
    write(tmp_path, config | settings, change(tensors) if change else tensors)
    found = problems(tmp_path)
    assert len(found) >= 1 and re.search(told, "; ".join(found)), found


def test_more_is_told_of_block_heads(tmp_path: Path) -> None:
    config, tensors = read(DSPARK)
    table = torch.randn(512, 256)
    write(tmp_path / "own", config, tensors | {"embed_tokens.weight": table})
    assert "embed_tokens.weight of its own" in problems(tmp_path / "own")[0]
    _, of_target = read(PAIR / "target")
    own = {"embed_tokens.weight": of_target["model.embed_tokens.weight"]}
    write(tmp_path / "same", config, tensors | own)
    assert problems(tmp_path / "same") == []
    layers = {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True}
    write(tmp_path / "window", config | layers | {"is_causal": False}, tensors)
    assert problems(tmp_path / "window") == []
    layers |= {"is_causal": False, "sliding_window": 7}
    write(tmp_path / "narrow", config | layers, tensors)
    assert "windows of 7 tokens" in problems(tmp_path / "narrow")[0]


MASK = {"embedding": torch.zeros(256), "mask_token_id": 0}


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (MASK, None),
        ({"embedding": torch.zeros(256)}, "without embedding or mask_token_id"),
        (MASK | {"per_position": True}, "of one embedding for each position"),
        (MASK | {"mask_token_id": 5}, "for token 5, and mask_token_id is 0"),
        (MASK | {"embedding": torch.zeros(8)}, "of 8 numbers, and a width of 256"),
        (b"x", "that is broken: .*mask_embedding.pt cannot be read"),
    ],
)
def test_a_trained_mask_fits_its_head(mask: Any, told: str | None, tmp_path: Path) -> None:
    write(tmp_path, *read(DSPARK))
    file = tmp_path / checkpoint.MASK
    file.write_bytes(mask) if isinstance(mask, bytes) else torch.save(mask, file)
    found = problems(tmp_path)
    assert found == [] if told is None else re.search(told, found[0]) and len(found) == 1


@pytest.mark.parametrize("drafter", [DFlash2Head, DominoHead, LiLiCorrHead])
def test_older_releases_have_no_class_of_newer_blocks(
    drafter: type[BlockHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "releases", drafter.releases._replace(is_installed=False))
    target: Any = TARGET
    found = drafter.problems(opened(DFLASH), target, 4)
    name = drafter.shown
    assert f"is a {name} head, for which SGLang has a class in {drafter.releases.name}" in found


@pytest.mark.parametrize(
    ("settings", "change", "found"),
    [
        ({"tie_word_embeddings": True}, None, {"tie_word_embeddings": False}),
        ({}, without("lm_head.weight"), {"draft_vocab_size": None, "tie_word_embeddings": False}),
        (
            {"tie_word_embeddings": True},
            without("lm_head.weight"),
            {"draft_vocab_size": None, "tie_word_embeddings": False},
        ),
        (
            {},
            lambda tensors: (
                tensors
                | {
                    f"midlayer.self_attn.{name}.weight": NORM.clone()
                    for name in ("q_norm", "k_norm")
                }
            ),
            {eagle3.QK_NORM: True},
        ),
    ],
    ids=["tied flag", "no LM head", "no LM head, tied flag", "norms of queries and keys"],
)
def test_saved_tensors_decide(
    settings: dict[str, Any], change: Any, found: dict[str, Any], tmp_path: Path
) -> None:
    """A flag that was copied from a target, and what a configuration does not say."""
    config, tensors = read(EAGLE3)
    write(tmp_path, config | settings, change(tensors) if change else tensors)
    told = opened(tmp_path).hf_config.to_dict()
    assert {name: told.get(name) for name in found} == found
    assert problems(tmp_path) == []


def test_settings_without_a_meaning_here_are_refused(tmp_path: Path) -> None:
    rewrite(EAGLE3, tmp_path, norm_of_tomorrow=True, off=False)
    assert problems(tmp_path) == [
        "sets norm_of_tomorrow in its config.json, which nothing here reads"
    ]


@pytest.mark.parametrize("kind", ["peagle", "xpress", "mtp", "of tomorrow"])
def test_other_types_of_speculators_are_named(kind: str, tmp_path: Path) -> None:
    rewrite(EAGLE3, tmp_path, speculators_model_type=kind)
    assert f"speculators_model_type is '{kind}'" in problems(tmp_path)[0]


PARTS = "Assistant|DFlash|DSpark|Eagle|NextN|MTP|LiLiCorr"


def test_no_draft_class_is_taken_for_a_language_model() -> None:
    """All names of SGLang's that look like a draft's."""
    files = Path(models.__path__[0]).glob("*.py")
    found = {
        name
        for file in files
        for name in re.findall(rf"^class (\w*(?:{PARTS})\w*)\(", file.read_text(), re.M)
        if re.search(r"Model$|LM|NextN$|MTP$|Generation$|Spark$", name) and "Deepstack" not in name
    }
    assert len(found) > 30
    target: Any = TARGET
    for name in found - BY_CLASS.keys():
        config: Any = SimpleNamespace(hf_config=LlamaConfig(architectures=[name]))
        (told,) = (one.what for one in kinds.draft_problems(config, target, 4))
        assert name in told and told.startswith("is a"), told


# --- Weights as they are loaded


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2, bias=False)
        self.norm = torch.nn.LayerNorm(2, bias=False)
        self.lm_head = torch.nn.Linear(2, 2, bias=False)

    def load_weights(self, given: Any) -> None:
        """As SGLang's classes: what is not there is not missed."""
        parameters = dict(self.named_parameters())
        for name, tensor in given:
            parameters[name].data[: len(tensor)] = tensor


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fc.weight": torch.eye(2), "norm.weight": torch.ones(2)}, None),
        ({"fc.weight": torch.eye(2)}, r"no weights for norm\.weight of Layers"),
        ({"fc.weight": torch.eye(2)[:1], "norm.weight": torch.ones(2)}, r"for fc\.weight"),
    ],
    ids=["whole", "a norm is missing", "a part is missing"],
)
def test_parameters_that_stay_unset_are_named(given: dict[str, Any], told: str | None) -> None:
    """But for the LM head, which may be the target's: then it has to be set by the end."""
    head = Layers()
    if told is not None:
        with pytest.raises(ValueError, match=told):
            head_parts.load_whole(head, head.load_weights, given.items())
        return
    head_parts.load_whole(head, head.load_weights, given.items())
    assert not head_parts.is_set(head.lm_head.weight)
    with pytest.raises(ValueError, match=r"no weights for lm_head\.weight"):
        head_parts.require_set(head)
    head.lm_head.weight = torch.nn.Parameter(torch.eye(2))
    head_parts.require_set(head)


@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_a_list_of_tensors_is_that_of_a_trained_head(name: str) -> None:
    """The shipped heads have all tensors on it, and no other."""
    config, tensors = read(PAIR / name)
    given = {reading.renamed(one) for one in tensors}
    assert given == set(reading.expected(config) or ())
    shapes = checkpoint.shapes_in(PAIR / name)
    assert list(reading.problems(config, shapes, partial(checkpoint.tensor_in, PAIR / name))) == []
