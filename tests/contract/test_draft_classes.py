"""SGLang's classes of drafts are run, or refused by their names: none is taken for a model."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from sglang_smc.drafts.heads import BY_CLASS
from sglang_smc.models.head_kinds import draft_problems
from sglang_smc.upstream import IS_NEWEST

MODELS = Path(str((find_spec("sglang") or SimpleNamespace(origin="")).origin)).parent / "srt/models"
#: Assignments of the names by which SGLang finds a module's models.
ENTRIES = re.compile(r"^EntryClass\b[^=\n]*= *(\[[^]]*\]|\w+)", re.M)
#: What a draft's module or class is called by, its beginning aside.
PARTS = re.compile(
    r"nextn|mtp|eagle|dflash|dspark|lilicorr|domino|draft|assistant|specul|medusa", re.I
)
#: Ends of the names of language models, and of models without a next-token head.
MODEL = re.compile(r"For[A-Z]\w+$")
#: Models of other names, none of them a draft's.
OTHERS = {
    *("BertModel", "CLIPModel", "ChatGLMModel", "Contriever", "EmbeddingGemma2Model"),
    *("EmbeddingGemmaModel", "GPT2LMHeadModel", "InternVLChatModel", "LLaDA2MoeModelLM"),
    *("Lfm2BidirectionalModel", "LlamaEmbeddingModel", "MiDashengLMModel", "MiniCPMO"),
    *("MiniCPMV", "MistralModel", "MultiModalityCausalLM"),
    *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"),
    *("NemotronH_Omni_Reasoning_V3", "POINTSV15ChatModel", "PixtralVisionModel"),
    *("QWenLMHeadModel", "Qwen3Model", "TransformersEmbeddingModel", "XLMRobertaModel"),
    *("TransformersMoEEmbeddingModel", "TransformersMultiModalEmbeddingModel"),
    "TransformersMultiModalMoEEmbeddingModel",
}


def entries() -> Iterator[tuple[str, str]]:
    """Yield the module and the class of each of SGLang's models, by its source alone."""
    for path in MODELS.rglob("*.py"):
        for value in ENTRIES.findall(path.read_text()):
            for name in re.findall(r"\w+", re.sub(r"#.*", "", value)):
                yield path.stem, name


def refusal(name: str) -> str:
    config = SimpleNamespace(hf_config=LlamaConfig(architectures=[name]))
    found: Any = draft_problems(*(config, config), 4, has_files=False)  # pyright: ignore
    return "".join(map(str, found))


@pytest.mark.skipif(not IS_NEWEST, reason="older releases have fewer classes")
def test_no_draft_class_is_taken_for_a_language_model() -> None:
    """Red for a class of a new kind, whatever its name, until it is run, refused or listed."""
    found = {name: module for module, name in entries()}
    drafts = {
        name
        for name, module in found.items()
        if PARTS.search(module) or PARTS.search(name) or not MODEL.search(name)
    } - OTHERS
    assert len(found) > 250 and set(BY_CLASS) <= drafts and len(drafts) > 40
    silent = [name for name in sorted(drafts - set(BY_CLASS)) if f"({name})" not in refusal(name)]
    assert silent == []


@pytest.mark.skipif(not IS_NEWEST, reason="older releases have fewer classes")
def test_aliases_of_classes_that_run_are_run() -> None:
    """A class without a body of its own is another name of its base."""
    classes = [one for path in MODELS.rglob("*.py") for one in classes_in(path.read_text())]
    aliases = {one.name for one in classes if base_of(one) in BY_CLASS and not has_body(one)}
    assert {"LingDSparkModel", "Lfm2DSparkDraftModel", "MuseGlimmerAssistantModel"} <= aliases
    assert aliases <= set(BY_CLASS)


def classes_in(source: str) -> Iterator[ast.ClassDef]:
    found = ast.parse(source).body if PARTS.search(source) else []
    return (one for one in found if isinstance(one, ast.ClassDef))


def base_of(one: ast.ClassDef) -> str:
    return ast.unparse(one.bases[0]) if one.bases else ""


def has_body(one: ast.ClassDef) -> bool:
    return any(not isinstance(line, ast.Pass | ast.Expr) for line in one.body)


def test_a_draft_of_the_future_is_one() -> None:
    for name in ("FooDraftModel", "BarAssistantForCausalLM", "K3DSparkModel"):
        assert f"({name})" in refusal(name)
    assert refusal("LlamaForCausalLM") == ""
