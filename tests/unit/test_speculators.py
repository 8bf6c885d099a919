"""What `speculators` saves is read here, and means the same: by its own classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block_laws import SELECTOR, Selecting
from published_drafts import as_speculators, read, write
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_smc.drafts import checkpoint, reading
from sglang_smc.drafts.heads import dflash, eagle3
from sglang_smc_tools import convert
from sglang_smc_tools.distill.checkpoints import load_head, new_head

speculators = pytest.importorskip(
    "speculators", reason="speculators is not installed: pip install '.[test]' has it"
)

from speculators.models.dflash.config import DFlashSpeculatorConfig  # noqa: E402
from speculators.models.dflash.core import DFlashDraftModel  # noqa: E402
from speculators.models.dflash2.config import DFlash2SpeculatorConfig  # noqa: E402
from speculators.models.dflash2.core import DFlash2DraftModel  # noqa: E402
from speculators.models.dspark.config import DSparkSpeculatorConfig  # noqa: E402
from speculators.models.dspark.core import DSparkDraftModel  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TARGET = str(PAIR / "target")
MODELS: dict[str, tuple[Any, Any]] = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}
PROPOSAL = {"algorithm": "eagle3", "default_proposal_method": "greedy"}


def saved(kind: str, folder: Path, model_type: str, **own: Any) -> tuple[Any, dict[str, Any]]:
    """Save a new head by its own class; return it and its config.json."""
    config, _ = read(PAIR / kind)
    layer: Any = AutoConfig.for_model(**config | {"model_type": model_type})
    layer._attn_implementation = "eager"
    told = as_speculators(config)
    given = {name: told[name] for name in told if name in MODELS[kind][0].model_fields}
    given |= {"transformer_layer_config": layer} | own
    for name in ("architectures", "speculators_version"):
        del given[name]
    model = MODELS[kind][1](MODELS[kind][0](**given))
    model.save_pretrained(folder)
    return model, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("draft_vocab_size", [512, 448])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_its_classes_save_is_whole(
    kind: str, model_type: str, draft_vocab_size: int, tmp_path: Path
) -> None:
    """Red where a class of its saves a tensor, or a setting, that has no meaning here."""
    if kind != "eagle3" and model_type == "llama":
        pytest.skip("its block heads have layers of Qwen3 alone")
    own = {"norm_before_fc": True, "norm_before_residual": True} if kind == "eagle3" else {}
    model, told = saved(kind, tmp_path, model_type, draft_vocab_size=draft_vocab_size, **own)
    shapes = checkpoint.shapes_in(tmp_path)
    found = reading.normalized(told, shapes)
    assert reading.UNKNOWN not in found and reading.normalized(found, shapes) == found
    shifts = torch.zeros(draft_vocab_size, dtype=torch.int64)
    assert list(reading.problems(found, shapes, {"d2t": shifts}.get)) == []
    assert found.get(eagle3.QK_NORM, False) == (kind == "eagle3" and model_type == "qwen3")
    assert found["hidden_size"] == model.config.transformer_layer_config.hidden_size


@pytest.mark.parametrize("markov", ["gated", "rnn"])
def test_a_markov_heads_layer_is_known(markov: str, tmp_path: Path) -> None:
    saved("dspark", tmp_path, "qwen3", markov_head_type=markov)
    shapes = checkpoint.shapes_in(tmp_path)
    found = reading.normalized(json.loads((tmp_path / "config.json").read_text()), shapes)
    assert list(reading.problems(found, shapes, {}.get)) == []


@pytest.mark.parametrize("kind", MODELS)
def test_the_tests_write_what_its_classes_do(kind: str, tmp_path: Path) -> None:
    """The same settings; `auto_map` and releases are of no account."""
    _, told = saved(kind, tmp_path, "qwen3")
    config, _ = read(PAIR / kind)
    ours = as_speculators(config)
    assert told["architectures"] == ours["architectures"]
    missing = ours.keys() - told.keys()
    assert not missing, missing


def exported(kind: str, folder: Path, **more: Any) -> str:
    """Write a shipped head for `speculators` by `sglang-smc convert`; ``more`` is the head's."""
    config, tensors = read(PAIR / kind)
    source = write(folder / "source", config | {"dtype": "float32"} | more, tensors)
    assert convert.main([source, str(folder / "theirs"), "--verifier", TARGET]) == 0
    return str(folder / "theirs")


def loaded(model: Any, folder: str, settings: Any) -> Any:
    """Load a head with one of its classes, and what the file lacks from the target.

    The class takes from the target what is NaN, and transformers leaves memory as it is there.
    """
    theirs = model.from_pretrained(folder, config=settings).float().eval()
    _, tensors = read(Path(folder))
    for name in {"embed_tokens.weight", "lm_head.weight"} - tensors.keys():
        torch.nn.init.constant_(theirs.get_parameter(name), torch.nan)
    theirs.load_verifier_weights()
    return theirs


def test_its_eagle3_class_has_our_logits(tmp_path: Path) -> None:
    """Three steps of the shipped head, over random texts, to 1e-4 in float32."""
    folder = exported("eagle3", tmp_path)
    of_theirs = Eagle3SpeculatorConfig.from_pretrained(folder)
    of_theirs.transformer_layer_config._attn_implementation = "eager"
    theirs = loaded(Eagle3DraftModel, folder, of_theirs)
    ours = load_head(folder, TARGET)
    torch.manual_seed(0)
    ids = torch.randint(2, 512, (1, 12))
    target: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    shown: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, output: shown.append(output))
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in (1, 3, 4)], -1)
        theirs(features[:, :-1], ids[:, 1:], torch.zeros_like(ids[:, 1:]), ttt_steps=3)
        anchors = torch.arange(1, 8).unsqueeze(0)
        embedded = target.get_input_embeddings()(ids)
        expected = ours(embedded, features, anchors, 3)  # [1, 7, 3, 512]
    found = torch.stack([step[:, :7] for step in shown], 2)
    assert found.shape == expected.shape and expected.abs().max() > 5
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_its_block_classes_have_our_logits(
    kind: str, from_anchor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All anchors of a random text, to 1e-4 in float32; of DSpark behind the text's own tokens."""
    folder = exported(kind, tmp_path, sample_from_anchor=from_anchor)
    of_theirs, model = MODELS[kind]
    settings = of_theirs.from_pretrained(folder)
    settings.transformer_layer_config._attn_implementation = "eager"
    theirs = loaded(model, folder, settings)
    shown: list[torch.Tensor] = []

    def show(logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        shown.append(logits)
        return logits.sum(), {}

    monkeypatch.setattr(f"{model.__module__}.compute_metrics", show)
    ours: Any = load_head(folder, TARGET)
    target: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    torch.manual_seed(0)
    ids = torch.randint(2, 512, (1, 24))
    anchors = torch.arange(1, 24 - ours.block_size).unsqueeze(0)  # [1, A]
    mask = torch.zeros_like(ids)
    mask[0, anchors] = 1
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in ours.layer_ids], -1)
        given = features, ids, mask, states[-1], torch.zeros_like(ids)
        theirs(*given, max_anchors=anchors.shape[1])
        embed = target.get_input_embeddings()
        masked = embed.weight[ours.mask_token_id]
        expected = target.lm_head(ours(embed(ids[0, anchors]), masked, features, anchors))
        if kind == "dspark":
            behind = anchors.unsqueeze(2) + torch.arange(expected.shape[2])
            expected = expected + ours.bias(ids[0, behind])
    found = shown[0].unflatten(1, (anchors.shape[1], -1))[:, :, ours.first :]
    assert found.shape == expected.shape and expected.abs().max() > 5
    assert torch.allclose(found, expected, atol=1e-4)


HOT = list(range(0, 512, 2))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("eagle3", {}),
        ("eagle3", {"hot_tokens": HOT}),
        ("dflash", {"num_layers": 2, "block_size": 5}),
        ("dspark", {"num_layers": 1, "block_size": 4, "markov_rank": 8}),
    ],
    ids=["eagle3", "eagle3 of hot tokens", "dflash", "dspark"],
)
def test_what_distill_writes_loads_there_and_here(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """In the class of `speculators`, which has all of its tensors, and back here and in SGLang."""
    given: dict[str, Any] = {"dtype": torch.float32, "scale": 1.0, "seed": 3}
    head = str(new_head(kind, TARGET, tmp_path / "head", **given, **sizes))
    theirs = str(tmp_path / "theirs")
    stock = tmp_path / "stock"
    assert convert.main([head, theirs, "--verifier", TARGET]) == 0
    loaded = MODELS[kind][1].from_pretrained(theirs).state_dict()
    _, written = read(Path(theirs))
    assert all(torch.equal(loaded[name].float(), one) for name, one in written.items())
    assert convert.main([theirs, str(stock)]) == 0
    told, tensors = read(stock)
    shapes = checkpoint.shapes_in(stock)
    assert list(reading.problems(reading.normalized(told, shapes), shapes, tensors.get)) == []
    before, back = (load_head(one, TARGET).state_dict() for one in (head, str(stock)))
    assert before.keys() == back.keys()
    assert all(torch.equal(weight, back[name]) for name, weight in before.items())


def saved_dflash2(folder: Path) -> Any:
    """Save a random DFlash2 head in four layers' widths of the shipped target; return it."""
    config, _ = read(PAIR / "dflash")
    layer: Any = AutoConfig.for_model(**config | {"num_hidden_layers": 2, "layer_types": None})
    layer._attn_implementation = "eager"
    told = as_speculators(config)
    told["speculators_config"]["verifier"] = {
        "name_or_path": TARGET,
        "architectures": ["LlamaForCausalLM"],
    }
    names = ("speculators_config", "draft_vocab_size", "aux_hidden_state_layer_ids")
    given = {name: told[name] for name in (*names, "mask_token_id")} | SELECTOR
    settings = DFlash2SpeculatorConfig(transformer_layer_config=layer, block_size=4, **given)
    model = DFlash2DraftModel(settings).float().eval()
    draw = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            scale = 0.3 if "_kernel" in name or "codebook" in name else weight.shape[-1] ** -0.5
            weight.data.normal_(std=scale, generator=draw)
    model.load_verifier_weights()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def test_its_dflash2_class_has_our_scores(tmp_path: Path) -> None:
    """Its file is whole, and what a selector makes of a text's anchors is the law of our tests."""
    theirs = saved_dflash2(tmp_path)
    shapes = checkpoint.shapes_in(tmp_path)
    found = reading.normalized(json.loads((tmp_path / "config.json").read_text()), shapes)
    assert reading.UNKNOWN not in found and reading.normalized(found, shapes) == found
    assert list(reading.problems(found, shapes, {}.get)) == []
    _, tensors = read(tmp_path)
    flat = found | {"layer_types": ["full_attention"] * 2}
    write(tmp_path / "flat", flat, tensors)
    block = {name: found["dflash_config"][name] for name in ("target_layer_ids", "mask_token_id")}
    plain = flat | {"architectures": [dflash.DFLASH], "dflash_config": block}
    ours: Any = load_head(write(tmp_path / "plain", plain, tensors), TARGET).double()
    law = Selecting(ours, tmp_path / "flat")
    target: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    torch.manual_seed(0)
    ids = torch.randint(2, 512, (1, 24))
    anchors = torch.arange(1, 20).unsqueeze(0)  # [1, A]
    mask = torch.zeros_like(ids)
    mask[0, anchors] = 1
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1] for layer in ours.layer_ids], -1)
    given = features, ids, mask, states[-1], torch.zeros_like(ids)
    hidden, unary, *_ = theirs._backbone_forward(*given, max_anchors=anchors.shape[1])
    behind = ids[0, anchors.unsqueeze(2) + torch.arange(3)]  # [1, A, 3]: before each mask
    rows = (part.unflatten(1, (anchors.shape[1], -1))[:, :, 1:] for part in (unary, hidden))
    candidates, scores = theirs.candidate_selector.select(*rows, behind)
    embed = target.get_input_embeddings()
    target = target.double()
    masked = embed.weight[ours.mask_token_id].double()
    filled = ours(embed(ids[0, anchors]).double(), masked, features.double(), anchors)
    probs = law.laws(target.lm_head(filled)[0], filled[0], behind[0])  # [A, 3, V]
    assert scores.std() > 0.5
    assert torch.allclose(probs.gather(2, candidates[0]).float(), scores[0].softmax(-1), atol=1e-4)
